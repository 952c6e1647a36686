"""A federation reserves a member's budget with its first round, and an owner can take back what no step was made for.

Requests are the coordinator's own, kept before they reach a node and then delivered as a test likes. `Killed` stands in for a
kill of the agent; `secure-fed node release` is killed in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from privacy import ledger_file
from privacy.ledger import Ledger
from secure_fed.commands.cli import main
from secure_fed.deployment import memberships, messages, relay
from secure_fed.deployment.charter import Charter
from secure_fed.deployment.envelope import Envelope, unsealed
from secure_fed.deployment.home import CHARTER, FEDERATIONS, LEDGER, Home, Journal
from secure_fed.deployment.messages import Accepted, Ended, Refusal
from secure_fed.deployment.node import Node
from secure_fed.rounds.client import Client
from secure_fed.rounds.transport import Reply, Request, Staged
from secure_fed.runs import durable
from tests.cells import chosen
from tests.secure_fed.deployment.parties import Deployed, InMemory
from tests.secure_fed.deployment.test_deployed_run import EXAMPLE, SHARES, Killed, deployed

Table = dict[str, dict[str, Any]]
CENTRAL: Table = {"privacy": {"unit": "client", "epsilon": 8.0}}
IN_TURN: Table = {**CENTRAL, "federation": {"sampling": "schedule"}}
LOCAL: Table = {"privacy": {"unit": "client", "epsilon": 8.0, "noise": "local"}}
OPEN: Table = {}
GUARDED = {"central": CENTRAL, "in turn": IN_TURN, "local": LOCAL, "example": EXAMPLE}


@dataclass
class Offered:
    """A founded federation whose nodes have accepted it, and its requests for round 1, which no node has got."""

    party: Deployed
    asked: Mapping[int, Envelope]

    @property
    def home(self) -> Path:
        return self.party.homes[0]

    def charter(self, name: str = "") -> Charter:
        """The charter, or the same under another name."""
        return replace(self.party.charter, name=name, run=name) if name else self.party.charter

    def told(self, node: Node, message: messages.Message, name: str = "") -> messages.Message:
        """The node's answer to a message of the coordinator about the charter with this name."""
        return self.party.told(node, message, self.charter(name))  # type: ignore[no-any-return]

    def offer(self, node: Node, name: str = "") -> messages.Message:
        return self.party.told(node, charter=self.charter(name))  # type: ignore[no-any-return]

    @property
    def request(self) -> Any:
        return messages.decode(unsealed(self.asked[100]))

    def first_round(self, node: Node, name: str = "", round_: int = 0) -> messages.Message:
        """The answer to the first request of a round."""
        return self.told(node, replace(self.request, round=round_), name)


def offered(tmp: Path, *tables: Table, **policy: Any) -> Offered:
    party, kept = deployed(tmp, *tables, **policy), dict[int, Envelope]()
    passed = party.carrier.exchange

    def held_back(envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope]]:
        if any(messages.kind(one) != "offer" for one in envelopes.values()):
            kept.update(envelopes)
            raise Killed
        return passed(envelopes, seconds)

    with patch.object(InMemory, "exchange", lambda self, *given: held_back(*given)), pytest.raises(Killed):
        party.conduct()
    return Offered(party, kept)


def spent(home: Path) -> float:
    return Ledger.open(home / LEDGER).spent().epsilon if (home / LEDGER).exists() else 0.0


def last_line(home: Path) -> str:
    return str(Journal(home).last(1)[0]["what"])


def released(home: Path, which: str = "hospitals") -> int:
    return main(["node", "release", str(home), which])


@contextmanager
def counted() -> Iterator[list[str]]:
    """The trainings of members that have begun."""
    begun: list[str] = []
    train = Client._train

    def noted(self: Client, request: Request) -> None:
        begun.append(self.name)
        train(self, request)

    with patch.object(Client, "_train", noted):
        yield begun


@contextmanager
def killed_at(instant: int) -> Iterator[list[str]]:
    """Raise Killed at this instant between two durable writes, counted from 0. Yields the instants passed."""
    passed: list[str] = []

    def crash_point(name: str) -> None:
        if len(passed) == instant:
            raise Killed
        passed.append(name)

    with patch.object(durable, "crash_point", crash_point), patch.object(ledger_file, "crash_point", crash_point):
        yield passed


# What accepting and answering reserve.


def test_federations_that_end_before_a_round_leave_the_budget_whole(tmp_path: Path) -> None:
    """The policy has room for one of four; three are accepted and end, and then the fourth trains."""
    federation = offered(tmp_path, CENTRAL, most_epsilon=8.0)
    node = federation.party.carrier.nodes_[100]
    for name in ("first", "second", "third"):
        assert isinstance(federation.offer(node, name), Accepted)
        assert "would cost epsilon 7.994 and delta 1e-05, of epsilon 8 and delta 0.0001 left" in last_line(
            federation.home
        )
        assert isinstance(federation.told(node, messages.End(), name), Ended)
    assert spent(federation.home) == 0.0
    federation.party.conduct()
    assert spent(federation.home) == pytest.approx(8.0, rel=1e-3)


@pytest.mark.parametrize("unit", chosen([*GUARDED, "shares"], ["central", "shares"]))
def test_the_whole_plan_is_reserved_before_the_first_step(tmp_path: Path, unit: str) -> None:
    table = {**GUARDED, "shares": SHARES}[unit]
    federation = offered(tmp_path, table)
    node, home = federation.party.carrier.nodes_[100], federation.home
    seen: list[float] = []
    with patch.object(Client, "_train", lambda *_: (seen.append(spent(home)), (_ for _ in ()).throw(Killed))):
        if unit == "shares":
            assert isinstance(federation.first_round(node), Staged), (
                "keys alone, and yet something that leaves the node"
            )
            seen.append(spent(home))
        else:
            with pytest.raises(Killed):
                federation.first_round(node)
    charter = federation.party.charter.config.privacy
    assert charter.epsilon is not None
    assert seen == [pytest.approx(charter.epsilon, rel=0.01)]


@pytest.mark.parametrize("unit", chosen(GUARDED, ["central"]))
def test_of_two_accepted_federations_that_do_not_both_fit_the_second_makes_no_step(tmp_path: Path, unit: str) -> None:
    federation = offered(tmp_path, GUARDED[unit], most_epsilon=1.5 * (GUARDED[unit]["privacy"]["epsilon"]))
    home, one, other = federation.home, federation.party.carrier.nodes_[100], Node(federation.home)
    assert isinstance(federation.offer(one), Accepted)
    assert isinstance(federation.offer(other, "second"), Accepted)
    assert isinstance(federation.first_round(other, "second"), Reply)
    before = spent(home)
    with counted() as begun:
        found = federation.first_round(one)
        assert isinstance(found, Refusal)
        assert isinstance(federation.offer(Node(home)), Refusal), "nor is it accepted again"
    assert (found.error, begun, spent(home)) == ("BudgetExhausted", [], before)
    assert found.sentence.startswith("its budget for all federations has no room for this charter's")
    assert not any(part in found.sentence for part in (str(home), "12", "reserved"))
    assert f"are reserved in {home / LEDGER}, and all together may not exceed epsilon" in last_line(home)
    record = memberships.Membership.of(Home.load(home).federation(federation.party.charter.digest))
    assert not (record.folder / "attendance").stat().st_size


# Giving back.


@pytest.mark.parametrize("unit", chosen(["central", "local", "example"], ["central"]))
def test_a_reservation_without_a_step_is_given_back_and_the_federation_stays_closed(
    tmp_path: Path, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = offered(tmp_path, GUARDED[unit])
    node, home = federation.party.carrier.nodes_[100], federation.home
    assert isinstance(federation.first_round(node, round_=99), Refusal), "no turn of its own"
    with relay.held(home):
        assert released(home) == 1
    assert "end it first" in capsys.readouterr().err
    assert not list(home.glob(f"{FEDERATIONS}/*/{memberships.CLOSED}")), "nothing is released while an agent runs"
    assert spent(home) > 7
    assert released(home) == 0
    assert "are given back" in capsys.readouterr().out
    assert spent(home) == 0.0
    kinds = [row.kind for row in Ledger.open(home / LEDGER).rows()]
    assert kinds == ["open", "reserve", "close"]
    with counted() as begun:
        assert isinstance(federation.first_round(node), Refusal), "a delayed request"
        for anew in (node, Node(home)):
            found = federation.offer(anew)
            assert isinstance(found, Refusal), "a replayed offer"
            assert "closed the federation 'hospitals'" in found.sentence
            assert isinstance(federation.first_round(anew), Refusal)
    assert (begun, spent(home)) == ([], 0.0)
    assert released(home) == 0, "again, which changes nothing"
    assert "nothing is reserved for it" in capsys.readouterr().out
    assert main(["node", "status", str(home), "--json"]) == 1
    (listed,) = json.loads(capsys.readouterr().out)["federations"]
    assert (listed["name"], listed["closed"], listed["given_back"]) == ("hospitals", True, True)
    assert isinstance(federation.offer(node, "second"), Accepted)
    assert isinstance(federation.first_round(node, "second"), Reply), "the room is there for others"


@pytest.mark.parametrize(
    "lost", chosen(["", "the record is empty", "the record is missing"], ["", "the record is empty"])
)
@pytest.mark.parametrize("unit", chosen(GUARDED, ["central"]))
def test_after_a_step_nothing_is_given_back_and_nothing_is_closed(
    tmp_path: Path, unit: str, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where an older, empty record of rounds was put back: the ledger has charged every step, or every round."""
    federation = offered(tmp_path, GUARDED[unit], {"federation": {"rounds": 3}})
    node, home = federation.party.carrier.nodes_[100], federation.home
    assert isinstance(federation.first_round(node), Reply)
    node.close()
    before = spent(home)
    record = Home.load(home).federation(federation.party.charter.digest) / "attendance"
    if lost:
        record.unlink()
    if "empty" in lost:
        record.touch()
    capsys.readouterr()
    assert released(home) == 2
    said = capsys.readouterr().err
    assert "stay spent, since this node has charged" in said
    assert said.count("\n") == 1
    assert spent(home) == before > 7
    if not lost:
        again = Node(home)
        assert isinstance(federation.offer(again), Accepted), "it goes on"
        assert isinstance(federation.first_round(again, round_=1), Reply)


def test_a_federation_of_an_earlier_version_is_given_back_under_the_same_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reserved at acceptance, charged no round where clients are protected, and noted no name."""
    federation = offered(tmp_path, CENTRAL)
    node, home = federation.party.carrier.nodes_[100], federation.home
    federation.first_round(node, round_=99)
    node.close()
    folder = Home.load(home).federation(federation.party.charter.digest)
    (folder / memberships.ACCEPTED).unlink()
    (folder / CHARTER).unlink()
    assert sorted(path.name for path in folder.iterdir()) == ["attendance", "private"], "the files of that version"
    capsys.readouterr()
    assert main(["node", "status", str(home)]) == 1
    listed = next(line for line in capsys.readouterr().out.splitlines() if folder.name[:12] in line)
    assert "(accepted by an earlier version)  open, epsilon 7.994 and delta 1e-05 reserved" in listed
    (folder / "attendance").write_bytes(bytes(8))  # it took part in round 1
    assert released(home, folder.name[:12]) == 2
    assert "took part in a round of it, or was about to" in capsys.readouterr().err
    (folder / "attendance").unlink()
    assert released(home, folder.name[:12]) == 2
    assert "is missing, so that a step may have been made" in capsys.readouterr().err
    (folder / "attendance").touch()
    assert released(home, folder.name[:12]) == 0
    assert spent(home) == 0.0


def test_nothing_is_released_while_an_agent_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federation = offered(tmp_path, CENTRAL)
    federation.first_round(federation.party.carrier.nodes_[100], round_=99)
    with relay.held(federation.home):
        assert released(federation.home) == 1
    assert "end it first" in capsys.readouterr().err
    assert spent(federation.home) > 7
    assert not list(federation.home.glob(f"{FEDERATIONS}/*/{memberships.CLOSED}"))


def test_a_federation_is_named_by_its_name_or_digest_and_closed_without_a_guarantee_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = offered(tmp_path, OPEN)
    node, home = federation.party.carrier.nodes_[100], federation.home
    assert isinstance(federation.first_round(node), Reply)
    federation.offer(node, "second")
    copy = home / FEDERATIONS / ("ab" * 16)
    shutil.copytree(Home.load(home).federation(federation.charter("second").digest), copy)
    for which, said in (("", "no federation ''"), ("third", "no federation 'third'"), ("second", "give one's digest")):
        assert released(home, which) == 2
        assert said in capsys.readouterr().err
    assert not list(home.glob(f"{FEDERATIONS}/*/{memberships.CLOSED}"))
    assert released(home, "abababab") == 0
    assert [one.parent for one in home.glob(f"{FEDERATIONS}/*/{memberships.CLOSED}")] == [copy]
    capsys.readouterr()
    assert released(home) == 0
    assert "nothing is reserved for it" in capsys.readouterr().out
    assert isinstance(federation.offer(Node(home)), Refusal)


# Kills.


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], Path]:
    """Makes copies of a home, each with a user's state of its own: the heads of one copy's ledger are not another's."""

    def copied(home: Path, name: str, *without: str) -> Path:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state" / name))
        return Path(shutil.copytree(home, tmp_path / "copies" / name, ignore=shutil.ignore_patterns(*without)))

    return copied


def kills_up_to_the_first_step(federation: Offered, homes: Callable[..., Path], instants: Iterable[int]) -> list[int]:
    """A node that accepts, and answers round 1, is killed at each instant in turn. Then its owner asks for the budget back.

    Returns the exit statuses. AssertionError if budget is given back that a step was made for.
    """
    statuses: list[int] = []
    for instant in instants:
        home, answered = homes(federation.home, str(instant), FEDERATIONS, f"{LEDGER}*"), False
        node = Node(home)
        with counted() as begun, killed_at(instant) as passed, suppress(Killed):
            assert isinstance(federation.offer(node), Accepted)
            answered = isinstance(federation.first_round(node), Reply)
        assert answered or len(passed) == instant, "killed"
        reserved = spent(home)
        assert not begun or reserved > 7, f"{passed[-1]}: a step without a reservation"
        if not list(home.glob(f"{FEDERATIONS}/*/{memberships.ACCEPTED}")):
            assert not begun
            continue
        statuses.append(released(home))
        if statuses[-1]:
            assert spent(home) == reserved > 7
        else:
            assert not begun, f"{passed[-1]}: a step was made"
            assert spent(home) == 0.0
            anew = Node(home)
            assert isinstance(federation.offer(anew), Refusal)
            assert isinstance(federation.first_round(anew), Refusal)
        if answered:
            return statuses
    raise AssertionError("the round never came to its end")


def kills_of_a_release(federation: Offered, homes: Callable[..., Path]) -> set[tuple[bool, bool]]:
    """A release is killed at every instant in turn, and then repeated. Returns, of each kill, whether it left the federation
    closed, and whether it left the reservation given back.
    """
    federation.first_round(federation.party.carrier.nodes_[100], round_=99)
    federation.party.carrier.nodes_[100].close()
    found: set[tuple[bool, bool]] = set()
    for instant in range(1000):
        home = homes(federation.home, str(instant))
        ended = killed_release(home, instant)
        assert ended in (0, -signal.SIGKILL)
        (one,) = memberships.memberships(Home.load(home))
        found.add((one.closed, spent(home) == 0.0))
        if one.closed:
            assert isinstance(federation.offer(Node(home)), Refusal)
        assert released(home) == 0, "the same command finishes its work"
        assert spent(home) == 0.0
        if ended == 0:
            return found
    raise AssertionError("the release never came to its end")


def killed_release(home: Path, instant: int) -> int:
    """Release in a fork of this process, killed at this instant. Returns its exit status, or -9 if it was killed."""
    child = os.fork()
    if child == 0:
        passed = 0

        def crash_point(_: str) -> None:
            nonlocal passed
            if passed == instant:
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1

        durable.crash_point = ledger_file.crash_point = crash_point
        try:
            memberships.release(Home.load(home), "hospitals")
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("unit", "every"), chosen([("central", 8), *((unit, 1) for unit in GUARDED)], [("central", 8)])
)
def test_a_node_killed_at_any_instant_gets_nothing_back_that_a_step_was_made_for(
    tmp_path: Path, homes: Callable[..., Path], unit: str, every: int
) -> None:
    statuses = kills_up_to_the_first_step(offered(tmp_path, GUARDED[unit]), homes, range(0, 1000, every))
    assert statuses == sorted(statuses), "given back up to some instant, and never after it"
    assert min(statuses.count(0), statuses.count(2)) > 1


def test_a_release_killed_at_any_instant_gives_nothing_back_before_the_federation_is_closed(
    tmp_path: Path, homes: Callable[..., Path]
) -> None:
    found = kills_of_a_release(offered(tmp_path, CENTRAL), homes)
    assert found == {(False, False), (True, False), (True, True)}
