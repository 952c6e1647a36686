"""A node's budget: one ledger of the owner for all federations, which no charter names, and the policy's present limits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy.ledger import Ledger
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.deployment import messages
from secure_fed.deployment.charter import local_fault, neutral
from secure_fed.deployment.envelope import REQUEST, sealed, unsealed
from secure_fed.deployment.home import LEDGER, NODE, CoordinatorHome, Journal
from secure_fed.deployment.messages import Refusal
from secure_fed.deployment.node import Node
from secure_fed.methods.method import RoundPlan
from secure_fed.rounds.transport import Request
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed.deployment.parties import Deployed, written
from tests.secure_fed.deployment.test_deployed_run import EXAMPLE, PARTS, SHARES, deployed


def offered(party: Deployed, node: Node, name: str) -> tuple[messages.Message, str]:
    """The node's answer to the charter of another federation of the same terms, and the line of its journal."""
    home = CoordinatorHome.load(party.folder)
    another = replace(home.charter, name=name, run=name)
    offer = messages.Offer(another.signed(home.identity), 100, bytes(32))
    asked = sealed(messages.encode(offer), home.identity, REQUEST, another.digest)
    answer = messages.decode(unsealed(node.answer(asked)))
    return answer, Journal(node.home.folder).last(1)[0]["what"]


def reserved(party: Deployed, node: Node, name: str) -> messages.Message:
    """The node's answer to the first request of a federation that it has accepted, for a round that is not its turn."""
    home = CoordinatorHome.load(party.folder)
    another = replace(home.charter, name=name, run=name)
    request = Request(99, "first", RoundPlan((), (), ("first",)), 0.1, "", Tensors())
    asked = sealed(messages.encode(request), home.identity, REQUEST, another.digest)
    return messages.decode(unsealed(node.answer(asked)))


def with_policy(party: Deployed, old: str, new: str) -> Node:
    """The first node, started anew with a changed line of its policy."""
    text = (party.homes[0] / NODE).read_text()
    assert old in text
    (party.homes[0] / NODE).write_text(text.replace(old, new))
    return Node(party.homes[0])


@pytest.mark.parametrize(
    ("limits", "exhausted"),
    [
        (
            {"most_epsilon": 10.0, "most_delta": 1e-3},
            "epsilon 10.0, the limit of ledger.sqlite",
        ),  # 8 and 8 are more than 10
        ({"most_epsilon": 1000.0, "most_delta": 1.5e-5}, "delta 1.5e-05, the limit of ledger.sqlite"),
    ],
)
def test_a_node_spends_its_own_budget_once_for_all_federations(
    tmp_path: Path, limits: dict[str, float], exhausted: str
) -> None:
    party = deployed(tmp_path, SHARES, **limits)
    node = party.carrier.nodes_[100]
    assert isinstance(offered(party, node, "first")[0], messages.Accepted)
    assert isinstance(offered(party, node, "second")[0], messages.Accepted), "nothing is reserved yet"
    reserved(party, node, "second")
    found, noted = offered(party, node, "first")
    assert isinstance(found, Refusal)
    assert found.error == "BudgetExhausted"
    assert exhausted in noted
    assert (
        "a higher one in node.toml does not raise: take no part, or give back with `secure-fed node release`" in noted
    )
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0
    for _ in range(3):
        offered(party, node, "first")
    assert not before or len(list(Path("/proc/self/fd").iterdir())) <= before, "a refused offer leaves no file open"


def test_a_node_that_lost_its_record_of_rounds_takes_no_further_part(tmp_path: Path) -> None:
    party = deployed(tmp_path, SHARES)
    assert isinstance(offered(party, party.carrier.nodes_[100], "first")[0], messages.Accepted)
    reserved(party, party.carrier.nodes_[100], "first")
    (record,) = party.homes[0].glob("federations/*/attendance")
    record.unlink()
    found, noted = offered(party, Node(party.homes[0]), "first")
    assert isinstance(found, Refusal)
    assert "the record of which client took part when, is missing" in noted


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


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("privacy", "ledger_heads", "heads.sqlite"),
        ("privacy", "ledger", "other.sqlite"),
        ("privacy", "data_set", "patients"),
        ("data", "test", "secrets.csv"),
        ("data", "train", "secrets.csv"),
    ],
)
def test_a_charter_that_names_a_file_of_the_member_is_refused(
    tmp_path: Path, section: str, name: str, value: str
) -> None:
    """The charter's own check is left out here: a coordinator can sign any text."""
    party = deployed(tmp_path, SHARES)
    home = CoordinatorHome.load(party.folder)
    path = str(tmp_path / value)
    ledger = {("privacy", "ledger"): "any"} if section == "privacy" else {}
    charter = replace(home.charter)
    object.__setattr__(charter, "config", charter.config.replace({**ledger, (section, name): path}))
    offer = messages.Offer(charter.signed(home.identity), 100, bytes(32))
    asked = sealed(messages.encode(offer), home.identity, REQUEST, charter.digest)
    found = messages.decode(unsealed(party.carrier.nodes_[100].answer(asked)))
    assert isinstance(found, Refusal)
    assert "a charter leaves this setting to each machine" in found.sentence
    assert not Path(path).exists()


def test_a_charter_runs_no_code_of_a_model() -> None:
    trusting = {("model", "trust_remote_code"): True}
    assert "model.trust_remote_code" in local_fault(RunConfig().replace(trusting))
    assert not local_fault(RunConfig().replace({**trusting, **neutral()}))


def test_an_older_copy_of_a_nodes_ledger_is_refused(tmp_path: Path) -> None:
    party = deployed(tmp_path, SHARES)
    node, ledger, copy = party.carrier.nodes_[100], party.homes[0] / LEDGER, tmp_path / "older.sqlite"
    offered(party, node, "first")
    reserved(party, node, "first")
    node.close()
    shutil.copy(ledger, copy)
    offered(party, node, "second")
    reserved(party, node, "second")
    node.close()
    shutil.copy(copy, ledger)
    found, noted = offered(party, node, "third")
    assert isinstance(found, Refusal)
    assert "is an older copy" in noted


def test_a_lost_ledger_is_no_new_budget(tmp_path: Path) -> None:
    party = deployed(tmp_path, SHARES)
    assert isinstance(offered(party, party.carrier.nodes_[100], "first")[0], messages.Accepted)
    reserved(party, party.carrier.nodes_[100], "first")
    party.carrier.nodes_[100].close()
    (party.homes[0] / LEDGER).unlink()
    found, noted = offered(party, Node(party.homes[0]), "second")
    assert isinstance(found, Refusal)
    assert found.error == "LedgerError"
    assert "ledger.sqlite is missing" in noted
    assert "restore ledger.sqlite from a backup, or make a new node" in noted
    assert not (party.homes[0] / LEDGER).exists()
