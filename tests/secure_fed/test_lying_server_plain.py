"""Local noise against a server that lies: whatever it requests, no client sends more noised contributions than it has charged
to its account."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from privacy.entropy import Stream, SystemEntropy
from secure_fed.errors import MethodError
from secure_fed.federation import Federation
from secure_fed.rounds.client import Client
from secure_fed.rounds.transport import Request
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed.masked.wide_toys import LR, PRIVACY, SKETCH, federation

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
    built = federation(settings)
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
    said = federation({**settings, "federation.rounds": 4}).run().summary
    assert (said["rounds"], said["releases"]) == (4, releases)
