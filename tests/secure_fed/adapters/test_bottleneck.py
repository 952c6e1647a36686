"""Bottlenecks against loops over tokens, and the papers' parameter counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from secure_fed.learning.models.adapters.inserted import Bottlenecks
from tests.cells import every
from tests.secure_fed import small_models
from tests.secure_fed.adapters import counts
from tests.secure_fed.adapters.behind import BLOCKS, adapted, by_hand, counted, each_token

BOTH = ("attention", "feed_forward")


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def relu(x: float) -> float:
    return max(x, 0.0)


def written_out(model: nn.Module, at: str, y: Tensor, activation: str) -> Tensor:
    d, b_d, u, b_u = (
        model.get_parameter(f"{at}.adapter.{name}").detach()
        for name in ("down.weight", "down.bias", "up.weight", "up.bias")
    )
    f = {"gelu": gelu, "relu": relu}[activation]

    def one(token: Tensor) -> Tensor:
        inner = [f(float(sum(d[j, i] * token[i] for i in range(16)) + b_d[j])) for j in range(len(d))]
        return torch.stack([token[i] + sum(u[i, j] * inner[j] for j in range(len(d))) + b_u[i] for i in range(16)])

    return each_token(y, one)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
@pytest.mark.parametrize(("blocks", "activation"), [(BOTH, "gelu"), (("feed_forward",), "relu")])
def test_forward_against_loops(architecture: str, blocks: tuple[str, ...], activation: str) -> None:
    model, _ = adapted(architecture, Bottlenecks(2, blocks, activation))
    here = {BLOCKS[architecture][block].format(layer) for block in blocks for layer in (0, 1)}
    expected = by_hand(model, architecture, lambda at, y: written_out(model, at, y, activation) if at in here else y)
    torch.testing.assert_close(small_models.logits(model), expected)


@every("architecture", small_models.ARCHITECTURES)
@every("blocks", [BOTH, ("feed_forward",)])
def test_parameter_count(architecture: str, blocks: tuple[str, ...]) -> None:
    adapter = Bottlenecks(5, blocks)
    model, names = adapted(architecture, adapter)
    assert counted(model, names) == counts.bottlenecks(adapter, [16] * 2 * len(blocks))
    assert len(names) == 4 * 2 * len(blocks)


def test_counts_that_papers_print() -> None:
    """FeDeRA prints 1.8M for FedAP on RoBERTa-base: bottleneck 48 = 768 / 16, without head and LayerNorm.
    C2A prints 0.455 % of DistilBERT's 66M for Adapter: bottleneck 16, with the classifier among the 66M."""
    assert counts.bottlenecks(Bottlenecks(48, BOTH), [768] * 24) == 1_789_056
    distilbert = counts.bottlenecks(Bottlenecks(16, BOTH), [768] * 12)
    assert distilbert == 304_320
    assert 100 * distilbert / 66_955_010 == pytest.approx(0.455, abs=5e-4)


def test_the_start() -> None:
    """D is drawn like LoRA's A, differently at every place; everything else is zero."""
    model = small_models.make("bert")
    names = Bottlenecks(4, BOTH).inject(model, small_models.head_of(model), 3)
    downs = [model.get_parameter(name) for name in names if name.endswith("down.weight")]
    assert all(0.5 / 4 < down.abs().max() <= 1 / 4 for down in downs)
    assert len({tuple(down.flatten().tolist()) for down in downs}) == 4
    assert all(not model.get_parameter(name).any() for name in names if not name.endswith("down.weight"))
