"""A federation of separate parties that exchange envelopes: it equals a simulation, and withstands parties that die or lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from privacy.entropy import SeededEntropy
from privacy.ledger import Ledger
from privacy.participation import Attendance
from protocols.keys import Identity
from secure_fed import Federation, RunConfig
from secure_fed.deployment import coordinator, messages
from secure_fed.deployment.envelope import ANSWER, REQUEST, SIGNATURE, Envelope, digest, frames, sealed, unsealed
from secure_fed.deployment.home import BEGUN, CHARTER, RUN, CoordinatorHome, Journal
from secure_fed.deployment.messages import Refusal
from secure_fed.deployment.node import Node, _trains
from secure_fed.errors import RunDirectoryError, TrainingError
from secure_fed.export.trained import load_run
from secure_fed.methods.method import RoundPlan, State
from secure_fed.report.result import Result
from secure_fed.rounds.client import Client
from secure_fed.rounds.transport import Reply, Request, Stage, Staged
from secure_fed.runs.budget import RunBudget
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import toys
from tests.secure_fed.deployment.parties import Deployed, copied, founded, rows_of

USUAL: dict[str, dict[str, Any]] = {
    "data": {"train": "of each member"},
    "federation": {"rounds": 2, "cohort": 4, "sampling": "fixed"},
    "training": {"batch_size": 4},
    "method": {"name": "bitfit"},
}
ONE_ROUND = {"federation": {"rounds": 1}}
MASKED = {"secure_aggregation": {"enabled": True, "dropout": 0.25}}
SHARES = {**MASKED, "privacy": {"unit": "client", "epsilon": 8.0, "noise": "distributed"}}
PARTS = [rows_of(8, seed) for seed in range(4)]


def config_of(*tables: dict[str, dict[str, Any]]) -> RunConfig:
    """The usual configuration, changed by the tables. There are no dummies, which take time, unless a table has some."""
    whole: dict[str, dict[str, Any]] = {}
    for table in (USUAL, *tables):
        for section, values in table.items():
            whole[section] = whole.get(section, {}) | values
    if "privacy" in whole:
        whole["evaluation"] = {"dummies": 0} | whole.get("evaluation", {})
    return RunConfig.from_dict(whole)


def deployed(tmp: Path, *tables: dict[str, dict[str, Any]], seed: int | None = None, **policy: Any) -> Deployed:
    return founded(
        tmp, config_of(*tables), PARTS, lambda number: None if seed is None else SeededEntropy(seed), **policy
    )


def simulated(tmp: Path, *tables: dict[str, dict[str, Any]], seed: int, out: Path | None = None) -> Result:
    """The same run as a simulation in one process, over copies of the nodes' files."""
    files = []
    for number in range(len(PARTS)):
        files.append(str(shutil.copy(tmp / f"node-{number}" / "train.jsonl", tmp / f"c{number}.jsonl")))
    config = config_of(*tables)
    own = {("data", "train"): files, ("data", "test"): str(tmp / "test.jsonl"), ("training", "together"): 1}
    audit = {("evaluation", "audit_fraction"): 0.0}
    return Federation(config.replace({**own, **audit}), entropy=SeededEntropy(seed)).run(out)


EXAMPLE = {"privacy": {"unit": "example", "epsilon": 50.0, "clip_norm": 0.1}}
WHOLE = {"method": {"name": "fedft"}}
SKETCHED = {"method": {"name": "fra_lora", "rank": 1, "transport_form": "sketch", "target_modules": ["query"]}}
CLASSES = sorted({row["label"] for part in PARTS for row in part})
FIXED_HEAD = {
    "model": {"pooling": "mean", "descriptions": [f"{name}={name}" for name in CLASSES], "train_head": False},
    "method": {"name": "federa", "rule": "ffa_lora"},
}
ACTIVE = {"secure_aggregation": {"enabled": True, "active": True, "dropout": 0.0, "corrupt": 0.0}}


DUMMIES = {"evaluation": {"dummies": 8}}
RUNS: dict[str, Any] = {
    "shares": (SHARES, DUMMIES),
    "example": (EXAMPLE, DUMMIES),
    "masked, ranks": (MASKED, {"method": {"name": "fedlora", "ranks": ["c0=1", "c1=2", "c2=8", "c3=8"]}}),
    "masked, fixed head": (MASKED, FIXED_HEAD),
    "in turn": (SHARES, {"federation": {"sampling": "schedule"}}),
    "example, active, sketched": (ACTIVE, EXAMPLE, SKETCHED),
    "weighted, active": (ACTIVE, {"federation": {"weighting": "examples"}}),
    "local": ({"privacy": {"unit": "client", "epsilon": 8.0, "noise": "local"}},),
}


@pytest.mark.parametrize("kind", chosen(RUNS, ["shares"]))
def test_it_is_the_run_of_a_simulation_to_the_bit(tmp_path: Path, kind: str) -> None:
    """Also the figure of dummies: dummy clients are the coordinator's alone, dummy examples are in the nodes' private steps."""
    party = deployed(tmp_path, *RUNS[kind], seed=5)
    result, same = party.conduct(), simulated(tmp_path, *RUNS[kind], seed=5)
    assert result.state.round == 2
    assert toys.same(result.state.tensors, same.state.tensors)
    assert not [line for line in party.said if "refuses" in line or "lost" in line]
    assert "separate nodes" in load_run(party.folder / RUN).card.text("peft")
    assert result.summary["clients"] == len(party.homes)
    if DUMMIES in RUNS[kind]:
        assert result.summary["membership"] == same.summary["membership"]
        assert result.summary["membership"]["auc"] is not None
    if kind == "shares":
        assert [record["masked"]["survivors"] for record in result.records] == [4, 4], (
            "no dummies are in the members' sum"
        )


def stage_of(asked: Envelope) -> str:
    """The round and the stage that the coordinator's envelope asks for, such as "0 mask"; "" if it asks for no stage."""
    found = messages.decode(unsealed(asked))
    return f"{found.round} {found.name}" if isinstance(found, Stage) else ""


def damaged(envelope: Envelope) -> Envelope:
    """A copy with one bit of its largest array changed or, if it has no arrays, with its header changed."""
    arrays = {name: np.array(array) for name, array in envelope.arrays.items() if name != SIGNATURE}
    if not arrays:
        return Envelope(envelope.header.replace(b'"', b'" ', 1), envelope.arrays)
    largest = max(arrays, key=lambda name: arrays[name].nbytes)
    arrays[largest].reshape(-1).view(np.uint8)[0] ^= 1
    return Envelope(envelope.header, {**envelope.arrays, **arrays})


def integers(told: Reply) -> Reply:
    parts = {name: part.to(torch.int64) for name, part in told.contribution.parts().items()}
    return replace(told, contribution=Tensors.from_parts(parts))


LIES: list[Callable[[Reply], Any]] = [
    lambda told: Reply(0, Tensors({"bias": torch.zeros(3)}), 1.0, 0.0),
    lambda told: Reply(0, Tensors(), 1.0, 0.0),
    integers,
    lambda told: replace(told, weight=-1.0),
    lambda told: replace(told, weight=1e39),  # so large that the sum could not be formed
    lambda told: Staged(0, b"something"),
    lambda told: messages.Accepted(1, bytes(64)),
    lambda told: messages.Ended(),
]


@pytest.mark.parametrize("weighting", chosen(["uniform", "examples"], ["examples"]))
def test_a_member_that_answers_something_else_is_absent_and_no_more(tmp_path: Path, weighting: str) -> None:
    """In every round another answer, signed by the member. Without secure aggregation the server adds up what it is sent."""
    party = deployed(tmp_path, {"federation": {"rounds": len(LIES), "weighting": weighting}})

    def lies(node: int, asked: Envelope, answer: Envelope) -> Envelope:
        told, request = messages.decode(unsealed(answer)), messages.decode(unsealed(asked))
        if node != 101 or not isinstance(told, Reply) or not isinstance(request, Request):
            return answer
        identity, said = party.carrier.nodes_[101].home.identity, messages.encode(LIES[request.round](told))
        return sealed(said, identity, ANSWER, party.charter.digest, digest(asked))

    party.carrier.touch = lies
    result = party.conduct()
    assert result.state.round == len(LIES)
    assert result.state.tensors.is_finite()
    assert sum(line.startswith("c1 refuses") for line in party.said) == len(LIES), party.said


def test_requests_that_the_coordinator_did_not_sign_are_refused(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED, ONE_ROUND)
    node = party.carrier.nodes_[100]
    stranger = Identity.new()
    party.conduct()
    asked = [asked for number, asked, _ in party.carrier.seen if number == 100]
    offer, stages = asked[0], [one for one in asked if stage_of(one)]
    for forged in (
        damaged(stages[0]),
        unsealed(stages[0]),
        sealed(unsealed(stages[0]), stranger, REQUEST, party.charter.digest),
        sealed(unsealed(stages[0]), stranger, ANSWER, party.charter.digest),
    ):
        node.answer(copied(offer))
        assert isinstance(messages.decode(unsealed(node.answer(copied(forged)))), Refusal)
    node.answer(copied(offer))
    replayed = messages.decode(unsealed(node.answer(copied(next(one for one in stages if "mask" in stage_of(one))))))
    assert isinstance(replayed, Refusal), "a stage without the ones before it"


@pytest.mark.parametrize("method", chosen([SKETCHED, WHOLE], [WHOLE]), ids=["sketched", "whole"])
def test_every_message_of_a_run_is_within_the_bound_for_unsigned_ones(tmp_path: Path, method: Any) -> None:
    party = deployed(tmp_path, MASKED, ONE_ROUND, method)
    alone = party.carrier.nodes_[100].most
    assert alone < 17_000_000, "a node of no federation reads charters alone"
    bounds: list[int] = []

    def within(number: int, asked: Envelope, answer: Envelope) -> Envelope:
        node = party.carrier.nodes_[number]
        assert sum(array.nbytes for array in asked.arrays.values()) <= node.most
        bounds.append(node.most)
        return answer

    party.carrier.touch = within
    party.conduct()
    assert alone < max(bounds) < 40_000_000


def test_replayed_requests_cost_the_round_under_way_nothing(tmp_path: Path) -> None:
    """Before each stage of round 2, somebody on the way replays all that node 101 has got, and other nodes' requests to it.

    The latest request gets its answer again, and every other one is refused.
    """
    party = deployed(tmp_path, MASKED)
    node, replayed, passed = party.carrier.nodes_[101], list[str](), party.carrier.exchange

    def attacked(envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope]]:
        if stage_of(next(iter(envelopes.values()))).startswith("1 "):
            last = [answer for number, asked, answer in party.carrier.seen if number == 101 and stage_of(asked)][-1]
            for number, asked, _ in party.carrier.seen[:]:
                if (stage := stage_of(asked)) and (number == 101 or stage.startswith("0")):
                    with patch.object(Client, "_train", side_effect=AssertionError("it computes")):
                        answer = node.answer(copied(asked))
                    same = b"".join(frames(answer)) == b"".join(frames(last))
                    assert same or isinstance(messages.decode(unsealed(answer)), Refusal)
                    replayed.append(f"{stage}, again" if same else stage)
        yield from passed(envelopes, seconds)

    with patch.object(party.carrier, "exchange", attacked):
        result = party.conduct()
    assert [record["masked"]["survivors"] for record in result.records] == [4, 4], "\n".join(party.said)
    assert {"0 advertise", "0 mask", "1 advertise", "1 share", "0 unmask, again", "1 mask, again"} <= {*replayed}
    journal = [line["what"] for line in Journal(party.homes[1]).last(200, refused=True)]
    assert sum("is over for this node, which took part in round" in line for line in journal) > 10


@pytest.mark.parametrize("more", chosen([MASKED, SHARES, {}], [MASKED, {}]), ids=["masked", "shares", "open"])
def test_an_answer_that_was_lost_is_given_again(tmp_path: Path, more: Any) -> None:
    """Every request is sent twice: the second answer, to the bit the first one, takes its place, and nobody trains twice."""
    party, trained = deployed(tmp_path, more, ONE_ROUND), list[int]()

    def again(number: int, asked: Envelope, answer: Envelope) -> Envelope:
        if not isinstance(messages.decode(unsealed(asked)), Request | Stage):
            return answer
        second = party.carrier.nodes_[number].answer(copied(asked))
        assert b"".join(frames(second)) == b"".join(frames(answer))
        return second

    def train(self: Client, *given: Any, **named: Any) -> Any:
        trained.append(self.index)
        return trains(self, *given, **named)

    party.carrier.touch, trains = again, Client._train
    with patch.object(Client, "_train", train):
        result = party.conduct()
    assert result.records[0]["cohort"] == 4
    assert sorted(trained) == [0, 1, 2, 3]


def test_an_answer_is_given_in_no_other_federation_and_once_whatever_restarts(tmp_path: Path) -> None:
    """A second federation has the same request, to the byte: the node trains for it, and is charged there.

    A node that was restarted refuses a repeated request of round 1, so the server gets no second contribution.
    """
    party, trained = deployed(tmp_path, ONE_ROUND), list[int]()
    party.conduct()
    node, other = party.carrier.nodes_[100], replace(party.charter, run="another")
    offer, again = [asked for number, asked, _ in party.carrier.seen if number == 100][:2]
    party.told(node)
    party.told(node, charter=other)
    with patch.object(Client, "_train", lambda self, *_: trained.append(self.index)):
        party.told(node, messages.decode(unsealed(again)), charter=other)
    assert trained == [0]
    restarted = Node(party.homes[0])
    assert isinstance(messages.decode(unsealed(restarted.answer(copied(offer)))), messages.Accepted)
    refused = messages.decode(unsealed(restarted.answer(copied(again))))
    assert isinstance(refused, Refusal)
    assert "took part in round 1" in refused.sentence


FEDARA = {"method": {"name": "fedara", "rank": 4, "final_rank": 1, "target_modules": ["query"]}}


def test_every_request_that_makes_a_member_train_is_noted(tmp_path: Path) -> None:
    """Also where a pass has another name in each round, as with FedARA's votes."""
    party = deployed(tmp_path, MASKED, FEDARA, {"federation": {"rounds": 4}})
    asked: list[tuple[int, str]] = []
    entered: list[int] = []
    with patch.object(Attendance, "enter", lambda self, member, round_: entered.append(round_)):

        def touch(node: int, asking: Envelope, answer: Envelope) -> Envelope:
            found = messages.decode(unsealed(asking))
            request = getattr(found, "request", found)
            if node == 100 and getattr(request, "pass_name", ""):
                asked.append((request.round, request.pass_name))
            return answer

        party.carrier.touch = touch
        result = party.conduct()
    assert len({name for _, name in asked}) > 1, "the passes have different names"
    assert entered == sorted([*range(4)] * len(PARTS))
    assert not [record for record in result.records if record.get("lost")], "though its modules lose all ranks"


@pytest.mark.parametrize(("name", "noted"), [("first", True), ("second", False), ("unknown", True)])
def test_a_request_for_an_unknown_pass_counts_as_training(name: str, noted: bool) -> None:
    plan = RoundPlan((), (), ("first", "second"))
    assembly = SimpleNamespace(method=SimpleNamespace(plan=lambda _: plan), initial=State(Tensors()))
    request = Request(0, name, plan, 0.1, "", Tensors())
    assert _trains(request, assembly) is noted  # type: ignore[arg-type]


class Killed(BaseException):
    """Stands in for a kill of the coordinator's process."""


@pytest.mark.parametrize("tables", [pytest.param((), marks=pytest.mark.nightly), (SHARES,)], ids=["open", "shares"])
def test_a_coordinator_killed_in_a_round_goes_on_with_the_next(tmp_path: Path, tables: Any) -> None:
    party = deployed(tmp_path, *tables, {"federation": {"rounds": 3}})

    def dies(node: int, asked: Envelope, answer: Envelope) -> Envelope:
        found = messages.decode(unsealed(asked))
        if getattr(found, "round", 0) == 1 and node == 103:
            raise Killed
        return answer

    party.carrier.touch = dies
    with pytest.raises(Killed):
        party.conduct()
    party.carrier.touch = lambda node, asked, answer: answer
    result = party.conduct()
    assert result.state.round == 3
    assert [bool(record.get("lost")) for record in result.records] == [False, True, False]
    if tables:
        assert result.summary["epsilon"] <= 8.0


def restarted(party: Deployed, number: int) -> None:
    """The node 102 dies and starts anew under this number."""
    party.carrier.nodes_.pop(102).close()
    party.carrier.nodes_[number] = Node(party.homes[2])


def sent_an_older_charter(party: Deployed) -> None:
    """Somebody on the way replays the coordinator's offer of an earlier federation, which makes node 102 leave this one."""
    older = replace(party.charter, name="older", run="older run")
    party.told(party.carrier.nodes_[102], charter=older, number=102)


@pytest.mark.parametrize(
    "begins_anew",
    [
        lambda party: restarted(party, 202),
        pytest.param(lambda party: restarted(party, 102), marks=pytest.mark.nightly),
        pytest.param(sent_an_older_charter, marks=pytest.mark.nightly),
    ],
    ids=["under another number", "under its number", "sent an older charter"],
)
def test_a_node_killed_between_its_shares_and_the_opening_is_missing_once(
    tmp_path: Path, begins_anew: Callable[[Deployed], None]
) -> None:
    party = deployed(tmp_path, MASKED)

    def dies(node: int, asked: Envelope, answer: Envelope) -> Envelope:
        if node == 102 and stage_of(asked) == "0 share":  # after it sent its shares
            begins_anew(party)
        return answer

    party.carrier.touch = dies
    result = party.conduct()
    assert [record["masked"]["survivors"] for record in result.records] == [3, 4], "\n".join(party.said)
    assert party.said.count("c2 is connected") == 2, "again, by its key"


def test_too_few_members_wait_or_lose_the_round(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED)
    party.carrier.deaf = {100, 101}
    with pytest.raises(TrainingError, match="fewer than 3 of the 4 members of round 1 were connected"):
        party.conduct()
    lost = party.conduct(too_few="lose")
    assert [bool(record.get("lost")) for record in lost.records] == [True, True]


def test_strangers_and_members_under_another_policy_do_not_take_part(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED)
    stranger = deployed(tmp_path / "others", MASKED)
    party.carrier.nodes_[900] = stranger.carrier.nodes_[100]
    strict = party.carrier.nodes_[103]
    strict.home = replace(strict.home, policy=replace(strict.home.policy, most_rounds=1))
    result = party.conduct()
    assert [record["masked"]["survivors"] for record in result.records] == [3, 3]
    said = "\n".join(party.said)
    assert "node 900 does not take part" in said
    assert "coordinators" in said
    assert "coordinators" in Journal(stranger.homes[0]).last(1, known=False)[0]["what"], "signed, by a key of nobody"
    assert "more than most_rounds = 1" in said
    assert "more than most_rounds = 1" in Journal(party.homes[3]).last(9, refused=True)[0]["what"]


def test_nobody_can_take_a_members_place(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED, ONE_ROUND)

    def claims(node: int, asked: Envelope, answer: Envelope) -> Envelope:
        found = messages.decode(unsealed(asked))
        if node == 103 and isinstance(found, messages.Offer):
            mine = party.carrier.nodes_[103].home.identity
            return messages.encode(found.accepted(mine, party.charter.digest, 0))
        return answer

    party.carrier.touch = claims
    party.conduct()
    assert any("says that it is c0, and does not have that member's key" in line for line in party.said)


@pytest.mark.nightly
def test_another_model_or_other_data_are_refused(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED, EXAMPLE)
    home = CoordinatorHome.load(party.folder)
    charter = replace(home.charter, model_digest="0" * 64)
    (party.folder / CHARTER).write_bytes(charter.signed(home.identity))
    found = party.told(party.carrier.nodes_[100], charter=charter)
    assert isinstance(found, Refusal)
    assert "take the same model on all machines (model.name)" in found.sentence
    assert "take the same model as the coordinator" in Journal(party.homes[0]).last(1)[0]["what"]
    with pytest.raises(Exception, match="not the one that the federation was founded with"):
        coordinator.assembled(CoordinatorHome.load(party.folder))
    (party.homes[1] / "train.jsonl").write_text(json.dumps(PARTS[1][0]) + "\n")
    found = party.told(party.carrier.nodes_[101], number=101)
    assert isinstance(found, Refusal)
    assert "the number of units on its card" in found.sentence
    assert "declares 8 units" in Journal(party.homes[1]).last(1)[0]["what"]


@pytest.mark.parametrize("tables", [pytest.param((), marks=pytest.mark.nightly), (SHARES,)], ids=["open", "shares"])
def test_a_coordinator_killed_between_its_charge_and_its_note_asks_nobody_twice(
    tmp_path: Path, tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after round 2 is charged and before it is recorded as begun. No member was asked, so round 2 may begin."""
    party, noted = deployed(tmp_path, *tables, {"federation": {"rounds": 3}}), coordinator.atomic_write

    def dies(path: Path, content: Any, **how: Any) -> None:
        if path.name == BEGUN and content[:1] == b"\x02":
            raise Killed
        noted(path, content, **how)

    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "atomic_write", dies)
        with pytest.raises(Killed):
            party.conduct()
    asked = [stage_of(one) for node, one, _ in party.carrier.seen if node == 100]
    assert not any(one.startswith("1 ") for one in asked), "nobody was asked for round 2"
    again = party.conduct()
    if tables:  # the first charge of round 2 counts, so the budget may end before the last round
        assert again.summary["epsilon"] <= 8.0
        assert again.state.round in (2, 3)
    else:
        assert [bool(record.get("lost")) for record in again.records] == [False, False, False]
    assert not [line for line in party.said if "refuses" in line], party.said


def test_two_coordinators_of_one_folder_are_one_too_many(tmp_path: Path) -> None:
    party = deployed(tmp_path, MASKED, ONE_ROUND)
    found: list[str] = []

    def second(node: int, asked: Envelope, answer: Envelope) -> Envelope:
        if not found and stage_of(asked) == "0 mask":
            with pytest.raises(RunDirectoryError) as refused:
                party.conduct()
            found.append(str(refused.value))
        return answer

    party.carrier.touch = second
    result = party.conduct()
    assert "is in use by another process" in found[0]
    assert [record["masked"]["survivors"] for record in result.records] == [4]


STOPPING = {
    "federation": {"rounds": 4},
    "privacy": {
        "unit": "client",
        "epsilon": 8.0,
        "noise_multiplier": 1.0,
        "noise": "distributed",
        "on_exhausted": "stop",
    },
}


@pytest.mark.parametrize(
    ("sampling", "by"),
    [
        ("fixed", "gives it no turn"),
        ("fixed", "that were reserved"),
        pytest.param("fixed", "more than the run has reserved", marks=pytest.mark.nightly),
        pytest.param("schedule", "more than the run has reserved", marks=pytest.mark.nightly),
    ],
)
def test_a_coordinator_that_goes_on_beyond_the_paid_rounds_gets_no_sum(
    tmp_path: Path, sampling: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes refuse a charter that plans to stop early. If they did not, their record of rounds would refuse; without it the
    ledger, and without that the count of noised sums.
    """
    monkeypatch.setattr("secure_fed.deployment.charter._ADMITTED", {})
    if "more than" in by:
        monkeypatch.setattr(RunBudget, "attend", lambda *_: None)
    if "reserved" in by:
        monkeypatch.setattr("secure_fed.deployment.node.rounds_paid", lambda config, _: config.federation.rounds)
    party = deployed(tmp_path, ACTIVE, STOPPING, {"federation": {"sampling": sampling}}, most_epsilon=8.0)

    def charge(gate: coordinator.Gate, round_: int, pass_name: str) -> None:
        gate._wait(round_)  # and no charge

    monkeypatch.setattr(coordinator.Gate, "charge", charge)
    result = party.conduct(too_few="lose")
    ledger = Ledger.open(party.homes[0] / "ledger.sqlite")
    (reserved,) = [row.body["terms"]["releases"] for row in ledger.rows() if row.kind == "reserve"]
    assert ledger.spent().epsilon <= 8.0
    released = [record["round"] for record in result.records if not record.get("lost")]
    assert 0 < reserved < 4
    assert len(released) == reserved
    assert any(by in line["what"] for line in Journal(party.homes[0]).last(20))
