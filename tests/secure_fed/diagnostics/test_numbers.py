"""The diagnostics' numbers, compared with loops that do not use the package."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.lora import Pair
from secure_fed.rounds.diagnostics import AggregationError, features, linear_cka, of_columns, of_wholes
from secure_fed.tensors.tensors import Tensors


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_columns_by_a_loop() -> None:
    v, w = random(5, 7), random(5, 7, seed=1)
    magnitudes, directions = [], []
    for j in range(7):
        a, b = [float(x) for x in v[:, j]], [float(x) for x in w[:, j]]
        length_a, length_b = math.sqrt(sum(x * x for x in a)), math.sqrt(sum(x * x for x in b))
        magnitudes.append(abs(length_a - length_b))
        directions.append(1 - sum(x * y for x, y in zip(a, b, strict=True)) / (length_a * length_b))
    assert of_columns(v, w) == pytest.approx((sum(magnitudes) / 7, sum(directions) / 7))


def test_columns_of_known_angles() -> None:
    before = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    after = torch.tensor([[3.0, 0.0, -1.0], [0.0, 1.0, 0.0]])  # longer, turned by 90 degrees, reversed
    assert of_columns(before, after) == pytest.approx((2 / 3, (0 + 1 + 2) / 3))
    assert of_columns(before, before * 5) == pytest.approx((4.0, 0.0))


def test_columns_of_zeros() -> None:
    zeros = torch.zeros(2, 2)
    assert of_columns(zeros, zeros) == (0.0, 0.0)
    assert of_columns(zeros, torch.eye(2)) == (1.0, 1.0)
    assert of_columns(torch.eye(2), zeros) == (1.0, 1.0)


def test_a_vector_is_one_column_and_more_axes_are_flattened() -> None:
    v, w = random(6), random(6, seed=1)
    assert of_columns(v, w) == pytest.approx(of_columns(v[:, None], w[:, None]))
    v, w = random(3, 2, 4), random(3, 2, 4, seed=1)
    assert of_columns(v, w) == pytest.approx(of_columns(v.reshape(3, 8), w.reshape(3, 8)))


def test_wholes_are_one_long_vector() -> None:
    v, w = [random(2, 3), random(4, seed=2)], [random(2, 3, seed=3), random(4, seed=4)]
    one = np.concatenate([part.numpy().ravel() for part in v])
    other = np.concatenate([part.numpy().ravel() for part in w])
    expected = (np.linalg.norm(one - other), one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    assert of_wholes(zip(v, w, strict=True)) == pytest.approx(expected)


def test_the_angle_to_nothing_is_no_number() -> None:
    magnitude, direction = of_wholes([(torch.zeros(3), torch.ones(3))])
    assert magnitude == pytest.approx(math.sqrt(3))
    assert math.isnan(direction)


def naive_cka(x: Tensor, y: Tensor) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with centred linear kernels, entry by entry."""

    def centred(features: Tensor) -> list[list[float]]:
        n = len(features)
        kernel = [[float((features[i] * features[j]).sum()) for j in range(n)] for i in range(n)]
        rows = [sum(row) / n for row in kernel]
        whole = sum(rows) / n
        return [[kernel[i][j] - rows[i] - rows[j] + whole for j in range(n)] for i in range(n)]

    def inner(k: list[list[float]], m: list[list[float]]) -> float:
        return sum(a * b for row, other in zip(k, m, strict=True) for a, b in zip(row, other, strict=True))

    k, m = centred(x), centred(y)
    return inner(k, m) / math.sqrt(inner(k, k) * inner(m, m))


@pytest.mark.parametrize("shape", [(12, 3), (5, 9)])
def test_cka_by_kernels(shape: tuple[int, int]) -> None:
    x, y = random(*shape), random(shape[0], shape[1] + 1, seed=1)
    assert linear_cka(x, y) == pytest.approx(naive_cka(x, y))


def test_cka_knows_no_rotation_scale_or_shift() -> None:
    x = random(40, 4)
    rotation = torch.linalg.qr(random(4, 4, seed=1)).Q
    assert linear_cka(x, 3 * x @ rotation + 5) == pytest.approx(1)
    assert linear_cka(x, x @ random(4, 4, seed=2)) < 0.999
    assert linear_cka(x, random(40, 4, seed=3)) < 0.5
    assert math.isnan(linear_cka(x, torch.ones(40, 4)))


class Gives(nn.Module):
    """A model that always returns the given output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, **inputs: Tensor) -> Any:
        return self.output


def seen(output: Any, batch: dict[str, Tensor] | None = None) -> Tensor:
    return features(Gives(output), lambda model, inputs: torch.zeros(len(model(**inputs))), [batch or {}])


class Output(SimpleNamespace):
    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))


def test_features_are_what_leaves_the_model() -> None:
    scores = random(6, 3).float()
    assert torch.equal(seen(scores), scores)
    assert torch.equal(seen(Output(logits=scores)), scores)
    assert torch.equal(seen(scores[:, 0]), scores[:, :1])


def test_features_of_tokens_leave_padding_out() -> None:
    scores, mask = random(2, 3, 4).float(), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.equal(seen(scores, {"attention_mask": mask}), torch.stack([scores[0, 0], scores[0, 1], scores[1, 0]]))
    assert torch.equal(seen(scores), scores.reshape(6, 4))
    ends = Output(start_logits=scores[..., 0], end_logits=scores[..., 1])
    assert torch.equal(seen(ends, {"attention_mask": mask}), seen(scores[..., :2], {"attention_mask": mask}))


def test_features_are_four_an_example_at_most() -> None:
    tokens = torch.arange(300.0).reshape(3, 100, 1)
    found = seen(tokens)
    assert (found.shape, found[0].item(), found[-1].item()) == ((12, 1), 0.0, 299.0)
    assert found[:, 0].diff().min() >= 27


def test_a_model_without_logits() -> None:
    with pytest.raises(ConfigError, match=r"'drift' compares logits, and the model gives a Output"):
        seen(Output(hidden=[1]))


PAIR = Pair("layer", "a", "b")


def round_of(clients: int, weights: list[float], rank: int = 2) -> tuple[dict[str, float], list[tuple[Tensor, Tensor]]]:
    """The aggregation errors of a round whose clients have random factors, and these factors."""
    factors = [(random(6, rank, seed=i), random(rank, 5, seed=100 + i)) for i in range(clients)]
    error = AggregationError([PAIR])
    for (b, a), weight in zip(factors, weights, strict=True):
        error.see(Tensors({"a": torch.zeros(rank, 5), "b": torch.zeros(6, rank)}), Tensors({"a": a, "b": b}), weight)
    return error.collected(), factors


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 5.0, 2.0]])
def test_errors_of_aggregation_by_hand(weights: list[float]) -> None:
    told, factors = round_of(3, weights)
    total = sum(weights)
    bs = torch.stack([weight / total * b for weight, (b, _) in zip(weights, factors, strict=True)])
    products = torch.stack([weight / total * (b @ a) for weight, (b, a) in zip(weights, factors, strict=True)])
    mean, mean_b = products.sum(dim=0), bs.sum(dim=0)
    mean_a = torch.stack([weight / total * a for weight, (_, a) in zip(weights, factors, strict=True)]).sum(dim=0)
    u, s, vt = np.linalg.svd(np.asarray(mean))
    rest = np.asarray(mean) - (u[:, :2] * s[:2]) @ vt[:2]
    norm = np.linalg.norm(np.asarray(mean))
    assert told["fedavg"] == pytest.approx(np.linalg.norm(np.asarray(mean - mean_b @ mean_a)) / norm)
    assert told["fra"] == pytest.approx(np.linalg.norm(rest) / norm)


def test_of_two_clients_it_is_the_papers_formula() -> None:
    told, ((b1, a1), (b2, a2)) = round_of(2, [1.0, 1.0])
    mean = (b1 @ a1 + b2 @ a2) / 2
    assert told["fedavg"] == pytest.approx(float((0.25 * (b1 - b2) @ (a1 - a2)).norm() / mean.norm()))


def test_one_client_loses_nothing() -> None:
    told, _ = round_of(1, [1.0])
    assert told == pytest.approx({"fedavg": 0, "fra": 0}, abs=1e-7)


def test_a_round_is_told_once() -> None:
    error = AggregationError([PAIR])
    assert error.collected() == {}
    error.see(Tensors({"a": random(2, 5), "b": random(6, 2)}), Tensors(), 1.0)
    assert error.collected()
    assert error.collected() == {}
