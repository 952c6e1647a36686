"""SVD adaptation: B, E and A are averaged separately."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.triplet import TripletAdapter, triplets
from secure_fed.methods.method import CHANGE
from tests.cells import chosen
from tests.secure_fed.methods.learning import assert_learns
from tests.secure_fed.methods.rounds import HEAD_PREFIXES, means_of, method_of, start, trained

PRIVACY: dict[str, dict[str, Any]] = {
    "none": {},
    "example": {"privacy.unit": "example", "privacy.noise_multiplier": 0.3, "privacy.delta": 1e-3},
    "client": {"privacy.unit": "client", "privacy.noise_multiplier": 0.02, "privacy.delta": 1e-3},
    "masks": {"secure_aggregation.enabled": True},
    "momentum": {"federation.server_optimizer": "momentum", "federation.server_lr": 0.5},
}


def test_everything_trains_and_travels() -> None:
    method: Any = method_of("svd_adaptation", rslora=True)
    assert method.adapter == TripletAdapter(LoraAdapter(3, 6.0, True))
    state = start(method)
    own = {name for triplet in triplets(state.tensors) for name in triplet[1:]}
    assert set(state.tensors) == own | {name for name in state.tensors if name.startswith(HEAD_PREFIXES)}
    plan = method.plan(state)
    assert set(plan.trainable) == set(plan.down) == set(state.tensors)
    assert plan.passes == (CHANGE,)


def test_a_round_by_hand() -> None:
    """Each factor is the mean of the clients' factors; their product is not the mean of the clients' products."""
    method = method_of("svd_adaptation")
    state = start(method)
    afters = [trained(method, state, client) for client in range(3)]
    found = method.apply(state, means_of(method, state, afters)).tensors
    for name in found:
        want = sum(after.tensor(name).double() for after in afters) / 3
        torch.testing.assert_close(found.tensor(name).double(), want, atol=1e-6, rtol=0)
    for _, a, e, b in triplets(found):
        product = found.tensor(b) * found.tensor(e) @ found.tensor(a)
        products = [after.tensor(b) * after.tensor(e) @ after.tensor(a) for after in afters]
        assert (product - sum(products) / 3).norm() > 0.1 * product.norm()
    assert not method.card.mean_exact


@pytest.mark.parametrize("privacy", chosen(PRIVACY, ["none", "client"]))
def test_a_run_learns(privacy: str) -> None:
    run = assert_learns({"method.name": "svd_adaptation", "training.lr": 0.05, **PRIVACY[privacy]})
    assert all(run.state.tensors.tensor(triplet.e).any() for triplet in triplets(run.state.tensors))


def test_as_lora_has_the_product() -> None:
    method: Any = method_of("svd_adaptation")
    state = start(method)
    after = trained(method, state, 1)
    form = method.as_lora(state.tensors, state.tensors | after)
    assert form.adapter == LoraAdapter(3, 6.0)
    for module, a, e, b in triplets(after):
        factor_a, factor_b = form.factors[module]
        want = after.tensor(b) @ torch.diag(after.tensor(e)) @ after.tensor(a)
        torch.testing.assert_close(factor_b @ factor_a, want)
