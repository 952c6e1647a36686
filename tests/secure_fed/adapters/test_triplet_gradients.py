"""B E A in training: per-example gradients, and no cost for a layer without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.learning.models.adapters.triplet import TripletAdapter, TripletLayer, kept, triplets
from tests.secure_fed import small_models
from tests.secure_fed.adapters.gradients import both
from tests.secure_fed.adapters.test_triplet import fill, made
from tests.secure_fed.example_gradients import one_by_one, together


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "llama", "gpt2"])
def test_per_example_gradients_are_made_in_one_pass(architecture: str) -> None:
    model, names = made(architecture)
    path, found, expected = both(model, [*names, *small_models.head_of(model)])
    assert path is together
    for name in names:
        assert expected[name].flatten(1).norm(dim=1).min() > 1e-9
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-12)


def test_where_examples_share_positions_they_are_made_one_at_a_time() -> None:
    model, names = made("deberta_v3", adapter=TripletAdapter(LoraAdapter(rank=2, target_modules=("query_proj",))))
    assert both(model, names)[0] is one_by_one


def test_per_example_gradients_with_a_module_without_ranks() -> None:
    model, names = made("bert")
    gone, left = triplets(names)[0], triplets(names)[1]
    tensors = kept(read(model, names), {t.module: torch.full((3,), t != gone) for t in triplets(names)})
    for name in gone[1:]:
        model.get_parameter(name).data = tensors.tensor(name)
    path, found, expected = both(model, [*names, *small_models.head_of(model)])
    assert path is together
    assert {name: tuple(found[name].shape[1:]) for name in gone[1:]} == {gone.a: (0, 16), gone.e: (0,), gone.b: (16, 0)}
    for name in left[1:]:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-8, atol=1e-12)


def without(model: nn.Module, names: list[str], modules: set[str]) -> dict[str, Tensor]:
    """The tensors of the model's triplets, with no ranks left in these modules."""
    tensors = fill(model, names)
    live = {t.module: torch.full((3,), t.module not in modules) for t in triplets(names)}
    return {name: kept(tensors, live).tensor(name).requires_grad_() for name in names}


class Counted:
    """Counts the triplets' calls in a forward pass, and the numbers that it saves for the backward pass."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.saved = 0
        forward = TripletLayer.forward

        def counting(layer: TripletLayer, x: Tensor) -> Tensor:
            self.calls += 1
            return forward(layer, x)

        def pack(tensor: Tensor) -> Tensor:
            self.saved += tensor.numel()
            return tensor

        with monkeypatch.context() as patched, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            patched.setattr(TripletLayer, "forward", counting)
            self.logits = functional_call(model, tensors, (), small_models.batch()).logits


def test_a_module_without_ranks_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not called and saves nothing; below the first module with ranks there is no backward pass."""
    model, names = made("bert")
    model.requires_grad_(False)
    modules = [triplet.module for triplet in triplets(names)]
    all_, last, none = (
        Counted(model, without(model, names, gone), monkeypatch)
        for gone in (set[str](), set(modules[:-1]), set(modules))
    )
    assert (all_.calls, last.calls, none.calls) == (4, 1, 0)
    assert none.saved == 0
    assert not none.logits.requires_grad
    assert 0 < last.saved < all_.saved / 2
    assert torch.equal(none.logits, small_models.make("bert")(**small_models.batch()).logits)
