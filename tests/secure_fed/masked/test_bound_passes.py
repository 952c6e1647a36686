"""A lying server that combines clients with different first passes in a later pass, whose sum is then one client's message."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from protocols.errors import Aborted, Tampering
from secure_fed.federation import Federation
from secure_fed.rounds.masked.checks import Passes
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed.masked.lying import Heard, request_of, session
from tests.secure_fed.masked.wide_toys import (
    CLIPPED,
    DISTRIBUTED,
    LR,
    MASKED,
    SKETCH,
    Losing,
    federation,
    flat,
    listen,
    one_round,
)

EIGHT = [3] * 8
ACTIVE = {**MASKED, "secure_aggregation.active": True, "secure_aggregation.dropout": 0.0, "federation.cohort": 4}
ONE_MAY_VANISH = {
    "secure_aggregation.dropout": 0.25,
    "secure_aggregation.corrupt": 0.0,
}  # of four, none may collude then
VICTIM, OTHERS, STILL = 3, (0, 1, 2), (4, 5, 6, 7)
METHODS: dict[str, dict[str, Any]] = {
    "fra_lora": SKETCH,
    "fra_then_ffa": {**SKETCH, "method.name": "fra_then_ffa", "method.switch_round": 2},
    "fedask": {"method.name": "fedask", "method.rank": 2, "method.oversampling": 2},
    "fedpower": {"method.name": "fedpower", "method.rank": 2, "method.oversampling": 2},
}


@pytest.fixture
def any_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients accept any request's values: the binding of passes must hold without these bounds."""
    monkeypatch.setattr(Acceptable, "fault", lambda *given: "")


def mixed(built: Federation, lr: float) -> tuple[list[Heard], dict[int, np.ndarray]]:
    """Later passes over the trained victim and clients trained with learning rate `lr`, and each client's second message."""
    trained, still = request_of(built), request_of(built, lr=lr)
    heard = listen(built)
    sums = [session(built, trained, clients=(*OTHERS, VICTIM)), session(built, still, number=1, clients=STILL)]
    assert not sums[0].refused
    assert not sums[1].refused
    plan = built.assembly.server.plan(built.assembly.initial)
    means: dict[str, Tensors] = {}
    for number, name in enumerate(plan.passes[1:]):
        before = plan.passes[number]
        means[before] = _mean(built, before, sums[-1 if number else 0])
        request = built.assembly.server.request(built.assembly.initial, plan, name, LR, means, trained.digest)
        sums.append(session(built, request, number=2 + number, clients=(VICTIM, *STILL[:3])))
        if sums[-1].refused:
            break
    return sums[2:], heard.values(0, plan.passes[1]) if (0, plan.passes[1]) in heard.replies else {}


def _mean(built: Federation, name: str, found: Heard) -> Tensors:
    layout = built.assembly.server.layout(built.assembly.initial, name)
    encoding = built.assembly.masks.sums.terms.encoding(layout.size, built.assembly.initial.clip_norm)  # type: ignore[union-attr]
    return layout.unflatten(torch.from_numpy(encoding.decode(found.machine.total()).values).float() / 4)


@pytest.mark.usefixtures("any_rate")
@pytest.mark.parametrize(
    ("way", "privacy"),
    chosen(itertools.product(METHODS, ("masks", "central")), [("fra_lora", "central"), ("fedask", "masks")]),
)
def test_clients_with_another_first_pass_refuse_the_second(way: str, privacy: str) -> None:
    central = {**CLIPPED, "federation.sampling": "fixed"} if privacy == "central" else {}
    built = federation({**ACTIVE, **METHODS[way], **central}, sizes=EIGHT)
    (second,), _ = mixed(built, 0.0)
    assert {place for place, _, _ in second.refused.values()} == {"mask"}
    assert set(second.refused) >= set(STILL[:3])
    told = [second.refused[client] for client in STILL[:3]]
    assert all(error is Tampering and "another first request" in what for _, error, what in told)


@pytest.mark.usefixtures("any_rate")
@pytest.mark.parametrize("way", chosen(METHODS, ["fra_lora", "fedpower"]))
def test_without_the_comparison_the_sum_is_the_victims_message(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the comparison: the other clients trained with learning rate 0 and send zeros."""
    monkeypatch.setattr(Passes, "_require_bound", lambda *given: None)
    built = federation({**ACTIVE, **METHODS[way]}, sizes=EIGHT)
    monkeypatch.setattr(Passes, "check", lambda *given: None)
    later, sent = mixed(built, 0.0)
    assert not any(found.refused for found in later)
    assert [client for client, values in sent.items() if np.abs(values).max() > 1e-6] == [VICTIM]
    name = built.assembly.server.plan(built.assembly.initial).passes[1]
    np.testing.assert_allclose(4 * flat(_mean(built, name, later[0])), sent[VICTIM], atol=1e-6)


@pytest.mark.parametrize("second", [(VICTIM, *STILL[:3]), (*OTHERS,)], ids=["mixed", "one less"])
def test_clients_of_another_first_sum_refuse_the_second_though_it_was_asked_alike(second: tuple[int, ...]) -> None:
    """If a later sum mixes two first sums, or leaves out a client of the first, the difference of sums reveals one client."""
    built = federation({**ACTIVE, **SKETCH, **ONE_MAY_VANISH}, sizes=EIGHT)
    first = request_of(built)
    for number, clients in enumerate([(*OTHERS, VICTIM), STILL]):
        assert not session(built, first, number=number, clients=clients).refused
    found = session(built, request_of(built, 0, 1, first), number=2, clients=second)
    assert set(found.refused) == set(second)
    assert all(error is Tampering and "are not the 4 of the" in what for _, error, what in found.refused.values())


@pytest.mark.parametrize("active", [True, False])
def test_a_second_sum_that_loses_a_client_is_opened_by_nobody(active: bool) -> None:
    built = federation({**ACTIVE, **SKETCH, **ONE_MAY_VANISH, "secure_aggregation.active": active}, sizes=EIGHT)
    four = (*OTHERS, VICTIM)
    first = request_of(built)
    assert not session(built, first, clients=four).refused
    found = session(built, request_of(built, 0, 1, first), number=1, clients=four, lost=VICTIM)
    assert found.refused == dict.fromkeys(OTHERS, ("consistency" if active else "unmask", Aborted, ""))


@pytest.mark.parametrize("kind", [MASKED, {**MASKED, "secure_aggregation.active": True}], ids=["passive", "active"])
def test_a_round_that_loses_a_client_between_passes_is_lost_and_the_run_goes_on(kind: dict[str, Any]) -> None:
    built = federation({**kind, **SKETCH, "secure_aggregation.dropout": 0.25}, sizes=EIGHT)
    seen = one_round(built, transport=Losing(built.assembly.transport, {2: "unmask"}))
    assert "1 of 8 clients vanished between two passes" in seen.record["lost"]
    assert seen.after.round == 1
    assert seen.means["change"].any() == False  # noqa: E712 - of a numpy array
    assert seen.record["masked"]["survivors"] == 8
    again = one_round(built, round_=1)
    assert "lost" not in again.record


def test_sums_with_noise_of_their_own_may_lose_clients_between_passes() -> None:
    """Each noised sum is charged as a release, so the guarantee covers the difference of two sums."""
    built = federation({**DISTRIBUTED, **SKETCH, "secure_aggregation.dropout": 0.25}, sizes=EIGHT)
    seen = one_round(built, transport=Losing(built.assembly.transport, {2: "unmask"}))
    assert "lost" not in seen.record
    assert seen.record["masked"]["survivors"] == 7


@pytest.mark.parametrize("lie", ["first", "later", "means", "no means"])
def test_a_request_that_does_not_fit_its_place_in_the_round_is_refused(lie: str) -> None:
    built = federation({**ACTIVE, **SKETCH}, sizes=EIGHT)
    four, first = (*OTHERS, VICTIM), request_of(built)
    if lie == "first":
        found = session(built, replace(first, first="00" * 32), clients=four)
    else:
        assert not session(built, first, clients=four).refused
        second = request_of(built, 0, 1, first)
        wrong = {name: mean.without(list(mean)[:1]) for name, mean in second.means.items()}
        lied = {"later": {"first": ""}, "means": {"means": wrong}, "no means": {"means": {}}}[lie]
        found = session(built, replace(second, **lied), number=1, clients=four)
    assert {(place, error) for place, error, _ in found.refused.values()} == {("mask", Tampering)}
    assert len(found.refused) == 4
