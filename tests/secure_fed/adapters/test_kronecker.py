"""Compacter's layers against Kronecker products formed by numpy, and the rule that all layers share."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.inserted import RULE, Compacters
from tests.cells import every
from tests.secure_fed import small_models
from tests.secure_fed.adapters import counts
from tests.secure_fed.adapters.behind import adapted, by_hand, counted, each_token

N, BOTTLENECK = 4, 8


def matrix(model: nn.Module, at: str, which: str, n: int) -> np.ndarray:
    """sum_i kron(A_i, s_i t_i^T)."""
    a, s, t = (
        model.get_parameter(name).detach().numpy()
        for name in (f"{RULE}.weight", f"{at}.adapter.{which}_left.weight", f"{at}.adapter.{which}_right.weight")
    )
    return sum(np.kron(a[i], np.outer(s[i], t[i])) for i in range(n))


def written_out(model: nn.Module, at: str, y: Tensor) -> Tensor:
    down, up = (matrix(model, at, which, N) for which in ("down", "up"))
    b_d, b_u = (model.get_parameter(f"{at}.adapter.{which}_left.bias").detach().numpy() for which in ("down", "up"))
    assert down.shape == (BOTTLENECK, 16)
    assert up.shape == (16, BOTTLENECK)

    def one(token: Tensor) -> Tensor:
        inner = down @ token.numpy() + b_d
        inner = np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in inner])
        return token + torch.from_numpy(up @ inner + b_u)

    return each_token(y, one)


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "llama", "gpt2"])
def test_forward_against_kronecker_products(architecture: str) -> None:
    model, _ = adapted(architecture, Compacters(BOTTLENECK, N))
    expected = by_hand(model, architecture, lambda at, y: written_out(model, at, y))
    torch.testing.assert_close(small_models.logits(model), expected)


@every(
    ("architecture", "bottleneck", "n"),
    [*((name, 8, 4) for name in small_models.ARCHITECTURES), ("bert", 4, 1), ("bert", 6, 2), ("bert", 16, 16)],
)
def test_parameter_count(architecture: str, bottleneck: int, n: int) -> None:
    adapter = Compacters(bottleneck, n)
    model, names = adapted(architecture, adapter)
    assert counted(model, names) == counts.compacters(adapter, [16] * 4)


def test_counts_that_papers_print() -> None:
    """C2A prints 0.043 % of DistilBERT's 66M (66,362,880 without the classifier)."""
    assert counts.compacters(Compacters(16, 4), [768] * 12) == 28_288
    assert 0.0425 < 100 * 28_288 / 66_362_880 < 0.0435


def test_one_rule_for_all() -> None:
    model, names = adapted("bert", Compacters(BOTTLENECK, N))
    assert [name for name, _ in model.named_parameters(remove_duplicate=False) if "rule" in name] == [f"{RULE}.weight"]
    assert [name for name in model.state_dict() if "rule" in name] == [f"{RULE}.weight"]
    assert names[0] == f"{RULE}.weight"
    gradient = torch.autograd.grad(model(**small_models.batch()).logits.sum(), model.get_parameter(names[0]))[0]
    assert all(gradient[i].norm() > 0 for i in range(N))


def test_every_factor_can_learn_from_the_second_step_on() -> None:
    """At the start, with s of the upper layer zero, only s and its bias have gradients; after one step all factors have."""
    model = small_models.make("bert").double()
    names = Compacters(BOTTLENECK, N).inject(model, small_models.head_of(model), 0)
    model.double()

    def moving() -> set[str]:
        own = [model.get_parameter(name) for name in names]
        loss = model(**small_models.batch()).logits.square().sum()
        return {name for name, g in zip(names, torch.autograd.grad(loss, own), strict=True) if g.norm() > 0}

    first = moving()
    assert {name.rpartition("adapter.")[2] for name in first} == {"up_left.weight", "up_left.bias"}
    with torch.no_grad():
        for name in first:
            model.get_parameter(name).add_(
                torch.randn(model.get_parameter(name).shape, generator=torch.Generator().manual_seed(1))
            )
    assert moving() == set(names)


@pytest.mark.parametrize(
    ("bottleneck", "n", "what"), [(8, 3, "method.bottleneck"), (9, 3, "the width of bert"), (2, 4, "method.bottleneck")]
)
def test_what_n_does_not_divide_is_refused_before_the_model_is_touched(bottleneck: int, n: int, what: str) -> None:
    model = small_models.make("bert")
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(MethodError, match=f"method.kronecker = {n} does not divide {what}"):
        Compacters(bottleneck, n).inject(model, small_models.head_of(model), 0)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("broken", ["swapped", "transposed"])
def test_the_order_of_a_kronecker_product_matters_here(broken: str) -> None:
    """The expected matrix would reveal B (x) A in place of A (x) B, and a transposed A."""
    model, _ = adapted("bert", Compacters(BOTTLENECK, N))
    at = "bert.encoder.layer.0.output.dense"
    right = matrix(model, at, "down", N)
    a, s, t = (
        model.get_parameter(f"{name}.weight").detach().numpy()
        for name in (RULE, f"{at}.adapter.down_left", f"{at}.adapter.down_right")
    )
    pairs = [(a[i].T if broken == "transposed" else a[i], np.outer(s[i], t[i])) for i in range(N)]
    wrong = sum(np.kron(b, m) if broken == "swapped" else np.kron(m, b) for m, b in pairs)
    assert wrong.shape == right.shape
    assert not np.allclose(wrong, right, atol=1e-2)
