"""The round: its order, its sums, its bytes, and how it handles clients that send invalid updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from privacy.participation import FixedSize, Poisson, Uniform
from secure_fed.errors import TrainingError
from secure_fed.learning.training.local import Trained
from secure_fed.methods.method import State
from secure_fed.rounds import engine
from secure_fed.rounds.engine import Schedule, run_round
from secure_fed.rounds.server import Server
from secure_fed.rounds.transport import Recording, Reply, Request
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, LayoutError, Tensors
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.masked.lying import request_of

LR = 0.5
TOYS_LR = 0.05  # training.lr of `toys.federation`
CHANGES = {0: 1.0, 1: 2.0, 2: 4.0, 3: 9.0}


def reply_with(
    changes: Mapping[int, float], weights: Mapping[int, float] | None = None
) -> Callable[[int, Request], Reply]:
    """Clients whose change is (c, -c), and who send its squared distance from the mean in a second pass."""

    def answer(client: int, request: Request) -> Reply:
        change = torch.tensor([changes[client], -changes[client]])
        if request.pass_name != "change":
            change = (change - request.means["change"].tensor("w")).square()
        return Reply(client, Tensors({"w": change}), (weights or {}).get(client, 1.0), loss=10.0 + client)

    return answer


def one_round(server: Server, transport: Any, start: State | None = None) -> tuple[State, dict[str, Any]]:
    return run_round(start or toys.state(10.0, 20.0), server, transport, LR)


# Order.


@dataclass
class Noting:
    """An object whose calls of these methods are noted, as (name of the method: what is noted)."""

    inner: Any
    order: list[str]
    names: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name not in self.names:
            return value
        return lambda *given, **named: (self.order.append(self.names[name]), value(*given, **named))[1]


def test_a_round_does_things_in_the_order_it_says() -> None:
    """plan; for every pass charge, draw (once), ask, add each reply as it comes, release; apply; keep; evaluate; tell."""
    order: list[str] = []

    def noting(inner: Any, **names: str) -> Any:
        return Noting(inner, order, names)

    def answer(client: int, request: Request) -> Reply:
        order.append(f"ask {client} for {request.pass_name}")
        return reply_with(CHANGES)(client, request)

    def evaluate(state: State) -> dict[str, Any]:
        order.append(f"evaluate round {state.round}")
        return {"accuracy": 0.5}

    server = toys.server(
        noting(toys.TwoPasses(), plan="plan", apply="apply"),
        noting(FixedSize(4, 2), draw="draw"),
        charge=lambda round_, pass_name: order.append(f"charge {round_} {pass_name}"),
        open_sum=lambda layout: noting(PlainSum(layout), add="add", total="release"),
    )
    keeper = noting(engine.KeepsNothing(), keep="keep")
    schedule = Schedule(1, lambda _: LR, 1)
    for _, record in engine.run(toys.state(0, 0), server, toys.Scripted(answer), schedule, evaluate, keeper):
        order.append("tell")
        assert record["accuracy"] == 0.5
    first, second = server.draw(0)
    order.pop()  # the draw just made
    passes = {
        name: [f"ask {first} for {name}", "add", f"ask {second} for {name}", "add", "release"]
        for name in ("change", "distance")
    }
    assert order == [
        *("plan", "charge 0 change", "draw", *passes["change"]),
        *("charge 0 distance", *passes["distance"]),
        *("apply", "keep", "evaluate round 1", "tell"),
    ]


def test_the_state_goes_from_round_to_round_with_the_rounds_own_learning_rate() -> None:
    rates = []

    def answer(client: int, request: Request) -> Reply:
        rates.append((request.round, request.lr))
        return reply_with({0: 1.0})(client, request)

    server = toys.server(toys.OnePass(), FixedSize(1, 1))
    evaluated = []

    def evaluate(state: State) -> dict[str, Any]:
        evaluated.append(state.round)
        return {}

    schedule = Schedule(5, lambda round_: 1.0 / (round_ + 1), every=3)
    rounds = list(engine.run(toys.state(0, 0), server, toys.Scripted(answer), schedule, evaluate))
    assert [state.tensors.tensor("w").tolist() for state, _ in rounds] == [[n, -n] for n in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert rates == [(n, 1.0 / (n + 1)) for n in range(5)]
    assert [record["lr"] for _, record in rounds] == [lr for _, lr in rates]
    assert evaluated == [3, 5]
    assert [record["round"] for _, record in rounds] == [1, 2, 3, 4, 5]
    later = engine.run(rounds[2][0], server, toys.Scripted(answer), schedule, evaluate)
    assert [record["round"] for _, record in later] == [4, 5], "it goes on from the round that it is given"


# Passes and means.


def test_a_second_pass_sees_the_mean_of_the_first_and_not_the_state_again() -> None:
    transport = toys.Scripted(reply_with(CHANGES))
    recording = Recording(transport)
    after, record = one_round(toys.server(toys.TwoPasses()), recording)
    assert after.tensors.tensor("w").tolist() == [14.0, 16.0]
    assert after.tensors.tensor("spread").tolist() == [9.5, 9.5]  # the variance of 1, 2, 4, 9
    assert transport.asked == [("change", [0, 1, 2, 3]), ("distance", [0, 1, 2, 3])]
    assert record["train_loss"] == 11.5
    assert after.round == 1
    (first, _), (second, _) = recording.exchanges[0], recording.exchanges[4]
    assert (set(first.tensors), set(first.means), set(second.tensors), set(second.means)) == (
        {"w"},
        set(),
        set(),
        {"change"},
    )
    assert record["bytes_down"] == 4 * len(first.tensors.to_bytes()) + 4 * len(second.means["change"].to_bytes())


def test_a_client_rejected_in_one_pass_is_not_asked_in_the_next() -> None:
    transport = toys.Scripted(reply_with({**CHANGES, 2: math.inf}))
    after, record = one_round(toys.server(toys.TwoPasses()), transport)
    assert transport.asked == [("change", [0, 1, 2, 3]), ("distance", [0, 1, 3])]
    assert record["rejected"] == ["cleo"]
    assert after.tensors.tensor("w").tolist() == [14.0, 16.0]
    assert after.tensors.tensor("spread")[0] == pytest.approx(np.var([1, 2, 9]))


@every("weighting", ["uniform", "examples"])
def test_weighting_is_by_the_clients_own_count(weighting: str) -> None:
    federation = toys.federation({"federation.weighting": weighting}, sizes=(5, 8, 11))
    recording = Recording(federation.assembly.transport)
    federation.assembly = replace(federation.assembly, transport=recording)
    federation.run()
    expected = {0: 5.0, 1: 8.0, 2: 11.0} if weighting == "examples" else {0: 1.0, 1: 1.0, 2: 1.0}
    assert {reply.client: reply.weight for _, reply in recording.exchanges} == expected


# Who takes part.


def test_an_empty_cohort_changes_nothing_and_the_run_goes_on() -> None:
    server = toys.server(toys.OnePass(), Poisson(4, 0.3))
    transport = toys.Scripted(reply_with(CHANGES))
    rounds = list(engine.run(toys.state(1, 2), server, transport, Schedule(12, lambda _: LR, 1), lambda _: {}))
    before = toys.state(1, 2)
    for after, record in rounds:
        assert toys.same(after.tensors, before.tensors) == (record["cohort"] == 0)
        if record["cohort"] == 0:
            assert record["train_loss"] is None
            assert record["bytes_up"] == record["bytes_down"] == 0
        before = after
    assert 0 < sum(record["cohort"] == 0 for _, record in rounds) < 12
    assert after.round == 12


@every("bad", [math.nan, math.inf, -math.inf])
def test_a_rejected_client_leaves_the_round_as_if_it_had_not_been_there(bad: float) -> None:
    with_it, record = one_round(toys.server(toys.OnePass()), toys.Scripted(reply_with({**CHANGES, 1: bad})))

    class Without:
        expected = 3.0

        def draw(self, uniform: Uniform, round_: int = 0) -> list[int]:
            return [0, 2, 3]

    without_it, _ = one_round(toys.server(toys.OnePass(), Without()), toys.Scripted(reply_with(CHANGES)))
    assert record["rejected"] == ["ben"]
    assert record["cohort"] == 4
    assert record["train_loss"] == pytest.approx((10 + 12 + 13) / 3)
    assert toys.same(with_it.tensors, without_it.tensors)


def test_a_round_with_nobody_left_fails() -> None:
    transport = toys.Scripted(reply_with(dict.fromkeys(range(4), math.nan)))
    with refused(TrainingError):
        one_round(toys.server(toys.OnePass()), transport)


def test_a_federation_names_the_client_and_goes_on() -> None:
    poisoned = [toys.examples(1, 5), toys.examples(2, 8), toys.examples(3, 11)]
    poisoned[1][0]["x"] = torch.full((6,), math.nan)
    settings = {"training.steps": None, "evaluation.per_client": True}
    with_it = toys.federation(settings, train=poisoned).run()
    assert [record["rejected"] for record in with_it.records] == [["client-1"]] * 3
    assert with_it.state.tensors.is_finite()
    with refused(TrainingError):
        toys.federation({**settings, "federation.nonfinite": "fail"}, train=poisoned).run()


def test_a_client_refuses_a_layout_that_is_not_its_own() -> None:
    federation = toys.federation()
    other = replace(request_of(federation, lr=TOYS_LR), layout=Layout((("w", (2,)),)).digest)
    with refused(LayoutError):
        federation.assembly.clients[0].handle(other)


# Bytes.


@dataclass
class Weighing:
    """A transport that serialises all requests and replies, and counts their bytes by round."""

    inner: Any
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
        for client, request in requests.items():
            sent = [tensors.to_bytes() for tensors in (request.tensors, *request.means.values()) if tensors]
            self.down[request.round] = self.down.get(request.round, 0) + sum(map(len, sent))
            received = replace(request, tensors=Tensors.from_bytes(sent[0]))
            (reply,) = self.inner.exchange({client: received})
            data = reply.contribution.to_bytes()
            self.up[request.round] = self.up.get(request.round, 0) + len(data)
            yield replace(reply, contribution=Tensors.from_bytes(data))


@every("method, personal", [("fra_then_ffa", []), ("fra_lora", ["classifier"])])
def test_bytes_are_those_of_what_travelled_and_travel_changes_nothing(method: str, personal: list[str]) -> None:
    settings = {"method.name": method, "method.personal": personal, "federation.cohort": 2, "training.together": 1}
    if method == "fra_then_ffa":
        settings["method.switch_round"] = 2
    federation = toys.federation(settings)
    weighing = Weighing(federation.assembly.transport)
    federation.assembly = replace(federation.assembly, transport=weighing)
    result = federation.run()
    assert [record["bytes_up"] for record in result.records] == [weighing.up[round_] for round_ in range(3)]
    assert [record["bytes_down"] for record in result.records] == [weighing.down[round_] for round_ in range(3)]
    assert toys.same(result.state.tensors, toys.federation(settings).run().state.tensors)


# Clients.


def test_a_client_keeps_nothing_of_a_round() -> None:
    federation = toys.federation()
    federation.run()
    for client in federation.assembly.clients:
        assert not [name for name, value in vars(client).items() if isinstance(value, Tensors) and len(value)]


def test_a_client_does_not_take_a_diverged_head_into_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = toys.federation({"method.personal": ["classifier"]})
    client, request = federation.assembly.clients[0], request_of(federation, lr=TOYS_LR)
    start = client.personal.to_bytes()

    def diverged(*arguments: Any) -> Trained:
        return Trained(federation.assembly.initial.tensors * math.nan, math.nan)

    monkeypatch.setattr(client, "_setup", replace(client._setup, train=diverged))
    assert not client.handle(request).contribution.is_finite()
    assert client.personal.to_bytes() == start
    monkeypatch.undo()
    assert client.handle(request).contribution.is_finite()
    assert client.personal.to_bytes() != start


# Whole runs.


@every("method", ["fra_then_ffa"])
def test_equal_seeds_give_equal_bits_and_others_others(method: str) -> None:
    settings = {"method.name": method, "federation.cohort": 2, "method.personal": ["classifier"]}
    made = [toys.federation({**settings, "federation.seed": seed}) for seed in (3, 3, 4)]
    runs = [federation.run() for federation in (*made, made[0])]
    assert toys.same(runs[0].state.tensors, runs[1].state.tensors)
    assert toys.without_time(runs[0].records) == toys.without_time(runs[1].records)
    assert not toys.same(runs[0].state.tensors, runs[2].state.tensors)
    assert toys.same(runs[0].state.tensors, runs[3].state.tensors), "run twice, it starts again"
    assert toys.without_time(runs[0].records) == toys.without_time(runs[3].records)
