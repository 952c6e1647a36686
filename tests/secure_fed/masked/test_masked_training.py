"""Training with masked sums: every method under every privacy; without privacy the plain run's result up to rounding."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from secure_fed.errors import TrainingError
from secure_fed.federation import Federation
from secure_fed.rounds.transport import Reply
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import (
    MASKED,
    PAIRS,
    PRIVACY,
    SIZES,
    SKETCH,
    WAYS,
    Interrupting,
    federation,
    flat,
    listen,
    one_round,
    scale,
)

# Every privacy, with some way to send; tests/contracts has all methods with masks, with and without client privacy.
QUICK = [
    *(("fra_lora", "nothing"), ("fra_then_ffa", "central"), ("fra_lora sketch", "distributed"), ("fedlora", "hidden")),
    *(("fedlora", "local"), ("fra_then_ffa sketch", "local"), ("fedlora", "example")),
]
COARSE = {"secure_aggregation.range": 1024.0, "training.optimizer": "sgd"}  # so that rounding exceeds float32's


@pytest.mark.slow
@pytest.mark.parametrize(("way", "privacy"), chosen(PAIRS, QUICK))
def test_every_method_works_under_every_privacy(way: str, privacy: str) -> None:
    result = federation({**MASKED, **WAYS[way], **PRIVACY[privacy]}).run()
    assert [record["round"] for record in result.records] == [1, 2, 3]
    assert result.state.tensors.is_finite()
    assert result.summary["secure_aggregation"]["clients"] == len(SIZES)
    assert (result.summary["epsilon"] is None) == (privacy == "nothing")
    told = [record["train_loss"] for record in result.records]
    if privacy == "nothing":
        assert all(isinstance(one, float) and math.isfinite(one) for one in told)
    else:
        assert told == [None] * 3, "a loss is of private examples"


# The mean of each pass, against the clients' contributions.


def _missed(way: str, settings: dict[str, Any]) -> list[float]:
    """The largest error over coordinates, for each released mean."""
    built = federation({**MASKED, **WAYS[way], **settings})
    heard = listen(built)
    seen = one_round(built)
    assert set(seen.means) == {pass_name for _, pass_name in heard.replies}
    oracle = {name: np.mean(list(heard.values(0, name).values()), 0) for name in seen.means}
    return [float(np.abs(seen.means[name] - oracle[name]).max()) for name in seen.means]


@pytest.mark.parametrize("way", chosen(WAYS, ["ffa_lora", "fra_lora sketch", "fra_then_ffa"]))
def test_the_mean_is_off_by_half_a_step_at_most_and_by_most_of_that_somewhere(way: str) -> None:
    bound = 0.5 / scale(len(SIZES), 1024.0)
    missed = _missed(way, COARSE)
    assert max(missed) <= bound + 1e-7  # float32, of means below one
    assert min(missed) >= 0.4 * bound, "the bound is not an empty one"
    assert max(_missed(way, {**COARSE, "secure_aggregation.bits": 64})) < bound / 4


def _apart(left: Tensors, right: Tensors) -> float:
    """The largest difference of a product B A of an adapted matrix, or of a number of the head."""
    one, other = (
        {
            name: dense[name] @ dense[name.replace("lora_B", "lora_A")] if "lora_B" in name else dense[name]
            for name in dense
            if "lora_A" not in name
        }
        for dense in map(private_toys.dense, (left, right))
    )
    assert one.keys() == other.keys()
    assert len(one) >= 4
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("way", chosen(WAYS, ["fedlora", "fra_then_ffa sketch"]))
def test_a_run_behind_masks_ends_where_the_plain_one_does(way: str) -> None:
    """Each of three rounds rounds the mean by up to half a step, which later training may amplify: tenfold is allowed."""
    settings = {**WAYS[way], "training.optimizer": "sgd"}
    plain = federation(settings).run()
    masked = federation({**MASKED, **settings}).run()
    coarse = federation({**MASKED, **settings, "secure_aggregation.range": 2.0**18}).run()
    allowed = 10 * 3 * 0.5 / scale(len(SIZES), 8.0) + 1e-6  # 1e-6 for float32
    assert _apart(masked.state.tensors, plain.state.tensors) <= allowed
    assert _apart(coarse.state.tensors, plain.state.tensors) > allowed, "what is allowed is not too much"
    assert _apart(plain.state.tensors, federation(settings).assembly.initial.tensors) > 1000 * allowed
    for one, other in zip(masked.records, plain.records, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=64 / 8 / scale(4, 8.0) * 4 + 1e-5)
        assert one["cohort"] == other["cohort"]


# Personal tensors, weights and losses.


@pytest.mark.parametrize("way", chosen(WAYS, ["fra_lora", "fra_lora sketch"]))
def test_personal_tensors_stay_at_home(way: str) -> None:
    settings = {**WAYS[way], "method.personal": ["classifier"], "training.optimizer": "sgd", "federation.rounds": 2}
    masked, plain = federation({**MASKED, **settings}), federation(settings)
    sent = listen(masked)
    results = masked.run(), plain.run()
    assert _apart(results[0].state.tensors, results[1].state.tensors) < 1e-5
    for replies in sent.replies.values():
        assert not [name for reply in replies.values() for name in reply.contribution if "classifier" in name]
    kept = [[client.kept for client in built.assembly.clients] for built in (masked, plain)]
    for mine, other in zip(*kept, strict=True):
        assert mine is not None
        assert other is not None
        assert mine.norm() > 0
        assert (mine - other).norm() < 1e-4


def test_a_mean_is_weighted_by_examples_up_to_the_most_that_count() -> None:
    for most, weights in ((1000, [5, 8, 11, 7]), (6, [5, 6, 6, 6])):
        settings = {"federation.weighting": "examples", "secure_aggregation.most_examples": most}
        built = federation({**MASKED, **settings})
        heard = listen(built)
        seen = one_round(built)
        values = heard.values(0, "change")
        oracle = sum(weight * values[client] for client, weight in enumerate(weights)) / sum(weights)
        half = most * len(weights) / 2 / scale(4, 8.0)
        error = np.abs(seen.means["change"] - oracle).max()
        assert error <= 2 * half / sum(weights) + 1e-7  # the weights are rounded, too
        assert np.abs(seen.means["change"] - sum(values.values()) / 4).max() > 1000 * error


# Updates that are not finite, or too large.


def test_a_client_whose_update_is_not_finite_is_left_out_of_sum_and_weight() -> None:
    train = [wide_toys.examples(1, 5), wide_toys.dead(8), wide_toys.examples(3, 11), wide_toys.examples(4, 7)]
    for settings in ({}, SKETCH):
        masked = federation({**MASKED, **settings}, train=train)
        heard = listen(masked)
        seen = one_round(masked)
        for name, mean in seen.means.items():
            finite = [values for client, values in heard.values(0, name).items() if client != 1]
            assert not np.isfinite(heard.values(0, name)[1]).all()
            np.testing.assert_allclose(mean, np.mean(finite, 0), atol=1e-7)
    plain, masked = (one_round(federation(settings, train=train)).record for settings in ({}, MASKED))
    assert masked["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-5)


# Interrupted and resumed.


RESUMED: list[tuple[str, dict[str, Any]]] = [
    *itertools.product(
        ("fedlora", "fra_lora sketch", "fra_then_ffa sketch"),
        ({}, {"secure_aggregation.active": True}, {"federation.vanishing": 0.25}),
    )
]


@pytest.mark.parametrize(("way", "extra"), chosen(RESUMED, [RESUMED[1], RESUMED[8]]), ids=str)
def test_a_run_that_is_interrupted_and_resumed_is_the_same_to_the_bit(
    way: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    settings = {
        **MASKED,
        **WAYS[way],
        **extra,
        "federation.rounds": 3,
        "federation.cohort": 4,
        "federation.server_optimizer": "mean" if "sketch" in way else "momentum",
        "method.personal": ["classifier"],
        **({"secure_aggregation.dropout": 0.25} if extra.get("federation.vanishing") else {}),
    }
    whole = federation(settings, sizes=(5, 8, 11, 7, 6, 9)).run()
    with pytest.raises(KeyboardInterrupt):
        federation(settings, sizes=(5, 8, 11, 7, 6, 9), callbacks=[Interrupting(2)]).run(tmp_path / "run")
    resumed = federation(settings, sizes=(5, 8, 11, 7, 6, 9)).run(tmp_path / "run", resume=True)
    assert toys.same(resumed.state.tensors, whole.state.tensors)
    assert wide_toys.without_time(resumed.records) == wide_toys.without_time(whole.records)


def test_a_federation_run_twice_starts_again() -> None:
    vanishing = {"federation.vanishing": 0.25, "secure_aggregation.dropout": 0.25}
    built = federation({**MASKED, **SKETCH, **vanishing, "federation.rounds": 2})
    first, second = built.run(), built.run()
    assert toys.same(first.state.tensors, second.state.tensors)
    assert wide_toys.without_time(first.records) == wide_toys.without_time(second.records)


# A contribution that cannot be encoded is left out without a name, or fails the run, according to federation.nonfinite.


ACTIVE = {"secure_aggregation.active": True}


def outgrown(built: Federation, clients: set[int], factor: float) -> None:
    """Multiplies the contributions of these clients by `factor`."""
    for client in built.assembly.clients:
        if client.index in clients:
            handle = client.handle

            def handled(request: Any, handle: Any = handle) -> Reply:
                reply: Reply = handle(request)
                return replace(reply, contribution=reply.contribution * factor)

            client.handle = handled  # type: ignore[method-assign]


@pytest.mark.parametrize("factor", chosen([1e6, math.inf, math.nan], [1e6, math.inf]))
def test_what_does_not_fit_is_zeros_of_no_weight_and_is_counted_without_a_name(factor: float) -> None:
    built = federation({**MASKED, **ACTIVE, "federation.nonfinite": "skip"})
    outgrown(built, {1, 2}, factor)
    heard = listen(built)
    seen = one_round(built)
    values = heard.values(0, "change")
    np.testing.assert_allclose(seen.means["change"], (values[0] + values[3]) / 2, atol=1e-6)
    assert seen.record["masked"]["left_out"] == 2
    assert seen.record["masked"]["survivors"] == 4
    assert seen.record["rejected"] == []
    assert "client-" not in str(seen.record)
    result = built.run()
    assert [record["masked"]["left_out"] for record in result.records] == [2, 2, 2]
    assert np.isfinite(flat(result.state.tensors)).all()


def test_nobody_is_left_out_where_everything_fits() -> None:
    assert one_round(federation(MASKED)).record["masked"]["left_out"] == 0


@pytest.mark.parametrize("factor", [1e6, math.nan])
def test_a_run_that_is_to_fail_of_it_says_whose_it_was_and_what_to_set(factor: float) -> None:
    built = federation({**MASKED, **ACTIVE, "federation.nonfinite": "fail", "secure_aggregation.range": 7.0})
    outgrown(built, {1}, factor)
    with refused(TrainingError, hide=r"coordinate \d+ is [-\d.e+]+"):
        built.run()


@pytest.mark.parametrize("factor", [1e6, math.nan])
def test_a_sum_that_everybody_is_left_out_of_is_an_error(factor: float) -> None:
    built = federation({**MASKED, "federation.nonfinite": "skip"})
    outgrown(built, {0, 1, 2, 3}, factor)
    with refused(TrainingError):
        built.run()
