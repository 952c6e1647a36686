"""Training with masked sums: every method under every privacy; without privacy the plain run's result up to rounding."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from secure_fed.errors import TrainingError
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import private_toys, toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import (
    MASKED,
    PAIRS,
    PRIVACY,
    SIZES,
    SKETCH,
    WAYS,
    federation,
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


@pytest.mark.parametrize("way", WAYS)
def test_the_mean_is_off_by_half_a_step_at_most_and_by_most_of_that_somewhere(way: str) -> None:
    bound = 0.5 / scale(len(SIZES), 1024.0)
    missed = _missed(way, COARSE)
    assert max(missed) <= bound + 1e-7  # float32, of means below one
    assert min(missed) >= 0.4 * bound, "the bound is not an empty one"
    assert max(_missed(way, {**COARSE, "secure_aggregation.bits": 64})) < bound / 4


def _products(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The product B A of every adapted matrix, and the head's tensors."""
    dense = private_toys.dense(tensors)
    found = {name: tensor for name, tensor in dense.items() if "lora_" not in name}
    for name in dense:
        if "lora_B" in name:
            found[name] = dense[name] @ dense[name.replace("lora_B", "lora_A")]
    return found


def _apart(left: Tensors, right: Tensors) -> float:
    one, other = _products(left), _products(right)
    assert one.keys() == other.keys()
    assert len(one) >= 4
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("way", WAYS)
def test_personal_tensors_stay_at_home(way: str) -> None:
    settings = {**WAYS[way], "method.personal": ["classifier"], "training.optimizer": "sgd"}
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


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_training_loss_is_that_of_the_plain_run(weighting: str) -> None:
    settings = {"federation.weighting": weighting, "federation.rounds": 1}
    masked, plain = federation({**MASKED, **settings}).run(), federation(settings).run()
    assert masked.records[0]["train_loss"] == pytest.approx(plain.records[0]["train_loss"], abs=1e-5)


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
    plain = federation(train=train).run()
    again = federation(MASKED, train=train).run()
    for one, other in zip(again.records, plain.records, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=1e-5)


def test_a_run_that_is_to_fail_names_the_client() -> None:
    train = [wide_toys.examples(1, 5), wide_toys.dead(8), wide_toys.examples(3, 11), wide_toys.examples(4, 7)]
    with pytest.raises(TrainingError, match=r"client-1 .*not finite.*training\.lr.*federation\.nonfinite"):
        federation({**MASKED, "federation.nonfinite": "fail"}, train=train).run()


def test_a_round_with_no_finite_update_fails() -> None:
    with pytest.raises(TrainingError, match=r"finite.*training\.lr"):
        federation(MASKED, train=[wide_toys.dead(5) for _ in range(4)]).run()


@pytest.mark.parametrize("way", ["fedlora", "fra_lora sketch"])
def test_an_update_beyond_the_range_is_one_clear_error(way: str) -> None:
    settings = {**MASKED, **WAYS[way], "secure_aggregation.range": 1e-3, "federation.nonfinite": "fail"}
    with pytest.raises(
        TrainingError,
        match=r"client client-0: coordinate \d+ is -?[\d.e-]+, .* 0\.001; raise secure_aggregation\.range",
    ) as caught:
        federation(settings).run()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("factor", [1000.0, -1000.0])
def test_a_loss_of_any_size_does_no_harm_to_the_sum(factor: float) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        scores = model(batch["x"])
        return factor * torch.nn.functional.cross_entropy(scores, batch["labels"], reduction="none")

    settings = {"training.optimizer": "sgd", "training.lr": 1e-5}
    masked, plain = federation({**MASKED, **settings}, loss=loss).run(), federation(settings, loss=loss).run()
    assert _apart(masked.state.tensors, plain.state.tensors) < 1e-6


# Interrupted and resumed.


class Interrupting:
    def __init__(self, after: int) -> None:
        self.after = after

    def on_round_end(self, record: dict[str, Any], state: Any) -> None:
        if record["round"] == self.after:
            raise KeyboardInterrupt


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
        "federation.rounds": 4,
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
    built = federation({**MASKED, **SKETCH, "federation.vanishing": 0.25, "secure_aggregation.dropout": 0.25})
    first, second = built.run(), built.run()
    assert toys.same(first.state.tensors, second.state.tensors)
    assert wide_toys.without_time(first.records) == wide_toys.without_time(second.records)
