"""Per-example gradients against plain autograd on every example, and which path is taken when."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from secure_fed.config import MethodConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.per_example import NoRuleError
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes import packing, passes, step_gradients
from secure_fed.learning.training.common_passes.passes import Found, Pack, Places, found_in, tried
from secure_fed.learning.training.common_passes.step_gradients import example_gradients
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trials import agree
from secure_fed.methods import build
from secure_fed.methods.method import State
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.example_gradients import Gradients, Path, losses_at, one_by_one, path_for, together

CPU = torch.device("cpu")
PAD_0 = Collate(0)
METHODS = ("fedlora", "ffa_lora", "fra_lora")
# Architectures whose query layer, which PEFT adapts, also reads the position embeddings, which the examples share.
SHARED_POSITIONS = ("deberta_v3",)


def made(architecture: str, *, dropout: float | None = None) -> nn.Module:
    """A small model of this architecture, in float32, without dropout unless it is requested."""
    torch.manual_seed(0)
    model = small_models.ARCHITECTURES[architecture]()
    return model if dropout else without_dropout(model)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attention_probs_dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def adapted(model: nn.Module, method: str = "fedlora", **settings: Any) -> tuple[str, ...]:
    """Adds the adapters to the model, converts it to float64, and returns the names of the trainable parameters."""
    chosen = build(MethodConfig(name=method, rank=2, dropout=settings.pop("lora_dropout", 0.0), **settings))
    head = (
        small_models.head_of(model) if hasattr(model, "base_model_prefix") else ["classifier.weight", "classifier.bias"]
    )
    state = State(chosen.prepare(model, head, 0))
    model.double()
    return chosen.plan(state).trainable


def placed(model: nn.Module, trainable: Sequence[str]) -> Placed:
    """The trainable tensors, all moved away from zero."""
    generator = torch.Generator().manual_seed(1)
    start = {name: model.get_parameter(name).detach().clone() for name in trainable}
    moving = {
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=generator)).requires_grad_()
        for name, tensor in start.items()
    }
    return Placed(start, moving, {})


def texts(count: int = 5, *, pairs: bool = False) -> list[dict[str, Any]]:
    """Texts of unequal lengths, so that a batch is padded."""
    rng = np.random.default_rng(3)
    items: list[dict[str, Any]] = []
    for i in range(count):
        length = 3 + (4 * i) % 9
        item = {"input_ids": rng.integers(2, small_models.VOCABULARY, length), "labels": i % small_models.LABELS}
        items.append(item | ({"token_type_ids": (np.arange(length) > length // 2).astype(int)} if pairs else {}))
    return items


def by_hand(objective: Objective, collate: Any, where: Placed, items: Sequence[Any]) -> Gradients:
    """The gradients of the model with the tensors loaded into it, from one `backward()` for each example."""
    found: dict[str, list[Tensor]] = {name: [] for name in where.moving}
    model = objective.model
    with torch.no_grad():
        for name, tensor in where.moving.items():
            model.get_parameter(name).copy_(tensor)
    for item in items:
        model.zero_grad()
        objective.loss(model, collate([item])).sum().backward()
        for name, parts in found.items():
            gradient = model.get_parameter(name).grad
            parts.append(torch.zeros_like(where.moving[name]) if gradient is None else gradient.clone())
    with torch.no_grad():
        for name, tensor in where.start.items():
            model.get_parameter(name).copy_(tensor)
    model.zero_grad()
    return {name: torch.stack(parts) for name, parts in found.items()}


def assert_equal(found: Gradients, expected: Gradients, tolerance: float = 1e-5) -> None:
    """Compares each example's gradient of each tensor, relative to the norm of its gradient over all tensors."""
    assert list(found) == list(expected)
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in expected.values()]).norm(dim=0)
    assert float(norms.min()) > 1e-3
    for name, gradient in expected.items():
        assert found[name].shape == gradient.shape
        apart = (found[name] - gradient).flatten(1).norm(dim=1) / norms
        assert float(apart.max()) < tolerance, name


def ready(model: nn.Module, **settings: Any) -> tuple[Objective, Placed]:
    """The objective of a model with adapters, and their tensors."""
    trained = adapted(model, **settings)
    return Objective(model, classification.loss, CPU), placed(model, trained)


def numbers() -> list[dict[str, Any]]:
    return [{"x": item["x"].double(), "labels": item["labels"]} for item in toys.examples(1, 5)]


def check(model: nn.Module, trainable: Sequence[str], items: Sequence[Any], collate: Any = PAD_0) -> Path:
    """Checks that the path taken and the slow path both equal autograd; returns the path taken."""
    objective, where = Objective(model, classification.loss, CPU), placed(model, trainable)
    path = path_for(objective, collate, where, items)
    expected = by_hand(objective, collate, where, items)
    assert_equal(path(objective, collate, where, items), expected)
    assert_equal(one_by_one(objective, collate, where, items), expected)
    return path


# Models and methods.


@pytest.mark.parametrize(
    ("method", "architecture"),
    chosen(
        itertools.product(METHODS, small_models.ARCHITECTURES),
        [("fra_lora", "bert"), ("fedlora", "deberta_v3"), ("fedlora", "gpt2")],
    ),
)
def test_every_model_with_every_method_takes_a_path_that_is_right(architecture: str, method: str) -> None:
    """The quick path, unless the adapters also read an input that the examples share."""
    model = made(architecture)
    path = one_by_one if architecture in SHARED_POSITIONS else together
    assert check(model, adapted(model, method), texts()) is path


# Settings of the adapter, a pattern of the parameters that train beside it, and the path that is taken. DeBERTa's queries and
# GPT-2's positions have an input without a batch dimension; Llama's norm is a class of its own.
PATHS: dict[str, tuple[str, dict[str, Any], str, Path]] = {
    "rslora": ("bert", {"rslora": True}, "", together),
    "all linear layers": ("bert", {"target_modules": "all-linear"}, "", together),
    "keys": ("bert", {"target_modules": ("key", "attention.output.dense")}, "", together),
    "a scale": ("bert", {"lora_dropout": 0.0, "alpha": 3.0}, "", together),
    "biases": ("bert", {}, r"0\.attention\.self\.query\.base_layer\.bias|output\.LayerNorm|word_embeddings", together),
    "a norm": ("llama", {}, r"model\.norm\.weight", together),
    "positions": ("gpt2", {}, r"wpe\.weight", one_by_one),
    "relative positions": ("deberta_v3", {"target_modules": ("query_proj", "value_proj")}, "", one_by_one),
    "positions of the first version": ("deberta", {"target_modules": ("in_proj", "pos_q_proj")}, "", one_by_one),
    "values alone": ("deberta_v3", {"target_modules": ("value_proj",)}, "", together),
}


@pytest.mark.parametrize("case", chosen(PATHS, ["biases", "positions"]))
def test_what_trains_decides_the_path(case: str) -> None:
    architecture, settings, beside, path = PATHS[case]
    model = made(architecture)
    trained = [*adapted(model, **settings)]
    trained += [name for name, _ in model.named_parameters() if beside and re.search(beside, name)]
    for name in trained:
        model.get_parameter(name).requires_grad_(True)
    assert check(model, trained, texts(pairs=case == "a scale")) is path


class Reused(nn.Module):
    """By kind: a layer is used twice, is not used, has its output overwritten, or has its weight used in another product."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.classifier = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "twice":
            h = self.first(h.tanh())
        if self.kind == "overwritten":
            h *= 2
        if self.kind == "borrowed":
            h = h.tanh() @ self.first.weight
        if self.kind == "second":
            h = self.second(h.tanh())
        scores: Tensor = self.classifier(h.tanh())
        return scores


@every(
    ("kind", "path"),
    [*((kind, together) for kind in ("twice", "unused", "second", "overwritten")), ("borrowed", one_by_one)],
)
def test_what_a_module_does_with_its_layers(kind: str, path: Path) -> None:
    torch.manual_seed(0)
    model = Reused(kind).double()
    assert check(model, [name for name, _ in model.named_parameters()], numbers(), default_collate) is path


def test_single_precision_is_equal_to_1e_5_too_and_half_precision_models_have_float32_gradients() -> None:
    model = made("bert")
    trained = adapted(model)
    assert check(model.float(), trained, texts()) is together
    model = small_models.make("bert").bfloat16()
    chosen = build(MethodConfig(rank=2))
    names = tuple(chosen.prepare(model, small_models.head_of(model), 0))
    before = {name: model.get_parameter(name).detach().float().requires_grad_() for name in names}
    objective, where = Objective(model, classification.loss, CPU), Placed(before, before, {})
    found = path_for(objective, Collate(0), where, texts())(objective, Collate(0), where, texts())
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}


# Side effects.


def test_the_model_is_left_as_it_was() -> None:
    model = made("bert")
    objective, where = ready(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = [set(vars(module)) for module in model.modules()]
    path_for(objective, Collate(0), where, texts())
    together(objective, Collate(0), where, texts())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert all(parameter.grad is None and not hasattr(parameter, "grad_sample") for parameter in model.parameters())
    assert model.training


def test_hooks_are_gone_after_a_failure() -> None:
    model = toys.model()
    objective, where = ready(model)
    objective.loss = lambda model, batch: classification.loss(model, batch).mean()
    with refused(ConfigError):
        together(objective, default_collate, where, numbers())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_global_generator_is_left_alone_and_dropout_comes_back() -> None:
    objective, where = ready(made("bert", dropout=0.1), lora_dropout=0.2)
    before = torch.get_rng_state()
    assert path_for(objective, Collate(0), where, texts()) is together
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (together(objective, Collate(0), where, texts()) for _ in range(2))
    assert not agree(first, second, 1e-2)


def test_examples_have_masks_of_their_own_and_gradients_that_belong_to_them() -> None:
    """One example five times under dropout: each copy has its own mask in the pass, so each gradient is of its own loss."""
    objective, where = ready(toys.model(dropout=0.5))
    items = numbers()[:1] * 5
    torch.manual_seed(3)
    found = together(objective, default_collate, where, items)
    assert found["classifier.weight"].unique(dim=0).shape[0] == 5
    torch.manual_seed(3)
    each = losses_at(objective, where.moving, default_collate(items))
    for i in range(5):
        expected = torch.autograd.grad(each[i], list(where.moving.values()), retain_graph=True)
        for gradient, name in zip(expected, where.moving, strict=True):
            torch.testing.assert_close(found[name][i], gradient)


# Trials catch passes that are wrong.


def changed(change: Callable[[Tensor], Tensor], one: bool = False) -> Callable[..., Found]:
    """`found_in`, with this change of the gradients of passes with several rows; one: of one tensor alone."""

    def found(objective: Objective, places: Places, pack: Pack) -> Found:
        right = found_in(objective, places, pack)
        if len(pack.items) == 1:
            return right
        last = list(right.gradients)[-1]
        gradients = {n: change(rows) if n == last or not one else rows for n, rows in right.gradients.items()}
        return replace(right, gradients=gradients)

    return found


@pytest.mark.parametrize(
    "broken",
    [
        changed(lambda rows: rows / len(rows)),  # as of a mean loss
        changed(lambda rows: rows.roll(1, 0), one=True),
        changed(lambda rows: 1.01 * rows, one=True),
        changed(lambda rows: rows.sum(0, keepdim=True).expand(rows.shape)),
    ],
)
def test_broken_passes_are_not_used(broken: Callable[..., Found], monkeypatch: pytest.MonkeyPatch) -> None:
    (objective, where), collate, items = ready(toys.model()), default_collate, numbers()
    expected = one_by_one(objective, collate, where, items)
    assert not tried(objective, [where], items, collate).why_not
    for module in (passes, packing, step_gradients):
        monkeypatch.setattr(module, "found_in", broken)
    assert "not those of one client at a time" in tried(objective, [where], items, collate).why_not
    assert_equal(example_gradients(objective, collate, where, items), expected)


def test_a_large_gradient_hides_no_wrong_one() -> None:
    """One example's loss weighs 10^12 times as much as the others'."""
    objective, where = ready(toys.model())
    usual, items = objective.loss, numbers()[:3]
    objective.loss = lambda model, batch: usual(model, batch) * torch.where(batch["labels"] == 1, 1e12, 1.0)
    found, expected = (path(objective, default_collate, where, items) for path in (together, one_by_one))
    assert agree(found, expected, objective.tolerance)
    row = int(torch.stack([each.flatten(1).norm(dim=1) for each in found.values()]).norm(dim=0).argmin())
    for each in found.values():
        each[row] *= -1
    assert not agree(found, expected, objective.tolerance)


def test_the_trial_moves_away_from_the_usual_start() -> None:
    """Where B is zero the gradient of A is zero on every path, right or wrong."""
    model = made("deberta_v3")
    trained = adapted(model, target_modules=("query_proj",))
    start = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in trained}
    objective = Objective(model, classification.loss, CPU)
    assert path_for(objective, Collate(0), Placed(start, start, {}), texts()) is one_by_one


def test_a_batch_that_a_layer_sees_otherwise_is_refused_whenever_it_comes() -> None:
    objective, where = ready(made("deberta_v3"), target_modules=("query_proj",))
    with pytest.raises(NoRuleError):
        together(objective, Collate(0), where, texts())
