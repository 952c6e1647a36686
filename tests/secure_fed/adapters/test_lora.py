"""LoRA: the adapted layers, refusals before the model is changed, and initial values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.lora import LoraAdapter, Pair, pairs
from secure_fed.learning.models.adapters.parameters import read
from tests.secure_fed import small_models


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def adapted(architecture: str, **settings: object) -> set[str]:
    model = small_models.make(architecture)
    found = pairs(LoraAdapter(rank=2, **settings).inject(model, small_models.head_of(model), 0))  # type: ignore[arg-type]
    return {pair.module.rpartition(".")[2] for pair in found}


@pytest.mark.parametrize(
    ("architecture", "endings"),
    [
        ("bert", {"query", "value"}),
        ("roberta", {"query", "value"}),
        ("distilbert", {"q_lin", "v_lin"}),  # not among PEFT's defaults
        ("llama", {"q_proj", "v_proj"}),
        ("gpt2", {"c_attn"}),
    ],
)
def test_default_targets(architecture: str, endings: set[str]) -> None:
    assert adapted(architecture) == endings


def test_targets_as_in_peft() -> None:
    assert adapted("bert", target_modules=("key", "attention.output.dense")) == {"key", "dense"}
    assert adapted("bert", target_modules=r".*layer\.1\..*\.(query|key)") == {"query", "key"}
    assert adapted("llama", target_modules="all-linear") == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_the_head_gets_no_adapter() -> None:
    """ "dense" also matches the pooler and a layer of RoBERTa's classifier."""
    for architecture in ("bert", "roberta"):
        model = small_models.make(architecture)
        head = small_models.head_of(model)
        found = pairs(LoraAdapter(rank=2, target_modules=("dense",)).inject(model, head, 0))
        assert len(found) == 6
        assert all(".layer." in pair.module for pair in found)
        assert all(model.get_parameter(name).requires_grad for name in head)


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_only_adapter_and_head_train_and_the_model_computes_what_it_did(architecture: str) -> None:
    model = small_models.make(architecture)
    before = small_models.logits(model)
    head = small_models.head_of(model)
    found = pairs(LoraAdapter(rank=2).inject(model, head, 0))
    assert torch.equal(small_models.logits(model), before)
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert free == {*head, *(name for pair in found for name in (pair.a, pair.b))}


def test_any_module_with_linear_layers() -> None:
    model = plain()
    found = pairs(LoraAdapter(rank=2, target_modules=("0", "2")).inject(model, ["4.weight", "4.bias"], 0))
    assert found == [
        Pair("0", "0.lora_A.default.weight", "0.lora_B.default.weight"),
        Pair("2", "2.lora_A.default.weight", "2.lora_B.default.weight"),
    ]
    assert pairs(name for name, _ in model.named_parameters()) == found


def test_scale_reaches_the_layers() -> None:
    for adapter in (LoraAdapter(2, 5.0, target_modules=("0",)), LoraAdapter(2, 5.0, True, target_modules=("0",))):
        model = plain()
        adapter.inject(model, [], 0)
        assert model[0].scaling["default"] == pytest.approx(adapter.scaling)


def test_a_depends_on_seed_and_name_alone() -> None:
    def drawn(global_seed: int, seed: int) -> dict[str, torch.Tensor]:
        model = plain()
        torch.manual_seed(global_seed)
        found = pairs(LoraAdapter(rank=2, target_modules=("0", "2")).inject(model, [], seed))
        after = torch.rand(1)
        torch.manual_seed(global_seed)
        assert torch.equal(after, torch.rand(1)), "the process-wide generator was used"
        return {pair.module: model.get_parameter(pair.a).detach() for pair in found}

    one, two, three = drawn(1, 5), drawn(2, 5), drawn(1, 6)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], three[name]) for name in one)
    assert all(a.abs().max() <= a.shape[1] ** -0.5 for a in one.values())


def test_the_default_device_draws_nothing() -> None:
    usual, elsewhere = plain(), plain()
    found = pairs(LoraAdapter(rank=2, target_modules=("0", "2")).inject(usual, [], 5))
    with torch.device("meta"):
        LoraAdapter(rank=2, target_modules=("0", "2")).inject(elsewhere, [], 5)
    for name in (name for pair in found for name in (pair.a, pair.b)):
        assert torch.equal(elsewhere.get_parameter(name), usual.get_parameter(name))


def test_adapters_of_a_bfloat16_model_are_float32() -> None:
    model = small_models.make("bert").to(torch.bfloat16)
    head = small_models.head_of(model)
    found = pairs(LoraAdapter(rank=2).inject(model, head, 0))
    assert {model.get_parameter(pair.a).dtype for pair in found} == {torch.float32}
    assert {member.dtype for member in read(model, [*head, found[0].b]).values()} == {torch.float32}
    assert small_models.logits(model).dtype == torch.bfloat16


def test_parameter_count() -> None:
    """r (m + n) for an adapted matrix: FedTT's tables print 49K for rank 2, query and value in 6 layers of RoBERTa-large."""
    assert 12 * 2 * (1024 + 1024) == 49_152
    model = plain()
    found = pairs(LoraAdapter(rank=3, target_modules=("0", "2")).inject(model, [], 0))
    counted = sum(model.get_parameter(name).numel() for pair in found for name in (pair.a, pair.b))
    assert counted == 3 * (8 + 6) + 3 * (8 + 8)


def test_torchs_own_encoder_uses_its_adapters_when_it_evaluates() -> None:
    """Torch's fused kernel would read the frozen weights and skip the adapters."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
    found = pairs(LoraAdapter(rank=2, target_modules="all-linear").inject(encoder, [], 0))
    assert {pair.module.rpartition(".")[2] for pair in found} == {"linear1", "linear2"}
    for pair in found:
        nn.init.normal_(encoder.get_parameter(pair.b))
    x = torch.randn(2, 5, 16)
    trained = encoder.train()(x)
    with torch.no_grad():
        assert torch.allclose(encoder.eval()(x), trained, atol=1e-5)


@pytest.mark.parametrize(
    ("target_modules", "facts"),
    [
        (("query", "qery"), ["'qery'", "absent from BertForSequenceClassification", "'query'", "'dense'"]),
        (("LayerNorm",), ["'LayerNorm'", "a LayerNorm, not a linear layer"]),
        (("classifier",), ["'classifier'", "in the head and trains in full"]),
        ("query", ["'query' matches no linear layer", "pattern for whole names", "'value'"]),
        ("(", ["'('", "not a regular expression"]),
    ],
)
def test_targets_that_are_not_there(target_modules: tuple[str, ...] | str, facts: list[str]) -> None:
    model = small_models.make("bert")
    with pytest.raises((MethodError, ConfigError)) as caught:
        LoraAdapter(rank=2, target_modules=target_modules).inject(model, small_models.head_of(model), 0)
    for fact in ["method.target_modules", *facts]:
        assert fact in str(caught.value)
    assert not pairs(name for name, _ in model.named_parameters()), "the model was touched"


def test_the_refusal_of_layers_that_train_in_full_names_the_setting_they_are_in() -> None:
    """The default targets are in no head of their own; they are there by `method.modules_to_save`."""
    for wanted, setting in (
        ("", r"modules_to_save trains every layer 'query'"),
        (("query",), r"target_modules names 'query'"),
    ):
        model = small_models.make("bert")
        head = [name for name, _ in model.named_parameters() if ".query." in name]
        with pytest.raises(MethodError, match=rf"^method\.{setting}"):
            LoraAdapter(rank=2, target_modules=wanted).inject(model, head, 0)


def test_a_module_of_unknown_names_asks_for_target_modules() -> None:
    with pytest.raises(MethodError, match=r"no query and value layers .* Sequential: set method.target_modules.*'0'"):
        LoraAdapter(rank=2).inject(plain(), [], 0)


def test_rank_above_the_layers_size() -> None:
    model = plain()
    with pytest.raises(
        MethodError, match=r"method.rank = 7 is above 6, the smaller side of layer 0: set method.rank to 6"
    ):
        LoraAdapter(rank=7, target_modules=("0", "2")).inject(model, [], 0)
    assert not pairs(name for name, _ in model.named_parameters())
    LoraAdapter(rank=6, target_modules=("0", "2")).inject(model, [], 0)


def test_a_model_that_is_adapted_already() -> None:
    model = plain()
    LoraAdapter(rank=2, target_modules=("0",)).inject(model, [], 0)
    with pytest.raises(MethodError, match="Sequential already holds PEFT adapters"):
        LoraAdapter(rank=2, target_modules=("2",)).inject(model, [], 0)


def test_one_layer_in_two_places() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(MethodError, match="0 and 2 share one weight"):
        LoraAdapter(rank=2, target_modules=("0",)).inject(nn.Sequential(layer, nn.ReLU(), layer), [], 0)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(MethodError, match="0 and 1 share one weight"):
        LoraAdapter(rank=2, target_modules=("1",)).inject(tied, [], 0)


def test_another_name_for_the_same_place_is_no_second_place() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
    model.first = model.blocks[0]
    LoraAdapter(rank=2, target_modules="all-linear").inject(model, [], 0)
    assert model.first[0] is model.blocks[0][0]
