"""What a node's owner decides and sees: a charter before it is accepted, federations that wait for a person, and the status."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from secure_fed.commands.cli import main
from secure_fed.deployment import memberships, messages, node
from secure_fed.deployment.charter import Charter, fingerprint
from secure_fed.deployment.envelope import REQUEST, sealed, unsealed
from secure_fed.deployment.home import CHARTER, FEDERATIONS, CoordinatorHome, Home
from secure_fed.deployment.messages import Accepted, Refusal
from secure_fed.deployment.node import Node
from secure_fed.deployment.relay import held
from tests.secure_fed.deployment.parties import Deployed
from tests.secure_fed.deployment.test_deployed_run import MASKED, SHARES, deployed


def told(party: Deployed, at: Node, message: messages.Message | None = None, charter: Charter | None = None) -> object:
    """The node's answer to a message of the coordinator, by default to an offer of the charter."""
    identity, charter = CoordinatorHome.load(party.folder).identity, charter or party.charter
    message = message or messages.Offer(charter.signed(identity), 100, bytes(32))
    return messages.decode(unsealed(at.answer(sealed(messages.encode(message), identity, REQUEST, charter.digest))))


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
    assert isinstance(told(party, Node(home)), Accepted)
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
        found = told(party, at)
        assert isinstance(found, Refusal)
        assert found.sentence == "this node's owner has not accepted the federation 'hospitals' yet"
    assert sorted(path.name for path in folder.iterdir()) == [CHARTER]
    assert status(home) == (2, f"a federation waits for its owner: secure-fed node accept {folder.name[:12]}")
    assert main(["node", "accept", str(home), "another"]) == 2
    assert isinstance(told(party, at), Refusal)
    assert main(["node", "accept", str(home), "hospitals"]) == 0
    assert isinstance(told(party, at), Accepted)
    assert status(home)[0] == 0
    other = replace(party.charter, name="hospitals too", run="another")
    assert isinstance(told(party, at, charter=other), Refusal), "one acceptance is for one charter"
    assert main(["node", "release", str(home), "hospitals too"]) == 0
    assert main(["node", "accept", str(home), "hospitals too"]) == 2, "closed for good"
    assert isinstance(told(party, at, charter=other), Refusal)


def test_waiting_federations_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memberships, "_MOST_WAITING", 2)
    party = deployed(tmp_path, MASKED, accept="ask")
    charters = [replace(party.charter, name=f"f{number}", run=str(number)) for number in range(4)]
    stranger = replace(charters[3], members=party.charter.members[1:])
    for one in (stranger, *charters[:3], charters[0]):
        assert isinstance(told(party, party.carrier.nodes_[100], charter=one), Refusal)
    kept = {path.name for path in (party.homes[0] / FEDERATIONS).iterdir()}
    assert kept == {one.digest.hex()[:32] for one in charters[:2]}


def test_the_status_is_one_that_a_monitor_can_use(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED)
    home, at = party.homes[0], party.carrier.nodes_[100]
    assert main(["node", "status", str(home)]) == 1, "no agent runs"
    assert status(home) == (1, "no coordinator has reached it yet")
    party.conduct()
    assert status(home)[0] == 0
    assert status(home, "--silent", "0")[0] == 0, "it has ended"
    assert isinstance(told(party, at), Accepted)
    time.sleep(1.1)
    assert status(home, "--silent", "0.5")[0] == 1
    assert status(home)[0] == 0
    assert isinstance(told(party, at, messages.Ended()), Refusal)
    assert status(home) == (
        2,
        "the last request was refused: the server asks for 'ended', which a node does not answer",
    )
    assert isinstance(told(party, at), Accepted)
    assert status(home)[0] == 0


def test_the_status_shows_what_the_node_joined(tmp_path: Path) -> None:
    party = deployed(tmp_path, SHARES)
    party.conduct()
    home = party.homes[0]
    kept = Home.load(home).federation(party.charter.digest) / CHARTER
    assert kept.read_bytes() == (party.folder / CHARTER).read_bytes()
    os.utime(kept, (0, 0))
    with printed() as lines, held(home):
        assert main(["node", "status", str(home)]) == 0
    (joined,) = [line for line in lines if kept.parent.name[:12] in line and "hospitals" in line]
    assert "hospitals  open, 2 of 2 rounds, last contact 1970-01-01T00:00:00Z, epsilon 7.9" in joined
    for member in party.charter.members:
        assert any(fingerprint(member.identity) in line and line.endswith(member.name) for line in lines)
    assert isinstance(told(party, party.carrier.nodes_[100]), Accepted)
    assert time.time() - kept.stat().st_mtime < 100
