"""A node: its owner's function in place of the charter's steps, its units, and what leaves it when it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch

from privacy.entropy import SeededEntropy
from privacy.errors import BudgetExhausted, LedgerError, PlanError
from privacy.participation import NotYourTurn
from protocols.errors import ParameterError, ProtocolError, RangeError, Tampering
from secure_fed.deployment import home, messages
from secure_fed.deployment.coordinator import assembled
from secure_fed.deployment.envelope import Envelope
from secure_fed.deployment.home import JOURNAL, Home, HomeError, Journal
from secure_fed.deployment.node import Expected, Node, refusal
from secure_fed.deployment.policy import PolicyError
from secure_fed.deployment.problem import of_coordinator, of_node
from secure_fed.errors import (
    ConfigError,
    DataError,
    MethodError,
    ModelError,
    OwnLoopError,
    RunDirectoryError,
    StorageError,
)
from secure_fed.learning import tasks
from secure_fed.learning.data import fingerprint, sources
from secure_fed.learning.data.rows import Vocabulary
from tests.cells import chosen, every
from tests.secure_fed import small_causal
from tests.secure_fed.deployment.parties import Deployed, founded, new_node, rows_of, written
from tests.secure_fed.deployment.test_charter import CHARTER
from tests.secure_fed.deployment.test_deployed_run import EXAMPLE, MASKED, ONE_ROUND, PARTS, SHARES, config_of, deployed

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
import torch

@dataclass
class Collator:
    width: int = 8

def train(model, examples, round):
    with Path(__file__).with_name("called").open("a") as file:
        print(round, len(examples), file=file)
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(0.25)
    return 1.5

def spoil(model, examples, round):
    with torch.no_grad():
        next(one for one in model.parameters() if not one.requires_grad).add_(1.0)

NUMBER = 3
"""


def with_functions(tmp: Path, table: dict[str, dict[str, Any]], nodes: int, name: str = "train") -> Deployed:
    """Four nodes, of which the first ones have the function `name` of their own file."""
    party = deployed(tmp, table, seed=5)
    for number, place in enumerate(party.homes[:nodes]):
        owned(place, f"mine.py:{name}")
        party.carrier.nodes_[100 + number] = Node(place, SeededEntropy(5))
    return party


def owned(place: Path, local: str, text: str = MINE) -> None:
    (place / "mine.py").write_text(text, encoding="utf-8")
    toml = (place / home.NODE).read_text(encoding="utf-8").replace('local = ""\n', "")
    (place / home.NODE).write_text(toml.replace("[node]\n", f"[node]\nlocal = {json.dumps(local)}\n"), encoding="utf-8")


def test_the_function_of_each_node_trains_its_model(tmp_path: Path) -> None:
    party = with_functions(tmp_path, ONE_ROUND, nodes=4)
    end = party.conduct().state.tensors.dense().parts()
    start = assembled(home.CoordinatorHome.load(party.folder)).initial.tensors.dense().parts()
    assert all(torch.allclose(end[name] - start[name], torch.tensor(0.25), atol=1e-5) for name in start)
    assert [(place / "called").read_text() for place in party.homes] == ["1 8\n"] * 4


def test_a_node_with_a_function_takes_part_beside_nodes_without(tmp_path: Path) -> None:
    party = with_functions(tmp_path, SHARES, nodes=1)
    result = party.conduct()
    assert result.state.round == 2
    assert result.state.tensors.is_finite()
    assert (party.homes[0] / "called").read_text() == "1 8\n2 8\n"
    assert not [line for line in party.said if "refuses" in line or "lost" in line]
    assert [Journal(place).last(9, refused=True) for place in party.homes] == [[]] * 4


def test_a_node_with_a_function_refuses_a_charter_that_protects_examples(tmp_path: Path) -> None:
    """Nobody sees whether the function clips each example's gradient, and the other members count on it."""
    party = with_functions(tmp_path, EXAMPLE, nodes=1)
    answers = [party.told(party.carrier.nodes_[node]) for node in (100, 101)]
    assert [isinstance(answer, messages.Refusal) for answer in answers] == [True, False]
    assert "privacy.unit" in answers[0].sentence  # type: ignore[union-attr]
    assert "privacy.unit" in Journal(party.homes[0]).last(9, refused=True)[0]["what"]
    assert not (party.homes[0] / "called").exists()


def test_a_function_that_changes_the_base_model_is_refused_and_told_to_the_owner_alone(tmp_path: Path) -> None:
    party = with_functions(tmp_path, ONE_ROUND, nodes=1, name="spoil")
    party.conduct()
    refused = Journal(party.homes[0]).last(9, refused=True)
    assert refused
    assert "frozen" in refused[0]["what"]
    assert not [line for line in party.said if "frozen" in line]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_node(tmp_path_factory.mktemp("node"))


@every(
    ("local", "text"),
    [
        *((local, MINE) for local in ("mine.py", "mine.py:", "other.py:train", "mine.py:learn", "mine.py:NUMBER")),
        ("mine.py:train", "def train(model): ..."),
        *(("mine.py:train", text) for text in ("this is no Python", "raise SystemError")),
    ],
)
def test_a_node_does_not_start_without_its_function(place: Path, local: str, text: str) -> None:
    before = (place / home.NODE).read_text(encoding="utf-8")
    owned(place, local, text)
    try:
        with pytest.raises((HomeError, ConfigError)) as refused:
            Node(place)
        assert refused.value.setting == "local"
        assert Home.load(place).local == local  # other commands execute no file
    finally:
        (place / home.NODE).write_text(before, encoding="utf-8")


PERSONS = 4  # row i is about person i modulo 4
UNITS = {
    "client": [list(range(8))],
    "person": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "example": [[index] for index in range(8)],
}


@pytest.mark.parametrize("unit", chosen(UNITS, ["person"]))
def test_the_units_of_a_node_are_its_clients_persons_or_examples(tmp_path: Path, unit: str) -> None:
    column = {"person_column": "person"} if unit == "person" else {}
    config = config_of(MASKED, {"privacy": {"unit": unit, "epsilon": 8.0, **column}})
    part = [row | {"person": f"p{index % PERSONS}"} for index, row in enumerate(rows_of(8, 1))]
    party = founded(tmp_path, config, [part] * 4, lambda number: None)
    declared = tuple(replace(one, examples=len(UNITS[unit])) for one in party.charter.members)
    charter, file = replace(party.charter, members=declared), party.homes[0] / "train.jsonl"
    classes = Vocabulary(charter.labels, charter.label_names)
    rows = sources.of_known_classes(tasks.build(charter.config.data), [file], classes, "data.train")
    problem = of_node(charter, charter.config, 0, [file])
    assert problem.unit_digest == fingerprint.of_units(rows, UNITS[unit])


def test_a_node_with_more_examples_than_it_may_count_as_does_not_take_part(tmp_path: Path) -> None:
    config = config_of({"federation": {"weighting": "examples", "cohort": 2}})
    party = founded(tmp_path, config, [rows_of(8, 1)] * 2, lambda number: None)
    few = tuple(replace(one, examples=7) for one in party.charter.members)
    with pytest.raises(DataError, match=r"declares 7 units and its data has 8 examples.*write a new card"):
        of_node(replace(party.charter, members=few), party.charter.config, 0, [party.homes[0] / "train.jsonl"])


def test_a_coordinator_asks_its_own_test_rows(tmp_path: Path) -> None:
    file = written(tmp_path / "test.jsonl", [{"text": f"w{n}", "target": "w1"} for n in range(9)])
    own: dict[str, dict[str, Any]] = {
        "data": {"task": "causal_lm", "text_b": "target", "metric": "f1"},
        "model": {"name": str(small_causal.make(tmp_path / "model")), "max_length": 16},
        "evaluation": {"generate": 3, "max_new_tokens": 4},
    }
    asked = of_coordinator(CHARTER, config_of(own), [file]).asked
    assert asked is not None
    assert list(asked.rows.text) == ["w0", "w3", "w6"]


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
    OwnLoopError,
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


def test_a_label_of_a_members_data_stays_on_its_machine(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED, {"federation": {"rounds": 1}})
    rows = [*PARTS[1][:3], {**PARTS[1][3], "label": "HIV positive (Jane Doe)"}, *PARTS[1][4:]]
    written(party.homes[1] / "train.jsonl", rows)
    with TestCase().assertLogs(level="WARNING") as logged:
        party.conduct()
    said = "\n".join(party.said)
    assert "node 101 does not take part: its data do not fit the charter" in said
    assert "Jane" not in said
    assert str(party.homes[1]) not in said
    noted = next(line["what"] for line in Journal(party.homes[1]).last(10, refused=True))
    assert "label 'HIV positive (Jane Doe)' never occurs" in noted
    assert noted.endswith("to another column"), "the whole sentence"
    assert noted in "\n".join(logged.output), "agent.log has it too"


def test_strangers_push_nothing_out_of_the_journal(tmp_path: Path, place: Path) -> None:
    """Anybody can send envelopes: they have a file of their own, and each of their lines is short."""
    Node(place).answer(Envelope(b'{"kind": "%s"}' % (b"x" * 100_000)))
    (line,) = Journal(place).last(10, known=False)
    assert (line["asked"], line["refused"]) == ("unknown", True)
    assert Journal(place).last(10) == []
    Journal(tmp_path).note("x" * 100_000, "x" * 100_000, "x" * 100_000, refused=True)
    assert (tmp_path / JOURNAL).stat().st_size < 10_000
