"""The places behind a model's blocks, and the behaviour common to all modules that run behind, or in front of, its layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import FNetConfig, FNetModel, MixtralConfig, MixtralModel

from secure_fed.errors import MethodError
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.inserted import Bottlenecks, Compacters, Mixtures, Scales, attach, places
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.objective import Objective
from secure_fed.tensors.tensors import Layout
from tests.secure_fed import small_models, toys
from tests.secure_fed.adapters.behind import adapted, lively, shake
from tests.secure_fed.example_gradients import losses_at


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


BOTH = ("attention", "feed_forward")
ADAPTERS: dict[str, Any] = {
    "houlsby": Bottlenecks(4, BOTH),
    "pfeiffer": Bottlenecks(4, ("feed_forward",), "relu"),
    "compacter": Compacters(4, 2),
    "adamix": Mixtures(4, 3),
    "ia3": Scales(),
}
DRAWN = [name for name in ADAPTERS if name != "ia3"]


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Any:
    return ADAPTERS[request.param]


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_only_adapter_and_head_train_and_the_model_computes_what_it_did(adapter: Any, architecture: str) -> None:
    model = lively(architecture).float()
    before, kept = small_models.logits(model), [name for name, _ in model.named_parameters()]
    head = small_models.head_of(model)
    names = adapter.inject(model, head, 0)
    assert torch.equal(small_models.logits(model), before)
    assert [name for name, _ in model.named_parameters() if name not in names] == kept
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == {*names, *head}
    shake(model, names)
    assert not torch.allclose(small_models.logits(model), before, atol=1e-4)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_function_of_the_seed_alone(name: str) -> None:
    def drawn(global_seed: int, seed: int) -> bytes:
        model = small_models.make("bert")
        torch.manual_seed(global_seed)
        tensors = read(model, ADAPTERS[name].inject(model, small_models.head_of(model), seed))
        after = torch.rand(1)
        torch.manual_seed(global_seed)
        assert torch.equal(after, torch.rand(1)), "the process-wide generator was used"
        return tensors.to_bytes()

    assert drawn(1, 5) == drawn(2, 5)
    assert (drawn(1, 5) == drawn(1, 6)) == (name not in DRAWN)


def test_the_default_device_draws_nothing_and_models_without_numbers_have_shapes(adapter: Any) -> None:
    usual, elsewhere = small_models.make("bert"), small_models.make("bert")
    head = small_models.head_of(usual)
    expected = read(usual, adapter.inject(usual, head, 5))
    with torch.device("meta"):
        found = read(elsewhere, adapter.inject(elsewhere, head, 5))
        empty = small_models.ARCHITECTURES["bert"]()
    assert found.to_bytes() == expected.to_bytes()
    shapes = read(empty, adapter.inject(empty, head, 5))
    assert Layout.of(shapes) == Layout.of(expected)
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_adapters_of_a_bfloat16_model_are_float32(adapter: Any) -> None:
    model = small_models.make("bert").to(torch.bfloat16)
    names = adapter.inject(model, small_models.head_of(model), 0)
    assert {model.get_parameter(name).dtype for name in names} == {torch.float32}
    shake(model, names)
    assert small_models.logits(model).dtype == torch.bfloat16


def test_a_copy_of_the_model_uses_its_own_adapters(adapter: Any) -> None:
    model = small_models.make("bert")
    names = adapter.inject(model, small_models.head_of(model), 0)
    shake(model, names)
    before = small_models.logits(model)
    for name in names[:: max(1, len(names) // 6)]:
        other = copy.deepcopy(model)
        assert torch.equal(small_models.logits(other), before)
        with torch.no_grad():
            other.get_parameter(name).add_(
                torch.linspace(0, 9, other.get_parameter(name).numel()).view_as(other.get_parameter(name))
            )
        assert torch.equal(small_models.logits(model), before)
        assert not torch.equal(small_models.logits(other), before), name


def test_tensors_given_to_the_objective_take_the_place_of_the_models(adapter: Any) -> None:
    model, names = adapted("bert", adapter)
    moved = copy.deepcopy(model)
    shake(moved, names, seed=12)
    batch = {**small_models.batch(), "labels": torch.tensor([0, 1, 2, 0])}
    objective = Objective(model, classification.loss, torch.device("cpu"))
    objective.eval()
    found = losses_at(objective, {name: moved.get_parameter(name) for name in names}, batch)
    torch.testing.assert_close(found, classification.loss(moved.eval(), batch))
    assert not torch.allclose(found, classification.loss(model.eval(), batch))
    collated = Collate(0)([{"input_ids": ids.numpy(), "labels": 1} for ids in batch["input_ids"][:2]])
    assert objective.losses(collated).shape == (2,)


def test_a_second_adapter_is_refused(adapter: Any) -> None:
    model = small_models.make("bert")
    head = small_models.head_of(model)
    adapter.inject(model, head, 0)
    with pytest.raises(MethodError, match="already"):
        adapter.inject(model, head, 0)


@pytest.mark.parametrize("model", [toys.model(), nn.Sequential(nn.Linear(4, 4))])
def test_a_module_without_known_blocks_is_refused(adapter: Any, model: nn.Module) -> None:
    with pytest.raises(MethodError, match="choose a method on LoRA"):
        adapter.inject(model, [], 0)
