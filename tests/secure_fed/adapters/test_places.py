"""The insertion points of bottleneck adapters, and that an adapter acts there and nowhere else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import FNetConfig, FNetModel, MixtralConfig, MixtralModel

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.inserted import attach, places
from tests.secure_fed import small_models


class Shifted(nn.Module):
    """y -> y + shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, y: Tensor) -> Tensor:
        return y + self.shift


@pytest.mark.parametrize("architecture", small_models.PLACED)
def test_two_places_a_layer_in_order(architecture: str) -> None:
    found = places(small_models.make(architecture))
    assert [(place.layer, place.block) for place in found] == [
        (0, "attention"),
        (0, "feed_forward"),
        (1, "attention"),
        (1, "feed_forward"),
    ]
    assert {place.width for place in found} == {16}


@pytest.mark.parametrize("architecture", small_models.PLACED)
def test_each_place_is_asked_once_a_pass_with_that_layers_output(architecture: str) -> None:
    model = small_models.make(architecture)
    before = small_models.logits(model)
    names = [name for name, _ in model.named_parameters()]
    seen: dict[str, list[Tensor]] = {}
    for place in places(model):
        full = attach(model, place.module, "adapter", Shifted(place.width))
        assert full == f"{place.module}.adapter"
        layer = model.get_submodule(full)
        layer.register_forward_hook(lambda _, args, __, full=full: seen.setdefault(full, []).append(args[0]))
    assert torch.equal(small_models.logits(model), before)
    assert all(len(calls) == 1 and calls[0].shape[-1] == 16 for calls in seen.values())
    assert len(seen) == 4
    kept = [name for name, _ in model.named_parameters() if not name.endswith(".adapter.shift")]
    assert kept == names, "the base model's parameters keep their names"


def test_a_place_changes_what_the_model_computes_as_a_bias_there_would() -> None:
    model, other = small_models.make("bert"), small_models.make("bert")
    place = places(model)[1].module
    attach(model, place, "adapter", Shifted(16))
    shift = torch.linspace(-1, 1, 16)
    with torch.no_grad():
        model.get_parameter(f"{place}.adapter.shift").copy_(shift)
        other.get_parameter(f"{place}.bias").add_(shift)
    assert torch.allclose(small_models.logits(model), small_models.logits(other), atol=1e-6)


def test_a_copy_of_the_model_calls_its_own_adapter() -> None:
    model = small_models.make("bert")
    place = places(model)[0].module
    attach(model, place, "adapter", Shifted(16))
    twin, before = copy.deepcopy(model), small_models.logits(model)
    with torch.no_grad():
        twin.get_parameter(f"{place}.adapter.shift").copy_(torch.linspace(-1, 1, 16))
    assert torch.equal(small_models.logits(model), before)
    assert not torch.allclose(small_models.logits(twin), before)


def test_a_layer_without_a_known_block_is_refused_by_name() -> None:
    """Experts are no single linear layer; FNet has no attention, and adapters behind its feed-forward blocks are possible."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 40}
    with torch.device("meta"):
        experts = MixtralModel(MixtralConfig(**shape, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0))
        mixing = FNetModel(FNetConfig(**shape))
    mixed = small_models.make("bert")
    mixed.get_submodule("bert.encoder.layer.1.attention.output").dense = nn.Identity()
    for model, block, layer in (
        (experts, "feed-forward", "layers.0 of MixtralModel"),
        (mixing, "attention", "encoder.layer.0 of FNetModel"),
        (mixed, "attention", "bert.encoder.layer.1 of BertForSequenceClassification"),
    ):
        with pytest.raises(MethodError, match=f"no {block} block is known in {layer}.*method on LoRA"):
            places(model)
    assert len(places(mixing, ["feed_forward"])) == len(places(experts, ["attention"])) == 2


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(MethodError, match="no attention and feed-forward blocks are known in Sequential"):
        places(nn.Sequential(nn.Linear(2, 2)))
    model = small_models.make("bert")
    place = places(model)[0].module
    attach(model, place, "adapter", Shifted(16))
    with pytest.raises(MethodError, match="already has an adapter"):
        attach(model, place, "adapter", Shifted(16))
