"""A client that lies about its own input, in sums of which the server sees the total only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from privacy.distributed import DistributedGaussian
from privacy.entropy import SystemEntropy
from protocols.client import Client as Masking
from protocols.errors import Tampering
from secure_fed.errors import ConfigError
from secure_fed.rounds.masked.checks import require_plausible
from secure_fed.rounds.masked.encoding_plan import Contribution, Encoding, Noised, PublicPlan, Rounded
from tests.cells import every
from tests.golden import refused
from tests.secure_fed.masked.wide_toys import CLIPPED, DISTRIBUTED, MASKED, federation, one_round

EIGHT = [3] * 8
LIAR = 5
Lie = Callable[[np.ndarray, float], None]  # (the liar's vector, changed in place; a coordinate's bound)


def placed(at: int, *values: float) -> Lie:
    """A lie that puts these multiples of the bound into the vector from place `at` on; it
    ends in weight, loss, and two counts."""

    def lied(numbers: np.ndarray, bound: float) -> None:
        numbers[np.arange(at, at + len(values))] = np.array(values) * bound

    return lied


PLAIN: dict[str, Lie] = {
    "minus everybody's weight": placed(-4, -7),
    "less than that": placed(-4, -9),
    "half a weight": placed(-4, 0.5),
    "9 times its bound": placed(0, 9),
    "a loss beyond all": placed(-3, 3, -6),
    "a count below nobody": placed(-1, -2),
}


def spread(numbers: np.ndarray, bound: float) -> None:
    numbers[:200] = 7.0


def lying(settings: dict[str, Any], lie: Lie, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A federation of eight clients, of which client LIAR sends a vector changed by `lie`."""
    built = federation({**MASKED, **settings}, sizes=EIGHT)
    member = built.assembly.masks.clients[LIAR]  # type: ignore[union-attr]
    honest = member._words
    monkeypatch.setattr(Masking, "_check_vector", lambda self, vector: None)

    def words(stage: Any) -> Any:
        sent, seconds = honest(stage)
        terms = built.assembly.masks.sums.terms  # type: ignore[union-attr]
        encoding: Any = terms.encoding(
            built.assembly.server.layout(built.assembly.initial, "change").size, built.assembly.initial.clip_norm
        )
        scale = (
            encoding.codec.scale if isinstance(encoding, Rounded) else encoding.mechanism.grid(encoding.plan.size).unit
        )
        numbers = np.zeros(len(sent)) + sent.view(np.int32) / scale
        lie(numbers, encoding.plan.bound if isinstance(encoding, Rounded) else 1.0)
        return np.rint(numbers * scale).astype(np.int64).astype(np.int32).view(np.uint32), seconds

    member._words = words
    return built


@pytest.mark.parametrize("what", PLAIN)
def test_a_sum_that_honest_clients_cannot_make_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(Tampering, hide=r"\d+\.\d{2,}"):
        one_round(lying({}, PLAIN[what], monkeypatch))


@pytest.mark.parametrize("settings", [CLIPPED, DISTRIBUTED], ids=["central", "distributed"])
def test_a_sum_that_is_longer_than_all_clip_norms_is_refused(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vector is within every coordinate's bound, so the protocol accepts it."""

    with refused(Tampering, hide=r"\d+\.\d+"):
        one_round(lying({**settings, "federation.sampling": "fixed"}, spread, monkeypatch))


def test_on_many_machines_a_sum_that_a_client_spoiled_costs_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    built = lying({**CLIPPED, "federation.sampling": "fixed"}, spread, monkeypatch)
    server = built.assembly.server
    sums = replace(server.summing, loses_aborted=True)
    built.assembly = replace(built.assembly, server=replace(server, summing=sums))
    seen = one_round(built)
    assert "long, which 8 honest contributors cannot make" in seen.record["lost"]
    assert seen.record["masked"]["bytes_up"] > 0
    before = built.assembly.initial.tensors
    assert all(torch.equal(seen.after.tensors.tensor(name), before.tensor(name)) for name in before)


@pytest.mark.parametrize("length", [0.9, 1.4])
def test_under_the_server_s_noise_a_sum_without_it_is_not_judged(
    length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight honest clients together are within 0.8. A refusal without noise would tell the liar on which side of this limit its
    lie put the sum, and so something about the other clients' sum that no noise hides."""

    def longer(numbers: np.ndarray, bound: float) -> None:
        numbers[:100] = length / 10

    built = lying({**CLIPPED, "federation.sampling": "fixed"}, longer, monkeypatch)
    assert one_round(built).after.tensors.is_finite()


def test_a_lie_within_the_bounds_of_all_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the threat table says: a client can exceed its bound by up to the number of clients."""
    seen = one_round(lying({}, placed(0, 6), monkeypatch))
    assert np.abs(seen.means["change"]).max() > 5


ENCODINGS: dict[str, Encoding] = {
    "rounded": Rounded(PublicPlan(300, 32, 9, 1.5), with_loss=True),
    "clipped": Rounded(PublicPlan(300, 32, 9, 1.0, 0.3)),
    "weighted": Rounded(PublicPlan(300, 32, 9, 1.5), most=1000.0, with_loss=True),
    "long words": Rounded(PublicPlan(300, 64, 9, 1.5), with_loss=True),
    "noised": Noised(PublicPlan(300, 32, 9, 0.3, 0.3), DistributedGaussian(0.3, 9, 9)),
}


@every("name", ENCODINGS)
def test_honest_sums_at_the_very_bounds_are_not_refused(name: str) -> None:
    """Contributions of the largest norm, all in one direction, from all clients, from some or from none."""
    encoding, rng = ENCODINGS[name], np.random.default_rng(1)
    longest = encoding.admitted()
    for trial in range(24):
        values = rng.standard_normal(300) if trial % 2 else np.eye(300)[trial]
        values *= (longest if math.isfinite(longest) else 1.0) / np.linalg.norm(values)
        if trial % 3 == 0 and name in ("rounded", "weighted", "long words"):
            values = np.full(300, 1.5)
        spoken = int(rng.integers(0, 10)) if trial else 9
        weight = float(rng.integers(1, 1200)) if name == "weighted" else 1.0
        stream = SystemEntropy().stream("share")
        words = [
            encoding.encode(Contribution(values, weight, 1e6) if client < spoken else None, stream)
            for client in range(9)
        ]
        require_plausible(encoding.decode(np.sum(words, 0, dtype=words[0].dtype)), encoding, 9)


def test_a_noised_sum_may_be_as_long_as_its_clients_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for six clients: dummies are added to the sum that was checked."""
    built = federation(
        {**MASKED, **CLIPPED, "evaluation.dummies": 20, "federation.cohort": 6, "federation.sampling": "fixed"},
        sizes=[2] * 12,
    )
    limits: list[int] = []
    judge = "secure_fed.rounds.masked.server.require_plausible_release"
    monkeypatch.setattr(judge, lambda *given: limits.append(given[3]))
    one_round(built)
    assert limits == [6]


def test_a_clip_norm_that_adaptive_clipping_may_come_to_is_checked_before_the_run() -> None:
    settings = {**MASKED, **CLIPPED, "privacy.clip_quantile": 0.5, "federation.rounds": 60}
    with refused(ConfigError, "secure_aggregation.bits"):
        federation(settings)
    assert federation({**settings, "secure_aggregation.bits": 64}).assembly.masks
    assert federation({**settings, "federation.rounds": 3}).assembly.masks


def test_the_number_of_lost_rounds_is_withheld() -> None:
    """With a secret cohort it would reveal whether a client that deals wrong shares was drawn."""
    found = federation({**MASKED, **CLIPPED, "federation.rounds": 1}).run()
    assert found.summary["secure_aggregation"]["rounds_lost"] is None
    assert found.whole["secure_aggregation"]["rounds_lost"] == 0
