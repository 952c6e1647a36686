"""Adapters that train all parameters of a model, its biases, or its head alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.parameters import Biases, Everything, HeadAlone
from tests.golden import refused
from tests.secure_fed import small_models
from tests.secure_fed.adapters.behind import counted


class Tied(nn.Module):
    """A model whose output layer shares its weight with the input embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.score = nn.Linear(6, 9, bias=False)
        self.score.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.score(self.inner(self.embed(ids)).tanh().mean(1))
        return scores


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_everything_trains_and_nothing_changes(architecture: str) -> None:
    model = small_models.make(architecture)
    before, kept = small_models.logits(model), {name for name, _ in model.named_parameters()}
    names = Everything().inject(model, small_models.head_of(model), 0)
    assert set(names) == kept
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(small_models.logits(model), before)
    assert counted(model, names) == sum(p.numel() for p in model.parameters())
    assert not any("position_ids" in name for name in names)
    assert any("position_ids" in name for name, _ in model.named_buffers()) == (architecture not in ("llama", "gpt2"))


def test_tied_weights_are_one() -> None:
    model = Tied()
    names = Everything().inject(model, [], 0)
    assert names == ["embed.weight", "inner.weight", "inner.bias"]
    assert counted(model, names) == 9 * 6 + 6 * 6 + 6


@pytest.mark.parametrize("architecture", [name for name in small_models.ARCHITECTURES if name != "llama"])
def test_all_biases_and_only_biases(architecture: str) -> None:
    model = small_models.make(architecture)
    before, head = small_models.logits(model), small_models.head_of(model)
    names = Biases().inject(model, head, 0)
    by_layer = {
        f"{name}.bias"
        for name, module in model.named_modules()
        if isinstance(getattr(module, "bias", None), nn.Parameter)
    }
    more = {name for name, _ in model.named_parameters() if name.endswith(("q_bias", "v_bias"))}
    assert set(names) == by_layer | more
    assert len(more) == (4 if architecture == "deberta" else 0)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {*names, *head}
    assert torch.equal(small_models.logits(model), before)


def test_a_model_without_biases_is_refused_before_it_is_touched() -> None:
    model = small_models.make("llama")
    with refused(MethodError):
        Biases().inject(model, small_models.head_of(model), 0)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_a_head_is_refused_where_the_head_alone_trains() -> None:
    model = small_models.make("bert")
    with refused(MethodError):
        HeadAlone().inject(model, [], 0)
    head = small_models.head_of(model)
    assert HeadAlone().inject(model, head, 0) == []
    assert {name for name, one in model.named_parameters() if one.requires_grad} == set(head)


@pytest.mark.parametrize("adapter", [Everything(), Biases()])
def test_numbers_that_cannot_train_are_refused(adapter: Everything | Biases) -> None:
    model = nn.Linear(3, 2)
    model.bias = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    with refused(MethodError):
        adapter.inject(model, [], 0)


def test_a_module_of_ones_own() -> None:
    model = Tied()
    assert Biases().inject(model, [], 0) == ["inner.bias"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["inner.bias"]
