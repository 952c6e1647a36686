"""What a node's owner decides and sees: charters, federations that wait for a person, the status, and one budget for all.

No charter names the owner's ledger, and the policy's present limits count beside those of the ledger.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from privacy.ledger import Ledger
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.deployment import memberships, messages, node
from secure_fed.deployment.charter import fingerprint, local_fault, neutral
from secure_fed.deployment.home import CHARTER, FEDERATIONS, LEDGER, NODE, Home, Journal
from secure_fed.deployment.messages import Accepted, Refusal
from secure_fed.deployment.node import Node
from secure_fed.deployment.relay import held
from secure_fed.methods.method import RoundPlan
from secure_fed.rounds.transport import Request
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed.deployment.parties import Deployed, written
from tests.secure_fed.deployment.test_deployed_run import EXAMPLE, MASKED, PARTS, SHARES, deployed


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Each file's content and time of change, without the journal."""
    every = (path for path in sorted(folder.rglob("*")) if path.is_file() and "journal" not in path.name)
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in every}


def status(home: Path, *options: str) -> tuple[int, str]:
    """The exit status of `node status` while an agent runs, and its reason."""
    with held(home), printed() as lines:
        found = main(["node", "status", str(home), "--json", *options])
    (line,) = lines
    assert json.loads(line)["status"] == found
    return found, json.loads(line)["why"]


@contextmanager
def printed() -> Iterator[list[str]]:
    found: list[str] = []
    with patch("builtins.print", lambda *texts, sep=" ", **_: found.extend(sep.join(map(str, texts)).splitlines())):
        yield found


def test_a_check_states_terms_and_cost_and_changes_nothing(tmp_path: Path) -> None:
    party = deployed(tmp_path, SHARES)
    home, charter = party.homes[0], party.folder / CHARTER
    before = files(home)
    with printed() as lines:
        assert main(["node", "check", str(home), str(charter)]) == 0
    assert files(home) == before
    for member in party.charter.members:
        assert any(fingerprint(member.identity) in line and line.endswith(member.name) for line in lines)
    assert "it would cost epsilon 7.9" in lines[-1]
    assert isinstance(party.told(Node(home)), Accepted)
    assert files(home) != before, "accepting does change the folder"


def test_a_check_says_every_limit_that_refuses_and_loads_no_model(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED, most_rounds=1, methods=["fedlora"])
    refused = patch.object(node, "cost_of", side_effect=AssertionError("the model was loaded"))
    with printed() as lines, refused:
        assert main(["node", "check", str(party.homes[0]), str(party.folder / CHARTER)]) == 2
    assert [line.split()[-3:] for line in lines if line.startswith("refused: ")] == [
        ["not", "among", "methods"],
        ["most_rounds", "=", "1"],
    ]


def test_a_federation_waits_until_a_person_accepts_it(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED, accept="ask")
    at, home = party.carrier.nodes_[100], party.homes[0]
    folder = Home.load(home).federation(party.charter.digest)
    folder.mkdir(parents=True)  # as a kill leaves it before the charter is kept
    for _ in range(2):
        found = party.told(at)
        assert isinstance(found, Refusal)
        assert found.sentence == "this node's owner has not accepted the federation 'hospitals' yet"
    assert sorted(path.name for path in folder.iterdir()) == [CHARTER]
    assert status(home) == (2, f"a federation waits for its owner: secure-fed node accept {folder.name[:12]}")
    assert main(["node", "accept", str(home), "another"]) == 2
    assert isinstance(party.told(at), Refusal)
    assert main(["node", "accept", str(home), "hospitals"]) == 0
    assert isinstance(party.told(at), Accepted)
    assert status(home)[0] == 0
    other = replace(party.charter, name="hospitals too", run="another")
    assert isinstance(party.told(at, charter=other), Refusal), "one acceptance is for one charter"
    assert main(["node", "release", str(home), "hospitals too"]) == 0
    assert main(["node", "accept", str(home), "hospitals too"]) == 2, "closed for good"
    assert isinstance(party.told(at, charter=other), Refusal)


@pytest.mark.parametrize(("accept", "answer"), [("ask", Refusal), ("policy", Accepted)])
def test_federations_without_a_round_do_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept: str, answer: type
) -> None:
    monkeypatch.setattr(memberships, "_MOST_UNUSED", 2)
    party = deployed(tmp_path, MASKED, accept=accept)
    at, home = party.carrier.nodes_[100], party.homes[0]
    charters = [replace(party.charter, name=f"f{number}", run=str(number)) for number in range(4)]
    stranger = replace(charters[3], members=party.charter.members[1:])
    asked = (stranger, *charters[:3], charters[0])
    answers = [type(party.told(at, charter=one)) for one in asked]
    assert answers == [Refusal, answer, answer, Refusal, answer]
    kept = {path.name for path in (home / FEDERATIONS).iterdir()}
    assert kept == {one.digest.hex()[:32] for one in charters[:2]}
    checked = ["node", "check", str(home), str(party.folder / CHARTER)]
    assert main(checked) == 2
    assert main(["node", "release", str(home), "f0"]) == 0
    assert main(checked) == 0
    assert isinstance(party.told(at, charter=charters[2]), answer)
    assert {path.name for path in (home / FEDERATIONS).iterdir()} == {one.digest.hex()[:32] for one in charters[:3]}


def test_the_status_is_one_that_a_monitor_can_use_and_shows_what_the_node_joined(tmp_path: Path) -> None:
    party = deployed(tmp_path, SHARES)
    home, at = party.homes[0], party.carrier.nodes_[100]
    assert main(["node", "status", str(home)]) == 1, "no agent runs"
    assert status(home) == (1, "no coordinator has reached it yet")
    party.conduct()
    assert status(home)[0] == 0
    assert status(home, "--silent", "0")[0] == 0, "it has ended"
    kept = Home.load(home).federation(party.charter.digest) / CHARTER
    assert kept.read_bytes() == (party.folder / CHARTER).read_bytes()
    os.utime(kept, (0, 0))
    with printed() as lines, held(home):
        assert main(["node", "status", str(home)]) == 0
    (joined,) = [line for line in lines if kept.parent.name[:12] in line and "hospitals" in line]
    assert "hospitals  ended, 2 of 2 rounds, last contact 1970-01-01T00:00:00Z, epsilon 7.9" in joined
    for member in party.charter.members:
        assert any(fingerprint(member.identity) in line and line.endswith(member.name) for line in lines)
    assert isinstance(party.told(at), Accepted)
    assert time.time() - kept.stat().st_mtime < 100
    with patch("time.time", partial(float, time.time() + 9)):
        assert status(home, "--silent", "5")[0] == 1
    assert status(home)[0] == 0
    assert isinstance(party.told(at, messages.Ended()), Refusal)
    assert status(home) == (
        2,
        "the last request was refused: the server asks for 'ended', which a node does not answer",
    )
    assert isinstance(party.told(at), Accepted)
    assert status(home)[0] == 0


# The budget.


def offered(party: Deployed, node: Node, name: str) -> tuple[messages.Message, str]:
    """The node's answer to the charter of another federation of the same terms, and the line of its journal."""
    answer = party.told(node, charter=replace(party.charter, name=name, run=name))
    return answer, Journal(node.home.folder).last(1)[0]["what"]


def reserved(party: Deployed, node: Node, name: str) -> messages.Message:
    """The node's answer to the first request of a federation that it has accepted, for a round that is not its turn."""
    request = Request(99, "first", RoundPlan((), (), ("first",)), 0.1, "", Tensors())
    answer: messages.Message = party.told(node, request, replace(party.charter, name=name, run=name))
    return answer


def with_policy(party: Deployed, old: str, new: str) -> Node:
    """The first node, started anew with a changed line of its policy."""
    text = (party.homes[0] / NODE).read_text()
    assert old in text
    (party.homes[0] / NODE).write_text(text.replace(old, new))
    return Node(party.homes[0])


def test_a_node_spends_its_own_budget_once_for_all_federations(tmp_path: Path) -> None:
    """Of delta; `test_releasing.py` has the same of epsilon."""
    party = deployed(tmp_path, SHARES, most_epsilon=1000.0, most_delta=1.5e-5)
    node = party.carrier.nodes_[100]
    assert isinstance(offered(party, node, "first")[0], messages.Accepted)
    assert isinstance(offered(party, node, "second")[0], messages.Accepted), "nothing is reserved yet"
    reserved(party, node, "second")
    found, noted = offered(party, node, "first")
    assert isinstance(found, Refusal)
    assert found.error == "BudgetExhausted"
    assert "delta 1.5e-05, the limit of ledger.sqlite" in noted
    assert (
        "a higher one in node.toml does not raise: take no part, or give back with `secure-fed node release`" in noted
    )
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0
    for _ in range(3):
        offered(party, node, "first")
    assert not before or len(list(Path("/proc/self/fd").iterdir())) <= before, "a refused offer leaves no file open"


def test_the_default_delta_admits_several_federations(tmp_path: Path) -> None:
    party = deployed(tmp_path, SHARES)
    node = party.carrier.nodes_[100]
    for name in ("first", "second", "third"):
        assert isinstance(offered(party, node, name)[0], messages.Accepted)
        reserved(party, node, name)
    assert Ledger.open(party.homes[0] / LEDGER).spent().delta == pytest.approx(3e-5)


def test_a_lower_limit_of_the_policy_holds_for_the_total_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger keeps the limit that it was created with; the policy's present limit counts beside it."""
    party = deployed(tmp_path, SHARES, most_epsilon=100.0)
    assert isinstance(offered(party, party.carrier.nodes_[100], "first")[0], messages.Accepted)
    reserved(party, party.carrier.nodes_[100], "first")
    node = with_policy(party, "most_epsilon = 100.0", "most_epsilon = 9.0")
    assert isinstance(offered(party, node, "first")[0], messages.Accepted), "it has reserved, within 9"
    found, noted = offered(party, node, "second")
    assert isinstance(found, Refusal)
    assert "epsilon 9.0, the limit of the policy in node.toml: raise it there, or take no part" in noted
    assert main(["node", "status", str(party.homes[0])]) == 1
    assert "of 9\n" in capsys.readouterr().out
    node = with_policy(party, "most_epsilon = 9.0", "most_epsilon = 1000.0")
    assert isinstance(offered(party, node, "second")[0], messages.Accepted)
    assert main(["node", "status", str(party.homes[0])]) == 1
    assert "of 100\n" in capsys.readouterr().out, "the ledger's own limit is lower"


@pytest.mark.parametrize("tables", [(SHARES,), pytest.param((EXAMPLE,), marks=pytest.mark.nightly)])
def test_changed_data_of_a_node_go_on_with_its_budget(tmp_path: Path, tables: Any) -> None:
    """Both states of the data are the same people's, so their costs add up in one ledger."""
    party = deployed(tmp_path, *tables)
    node = party.carrier.nodes_[100]
    assert isinstance(offered(party, node, "first")[0], messages.Accepted)
    reserved(party, node, "first")
    written(party.homes[0] / "train.jsonl", [{**PARTS[0][0], "text": "changed"}, *PARTS[0][1:]])
    assert isinstance(offered(party, node, "second")[0], messages.Accepted)
    reserved(party, node, "second")
    ledger = Ledger.open(party.homes[0] / LEDGER)
    assert ledger.spent().delta == pytest.approx(2e-5)


def test_a_charter_that_names_a_file_of_the_member_is_refused(tmp_path: Path) -> None:
    """The charter's own check is left out here: a coordinator can sign any text."""
    party = deployed(tmp_path, SHARES)
    of_data = [("data", name) for name in ("test", "train")]
    for section, name in (*(("privacy", name) for name in ("ledger_heads", "ledger", "data_set")), *of_data):
        ledger = {("privacy", "ledger"): "any"} if section == "privacy" else {}
        charter = replace(party.charter)
        changed = charter.config.replace({**ledger, (section, name): str(tmp_path / "file")})
        object.__setattr__(charter, "config", changed)
        found = party.told(party.carrier.nodes_[100], charter=charter)
        assert isinstance(found, Refusal), name
        assert "a charter leaves this setting to each machine" in found.sentence, name
        assert not (tmp_path / "file").exists()


def test_a_charter_runs_no_code_of_a_model() -> None:
    trusting = {("model", "trust_remote_code"): True}
    assert "model.trust_remote_code" in local_fault(RunConfig().replace(trusting))
    assert not local_fault(RunConfig().replace({**trusting, **neutral()}))


def test_a_node_whose_accounts_are_old_or_lost_takes_no_further_part(tmp_path: Path) -> None:
    """An older copy of its ledger, no record of rounds, and no ledger, which is no new budget."""
    party = deployed(tmp_path, SHARES)
    node, home, ledger = party.carrier.nodes_[100], party.homes[0], party.homes[0] / LEDGER
    copies = {name: tmp_path / f"{name}.sqlite" for name in ("first", "second")}
    for name, copy in copies.items():
        assert isinstance(offered(party, node, name)[0], messages.Accepted)
        reserved(party, node, name)
        node.close()
        shutil.copy(ledger, copy)

    def refused(name: str) -> tuple[str, str]:
        found, noted = offered(party, Node(home), name)
        assert isinstance(found, Refusal)
        return found.error, noted

    shutil.copy(copies["first"], ledger)
    assert "is an older copy" in refused("third")[1]
    shutil.copy(copies["second"], ledger)
    charter = replace(party.charter, name="first", run="first")
    (Home.load(home).federation(charter.digest) / "attendance").unlink()
    assert "the record of which client took part when, is missing" in refused("first")[1]
    ledger.unlink()
    error, noted = refused("third")
    assert error == "LedgerError"
    assert "ledger.sqlite is missing" in noted
    assert "restore ledger.sqlite from a backup, or make a new node" in noted
    assert not ledger.exists()
