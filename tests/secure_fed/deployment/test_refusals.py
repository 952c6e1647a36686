"""What leaves a node when it refuses: the coordinator gets a kind of problem, and the owner the whole sentence."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from privacy.errors import BudgetExhausted, LedgerError, PlanError
from privacy.sampling import NotYourTurn
from protocols.errors import ParameterError, ProtocolError, RangeError, Tampering
from secure_fed.deployment import home
from secure_fed.deployment.envelope import Envelope
from secure_fed.deployment.home import JOURNAL, HomeError, Journal
from secure_fed.deployment.node import Expected, Node, refusal
from secure_fed.deployment.policy import PolicyError
from secure_fed.errors import ConfigError, DataError, MethodError, ModelError, RunDirectoryError, StorageError
from tests.secure_fed.deployment.parties import written
from tests.secure_fed.deployment.test_deployed_run import MASKED, PARTS, deployed

PRIVATE = "/srv/clinic/notes.csv, line 4: label 'Jane Doe'"
KINDS = (
    BudgetExhausted,
    LedgerError,
    PlanError,
    ParameterError,
    ProtocolError,
    RangeError,
    ConfigError,
    DataError,
    HomeError,
    MethodError,
    ModelError,
    RunDirectoryError,
    StorageError,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_that_may_quote_data_or_paths_leaves_the_node_as_a_kind(kind: type[Expected]) -> None:
    found = refusal(kind(PRIVATE))
    assert found.error == kind.__name__
    assert not any(part in found.sentence for part in ("clinic", "line 4", "Jane"))
    assert "secure-fed node status" in found.sentence


def test_the_setting_of_an_error_is_named_and_no_other_text_in_its_place() -> None:
    assert "about data.label;" in refusal(DataError(PRIVATE).about("data.label", "Jane", "")).sentence
    assert "Jane" not in refusal(DataError(PRIVATE).about("Jane.Doe", "Jane", "")).sentence


@pytest.mark.parametrize("kind", [PolicyError, NotYourTurn, Tampering])
def test_an_error_about_the_charter_or_the_request_is_sent_whole(kind: type[Expected]) -> None:
    assert refusal(kind("more than most_rounds = 1")).sentence == "more than most_rounds = 1"


def test_a_label_of_a_members_data_stays_on_its_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    party = deployed(tmp_path, MASKED, {"federation": {"rounds": 1}})
    rows = [*PARTS[1][:3], {**PARTS[1][3], "label": "HIV positive (Jane Doe)"}, *PARTS[1][4:]]
    written(party.homes[1] / "train.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        party.conduct()
    said = "\n".join(party.said)
    assert "node 101 does not take part: its data do not fit the charter" in said
    assert "Jane" not in said
    assert str(party.homes[1]) not in said
    noted = next(line["what"] for line in Journal(party.homes[1]).last(10, refused=True))
    assert "label 'HIV positive (Jane Doe)' never occurs" in noted
    assert noted.endswith("to another column"), "the whole sentence"
    assert noted in caplog.text, "agent.log has it too"


def test_strangers_push_nothing_out_of_the_journal(tmp_path: Path) -> None:
    """Anybody can send envelopes: they have a file of their own, and each of their lines is short."""
    (tmp_path / "own.csv").write_text("text,label\na,b\n")
    home.new_node(tmp_path / "n", name="n", train=[str(tmp_path / "own.csv")], coordinator="-".join(["abcd"] * 10))
    Node(tmp_path / "n").answer(Envelope(b'{"kind": "%s"}' % (b"x" * 100_000)))
    (line,) = Journal(tmp_path / "n").last(10, known=False)
    assert (line["asked"], line["refused"]) == ("unknown", True)
    assert Journal(tmp_path / "n").last(10) == []
    Journal(tmp_path).note("x" * 100_000, "x" * 100_000, "x" * 100_000, refused=True)
    assert (tmp_path / JOURNAL).stat().st_size < 10_000
