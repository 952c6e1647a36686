"""Clients that count for themselves: under privacy of examples, of persons, and under noise of their own.

Each client counts its own steps, and the largest epsilon is reported. Whatever a lying server requests, no client sends more
noised contributions than it has charged to its account.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from privacy import accounting
from privacy.entropy import Stream, SystemEntropy
from privacy.participation import Poisson
from secure_fed.errors import DataError, MethodError
from secure_fed.federation import Federation
from secure_fed.rounds.client import Client
from secure_fed.rounds.transport import Request
from secure_fed.runs.run import Result
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import LR, PRIVACY, SKETCH
from tests.secure_fed.private_toys import EXAMPLE, NOISE, federation, recorded

SIZES = (8, 20, 60)  # with batches of 4: rates 1/2, 1/5, 1/15, and 2, 5, 15 steps an epoch
STEPS = (2, 5, 15)
ALONE = {"training.microbatch": 1}  # nothing is compared for passes of several
Z = {**EXAMPLE, **ALONE, "privacy.noise_multiplier": 1.0, "training.steps": 2}
LOCAL = {**NOISE, "privacy.noise": "local", "privacy.noise_multiplier": 4.0}


def naive(z: float, counts: dict[str, int], sizes: tuple[int, ...] = SIZES, delta: float = 1e-3) -> dict[str, float]:
    """Every client's epsilon after its `counts` of steps, computed one client at a time."""
    return {
        name: accounting.epsilon(Poisson(size, min(1.0, 4 / size)).release(z), count, delta)
        for size, (name, count) in zip(sizes, sorted(counts.items()), strict=True)
    }


# Examples.


@pytest.mark.slow
def test_epsilon_is_that_of_the_worst_client_and_just_below_the_target(tmp_path: Path) -> None:
    settings = {**EXAMPLE, **ALONE, "privacy.epsilon": 3.0, "training.steps": None, "federation.rounds": 1}
    exchanges = recorded(built := federation({**settings, "evaluation.audit_fraction": 0.0}, sizes=SIZES))
    said = built.run(tmp_path / "run").summary
    ledger = private_toys.own_ledger(tmp_path / "run")
    assert private_toys.charges(ledger) == [(f"client-{i}", STEPS[i]) for i in range(3)]
    epsilons = naive(said["noise_multiplier"], ledger.charged(ledger.rows()[1].run))
    assert said["epsilon"] == said["epsilon_participants"] == said["epsilon_cumulative"] == max(epsilons.values())
    assert 0.99 * 3 < said["epsilon"] <= 3
    assert max(epsilons, key=lambda name: epsilons[name]) == "client-0", "the smallest has the largest batches"
    assert (said["sampling_rate"], said["unit"], said["ended_early"]) == (0.5, "example", None)
    assert "one example" in said["privacy"]["adjacency"]
    assert "NOT PRIVATE" not in said["privacy_statement"]
    assert all(math.isnan(reply.loss) and reply.weight == 1.0 for _, reply in exchanges)


def spent(built: Federation, path: Path) -> tuple[Result, list[list[float]], list[tuple[str, int]]]:
    """Runs the federation: (its result, the weights of each round's replies, the ledger's charges)."""
    exchanges = recorded(built)
    result = built.run(path)
    weights = [
        [reply.weight for request, reply in exchanges if request.round == round_]
        for round_ in range(len(result.records))
    ]
    return result, weights, private_toys.charges(private_toys.own_ledger(path))


@pytest.mark.parametrize("settings", [Z, LOCAL], ids=["example", "local"])
def test_a_client_whose_share_is_spent_sits_out(settings: dict[str, Any], tmp_path: Path) -> None:
    built = federation({**settings, "privacy.participations": 2, "federation.rounds": 4})
    exchanges, states, each = recorded(built), list[Tensors](), settings.get("training.steps", 1)
    built.callbacks.append(SimpleNamespace(on_round_end=lambda record, state: states.append(state.tensors)))
    result, weights, charges = spent(built, tmp_path / "run")
    assert weights == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert charges == [(f"client-{i}", each) for _ in range(2) for i in range(3)]
    assert all((reply.contribution.norm() > 0) == (request.round < 2) for request, reply in exchanges)
    assert not toys.same(states[0], states[1])
    assert toys.same(states[1], states[3])
    assert result.summary["releases"] == 2 * each
    assert result.summary["privacy"]["participations"] == 2


@pytest.mark.slow
def test_a_budget_that_ends_within_a_round_stops_a_client_there(tmp_path: Path) -> None:
    """The budget allows three steps and a round has two: the client takes part in one round and in half of the next."""
    release = Poisson(5, 0.8).release(1.0)
    limit = 0.5 * sum(accounting.epsilon(release, count, 1e-3) for count in (3, 4))
    settings = {**Z, "privacy.epsilon": limit, "privacy.on_exhausted": "stop", "federation.rounds": 4}
    built = federation(settings, 3, sizes=(5, 100, 100))
    result, weights, charges = spent(built, tmp_path / "run")
    assert [releases for who, releases in charges if who == "client-0"] == [2, 1]
    assert [releases for who, releases in charges if who == "client-1"] == [2, 2, 2, 2]
    assert [row[:2] for row in weights] == [[1.0, 1.0], [1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    counts = {"client-0": 3, "client-1": 8, "client-2": 8}
    assert limit >= result.summary["epsilon"] == max(naive(1.0, counts, (5, 100, 100)).values())


def test_fewer_steps_are_fewer_steps() -> None:
    """A client that is allowed one of two steps ends with the result of a single step."""
    whole, short = federation({**Z, "training.steps": 1}, 3), federation(Z, 3)
    for built in (whole, short):
        for client in built.assembly.clients:
            client._setup = replace(client._setup, allowance=lambda who, wanted, round_: 1)
    one, other = (private_toys.one_round(built) for built in (whole, short))
    assert toys.same(one.after.tensors, other.after.tensors)


def test_personal_tensors_are_trained_privately_too(tmp_path: Path) -> None:
    settings = {**Z, "method.personal": ["classifier"], "privacy.clip_norm": 1e-6, "training.optimizer": "sgd"}
    built = federation({**settings, "privacy.noise_multiplier": 1e6, "federation.rounds": 1}, 1)
    start = built.assembly.clients[0].personal
    built.run()
    assert (built.assembly.clients[0].personal - start).norm() > 0.01, "the noise is in what never leaves, too"


# Persons.


@pytest.fixture
def persons(tmp_path: Path) -> Path:
    """Forty-eight notes of twelve patients: each has one note at each of four sites, two calm and two wild."""
    rows = [
        {"text": f"word{row % 40} {mood}", "label": mood, "site": f"site-{row % 4}", "patient": f"patient-{row // 4}"}
        for row, mood in ((row, ("calm", "wild")[row % 2]) for row in range(48))
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    return tmp_path


def of_persons(model: Path, folder: Path, **changed: Any) -> Federation:
    settings = {
        "model.name": str(model),
        "data.train": str(folder / "train.jsonl"),
        "data.test": str(folder / "test.jsonl"),
        "data.client": "site",
        **ALONE,
        "method.modules_to_save": [],
        "federation.rounds": 1,
        "privacy.unit": "person",
        "privacy.person_column": "patient",
        "privacy.delta": 1e-3,
        "privacy.noise_multiplier": 1.0,
        **{name.replace("__", "."): value for name, value in changed.items()},
    }
    return Federation(toys.config(settings))


@pytest.mark.slow
def test_groups_are_the_units(small_model: Path, persons: Path) -> None:
    built = of_persons(small_model, persons)
    problem = built.assembly.problem
    assert problem.persons is not None
    assert [len(own) for own in problem.train] == [len(own) for own in problem.persons] == problem.units == [12] * 4
    said = built.run().summary
    assert said["unit"] == "person"
    assert said["sampling_rate"] == pytest.approx(4 / 12)
    assert said["epsilon"] == accounting.epsilon(Poisson(12, 4 / 12).release(1.0), 1, 1e-3)
    assert "all examples of one person" in said["privacy"]["unit"]
    fewer = of_persons(small_model, persons, data__client="label")
    assert fewer.assembly.problem.units == [12, 12], "twenty-four notes, two of each patient's"
    assert fewer.assembly.protection.plan.sampling_rate == pytest.approx(4 / 12)  # type: ignore[union-attr]


def test_a_column_of_persons_has_to_be_there(small_model: Path, persons: Path) -> None:
    with refused(DataError, "privacy.person_column"):
        of_persons(small_model, persons, privacy__person_column="person")


ONE = PRIVACY["local"]
TWO = {**ONE, **SKETCH}
PASSES = ("sketch", "change")


@dataclass
class Account:
    """Records one client's charges, as (round, releases), and its noised contributions, as (round, pass)."""

    charged: list[tuple[int, int]] = field(default_factory=list)
    noised: list[tuple[int, str]] = field(default_factory=list)
    most: int = 10**9
    private: bool = True

    def allowance(self, who: str, wanted: int, round_: int) -> int:
        granted = min(wanted, self.most - self.releases)
        self.charged += [(round_, granted)] if granted else []
        return granted

    def stream(self, *label: str | int) -> Stream:
        if label[0] == "contribution":
            self.noised.append((int(label[1]), str(label[2])))
        return SystemEntropy().stream(*label)

    @property
    def releases(self) -> int:
        return sum(count for _, count in self.charged)


def build(settings: dict[str, Any], most: int = 10**9) -> tuple[Federation, Client, Account]:
    built = wide_toys.federation(settings)
    client, account = built.assembly.clients[0], Account(most=most)
    protection = replace(built.assembly.protection, entropy=account)
    client._setup = replace(client._setup, protection=protection, allowance=account.allowance)
    return built, client, account


def ask(built: Federation, round_: int, pass_name: str) -> Request:
    """The request of an honest server, with a made-up mean of the first pass."""
    state = replace(built.assembly.initial, round=round_)
    plan = built.assembly.server.plan(state)
    means: dict[str, Tensors] = {}
    if pass_name != plan.passes[0]:
        entries = built.assembly.server.layout(state, plan.passes[0]).entries
        means = {plan.passes[0]: Tensors((name, torch.ones(shape)) for name, shape in entries)}
    request = built.assembly.server.request(state, plan, plan.passes[0] if pass_name == "x" else pass_name, LR, means)
    return replace(request, pass_name=pass_name)


def under(*passes: str) -> Callable[[Request], Request]:
    return lambda request: replace(request, plan=replace(request.plan, passes=passes))


def test_no_pass_is_answered_under_a_plan_that_is_not_the_method_s() -> None:
    """Otherwise the client would train in the pass that the plan lists first, and forget the training after the last."""
    built, client, account = build(ONE)
    honest = ask(built, 0, "change")
    plans = (("change", "x"), ("x", "change"), ("x", "y"), ("change", "change"), ())
    lies = [under(*passes)(request) for request in (honest, ask(built, 0, "x")) for passes in plans]
    lies.append(replace(honest, plan=replace(honest.plan, trainable=honest.plan.trainable[:1])))
    for lie in lies:
        with refused(MethodError, worded=lie is lies[0]):
            client.handle(lie)
    assert account == Account()
    client.handle(honest)
    for lie in lies:
        with refused(MethodError, worded=False):
            client.handle(lie)
    assert (account.charged, account.noised) == ([(0, 1)], [(0, "change")])


@every("before", [[], [(0, "sketch"), (0, "change")], [(0, "sketch"), (1, "sketch")], [(1, "sketch"), (1, "change")]])
def test_a_later_pass_is_answered_once_after_the_first_of_its_round(before: list[tuple[int, str]]) -> None:
    built, client, account = build(TWO)
    for round_, pass_name in before:
        client.handle(ask(built, round_, pass_name))
    charged, noised = list(account.charged), list(account.noised)
    for again in range(3):
        with refused(MethodError, worded=not again):
            client.handle(ask(built, 0, "change"))
    assert (account.charged, account.noised) == (charged, noised)


def test_a_first_pass_that_is_asked_again_trains_again_and_is_charged_again() -> None:
    built, client, account = build(TWO)
    for again in range(1, 4):
        client.handle(ask(built, 0, "sketch"))
        assert account.charged == [(0, 2)] * again
    client.handle(ask(built, 0, "change"))
    assert account.charged == [(0, 2)] * 3
    assert account.noised == [(0, "sketch")] * 3 + [(0, "change")]


def test_when_nothing_is_left_zeros_leave_without_noise() -> None:
    built, client, account = build(TWO, most=2)
    for round_ in range(3):
        replies = [client.handle(ask(built, round_, pass_name)) for pass_name in PASSES]
        assert [reply.weight for reply in replies] == [1.0 if round_ == 0 else 0.0] * 2
        assert [reply.contribution.norm() > 0 for reply in replies] == [round_ == 0] * 2
    assert account.noised == [(0, "sketch"), (0, "change")]


LIES: list[Callable[[Request], Request]] = [
    *[lambda request: request] * 3,
    under("change"),
    under("change", "sketch"),
    lambda request: replace(request, tensors=request.tensors | {"query.lora_A": torch.ones(1)}),
    lambda request: replace(request, tensors=None),  # type: ignore[arg-type]
    lambda request: replace(request, lr=-1.0),
    lambda request: replace(request, layout="00"),
    lambda request: replace(request, means={}),
    lambda request: replace(request, clip_norm=0.05),
]


@pytest.mark.parametrize("seed", chosen(range(4), [0]))
@pytest.mark.parametrize("settings", [ONE, TWO], ids=["one pass", "two passes"])
def test_no_sequence_of_requests_makes_more_noise_than_was_charged(settings: dict[str, Any], seed: int) -> None:
    """Requests for rounds and passes in any order, some of which make training or contributing fail halfway."""
    built, client, account = build(settings, most=20)
    rng = np.random.default_rng(seed)
    answered = 0
    for _ in range(60):
        lie = LIES[rng.integers(len(LIES))]
        request = lie(ask(built, int(rng.integers(3)), PASSES[rng.integers(2)] if settings is TWO else "change"))
        try:
            reply = client.handle(request)
        except Exception:  # any failure
            continue
        finally:
            assert len(account.noised) <= account.releases <= 20
        answered += reply.weight > 0
    assert answered > 5
    assert len(account.noised) >= answered


@every(("settings", "releases"), [(ONE, 4), ({**TWO, "method.name": "fra_then_ffa", "method.switch_round": 2}, 6)])
def test_honest_rounds_are_answered_and_charged_once(settings: dict[str, Any], releases: int) -> None:
    said = wide_toys.federation({**settings, "federation.rounds": 4}).run().summary
    assert (said["rounds"], said["releases"]) == (4, releases)
