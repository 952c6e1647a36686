"""The methods that average a whole adapter: factors whose mean is not the mean of the matrices, and whole runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from secure_fed.learning.models.adapters.triplet import triplets
from secure_fed.methods import card
from secure_fed.tensors.tensors import Tensors
from tests.cells import every
from tests.contracts import runs
from tests.secure_fed import toys
from tests.secure_fed.methods.rounds import means_of, method_of, start, trained


def kronecker(tensors: Tensors) -> Tensor:
    at = "bert.encoder.layer.0.output.dense.adapter.down"
    a, s, t = (tensors.tensor(n).numpy() for n in ("kronecker_rule.weight", f"{at}_left.weight", f"{at}_right.weight"))
    return torch.from_numpy(sum(np.kron(a[i], np.outer(s[i], t[i])) for i in range(len(a))))


def product_of_three(tensors: Tensors) -> Tensor:
    _, a, e, b = triplets(tensors)[0]
    return tensors.tensor(b) * tensors.tensor(e) @ tensors.tensor(a)


def train_of_cores(tensors: Tensors) -> Tensor:
    """FedTT's eq. (2)."""
    product = torch.ones(1)
    for j in range(4):
        core = tensors.tensor(f"bert.encoder.layer.0.output.dense.tensor_train.down.core_{j}")
        product = torch.tensordot(product, core, dims=1)
    return product


@every(("name", "matrix"), [("compacter", kronecker), ("svd_adaptation", product_of_three), ("fedtt", train_of_cores)])
def test_the_mean_of_factors_is_not_that_of_the_matrices(name: str, matrix: Callable[[Tensors], Tensor]) -> None:
    """The reason for `mean_exact=False` on the card."""
    method = method_of(name)
    state = start(method)
    afters = [trained(method, state, seed, 0.5) for seed in range(3)]
    found = matrix(method.apply(state, means_of(method, state, afters)).tensors)
    mean = sum(map(matrix, afters)) / 3
    assert (found - mean).norm() > 0.1 * mean.norm()
    assert not card(name).mean_exact


@pytest.mark.parametrize("name", ["bitfit", "adapter_houlsby", "ia3"])
def test_every_tensor_of_the_adapter_and_the_head_learns(name: str) -> None:
    built = runs.federation(runs.settings(name, **{"training.optimizer": "adamw"}))
    begun, end = built.assembly.initial.tensors, built.run().state.tensors
    assert not [tensor for tensor in end if torch.equal(end.tensor(tensor), begun.tensor(tensor))]


def test_the_experts_drawn_are_the_same_in_every_run() -> None:
    def run(seed: int) -> Tensors:
        found = runs.federation(runs.settings("adamix", **{"federation.rounds": 1, "federation.seed": seed}))
        before = torch.get_rng_state()
        tensors = found.run().state.tensors
        assert torch.equal(torch.get_rng_state(), before)
        return tensors

    first = run(0)
    assert toys.same(first, run(0))
    assert not toys.same(first, run(1))
