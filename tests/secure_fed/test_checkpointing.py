"""Gradient checkpointing changes memory and time, and nothing else: every method, unit, kind of model and of checkpointing."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from privacy.entropy import SeededEntropy
from secure_fed.errors import ConfigError, ModelError
from secure_fed.federation import Federation
from secure_fed.learning.models import dropout_and_checkpointing
from secure_fed.methods import METHODS
from secure_fed.private import Budget, wrap
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.contracts.runs import PRIVACY, settings, supported
from tests.golden import refused
from tests.secure_fed import small_models, toys

CPU = torch.device("cpu")
TEXTS = [
    {"input_ids": [1 + (row * 7 + word) % 29 for word in range(4 + row % 4)], "labels": row % 3} for row in range(12)
]
CELLS = [
    (method, unit, architecture)
    for method in METHODS
    for unit in PRIVACY
    for architecture in ("bert", "llama")
    if supported(method, unit) and (method, architecture) != ("bitfit", "llama")  # which has no biases
]
EACH = [("federa", "example", "llama"), ("fedft", "none", "llama")]


def after(method: str, unit: str, model: Any, **more: Any) -> Tensors:
    """The final tensors of a run of three clients over two rounds."""
    config = settings(
        method, unit, **({"federation.cohort": 3, "training.batch_size": 4, "training.together": 8} | more)
    )
    train = [TEXTS[client::3] for client in range(3)]
    federation = Federation(config, model=model, train=train, test=TEXTS, entropy=SeededEntropy(1))
    return federation.run().state.tensors


def require_close(found: Tensors, expected: Tensors) -> None:
    for name in expected:
        torch.testing.assert_close(found.tensor(name), expected.tensor(name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("method", "unit", "architecture"), chosen(CELLS, EACH))
def test_training_with_checkpointing_is_training_without_it(
    method: str, unit: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, whose masks are drawn again."""
    expected = after(method, unit, small_models.make(architecture))
    calls, again, model = list[object](), dropout_and_checkpointing.again, small_models.make(architecture)
    noted: Any = lambda *args, **own: (calls.append(args), again(*args, **own))[1]  # noqa: E731
    monkeypatch.setattr(dropout_and_checkpointing, "again", noted)
    require_close(after(method, unit, model, **{"training.checkpointing": True}), expected)
    assert calls, "layers were computed again"


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("architecture", "unit", "reentrant"),
    chosen(
        itertools.product(["bert", "llama"], PRIVACY, [False, True]),
        [("llama", "none", False), ("bert", "example", True)],
    ),
)
def test_a_model_that_is_given_with_either_kind_on(architecture: str, unit: str, reentrant: bool) -> None:
    expected = after("federa", unit, small_models.make(architecture))
    model: Any = small_models.make(architecture)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    require_close(after("federa", unit, model), expected)
    assert dropout_and_checkpointing.is_checkpointing(model)
    if unit == "none":
        model = small_models.make(architecture)
        dropout_and_checkpointing.set_checkpointing(model, True)
        after("federa", unit, model, **{"training.checkpointing": False})
        assert not dropout_and_checkpointing.is_checkpointing(model)


def test_a_model_without_such_layers_is_refused() -> None:
    with refused(ConfigError, "training.checkpointing"):
        toys.federation({"training.checkpointing": True}).run()
    toys.federation({"training.checkpointing": False}).run()


def test_it_is_turned_on_where_activations_fill_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_models.make("llama")
    of_a_token = dropout_and_checkpointing.activations(model)
    monkeypatch.setattr(dropout_and_checkpointing, "memory", lambda device: 200 * of_a_token)
    wanted = [dropout_and_checkpointing.wanted("auto", model, tokens, CPU) for tokens in (None, 100, 101)]
    assert wanted == [False, False, True]
    assert not dropout_and_checkpointing.wanted("auto", toys.model(), 10**9, CPU)
    assert not dropout_and_checkpointing.wanted(False, model, 10**9, CPU)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_an_own_loop_over_a_model_with_checkpointing_on_is_refused() -> None:
    model: Any = small_models.make("bert")
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(ModelError):
        wrap(model, optimizer, DataLoader(TEXTS, 4), Budget(8.0, 1e-3, steps=1))  # type: ignore[arg-type]


class Recomputed(toys.Toy):
    """Calls torch's checkpoint itself, which no flag shows. dropout: within, before what is computed again."""

    def __init__(self, reentrant: bool, dropout: float = 0.0, inputs: bool = False) -> None:
        super().__init__()
        self.again = partial(checkpoint, use_reentrant=reentrant)
        self.drop, self.inputs = torch.nn.Dropout(dropout), inputs

    def forward(self, x: Tensor) -> Tensor:
        if self.inputs and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        hidden: Any = self.again(lambda y: self.value(self.drop(self.query(y).tanh())).tanh(), x)
        scores: Tensor = self.classifier(hidden)
        return scores


class Plain(Recomputed):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(False, dropout)
        self.again = lambda layers, x: layers(x)  # type: ignore[assignment]


UNITS: dict[str, dict[str, Any]] = {
    "alone": {},
    "together": {"training.together": 8},
    "client": {"privacy.unit": "client", "privacy.epsilon": 50.0, "privacy.delta": 0.1},
    "example": {"privacy.unit": "example", "privacy.epsilon": 50.0, "privacy.delta": 0.01},
}


def own(model: torch.nn.Module, unit: str) -> Tensors:
    model.load_state_dict(toys.model().state_dict(), strict=False)
    return toys.federation(UNITS[unit], model=model, entropy=SeededEntropy(3)).run().state.tensors


@pytest.mark.parametrize(
    ("unit", "reentrant", "dropout"),
    chosen(
        itertools.product(UNITS, [False, True], [0.0, 0.5]),
        [(unit, True, 0.0) for unit in UNITS] + [("alone", False, 0.5), ("together", False, 0.5)],
    ),
)
def test_checkpointing_in_the_code_of_a_model(unit: str, reentrant: bool, dropout: float) -> None:
    """With a gradient at its inputs, which the reentrant kind needs. Where dropout would be drawn anew, clients take turns."""
    expected, found = own(Plain(dropout), unit), own(Recomputed(reentrant, dropout, inputs=True), unit)
    if not dropout or unit == "alone":
        require_close(found, expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@every("unit", UNITS)
def test_a_layer_that_is_never_computed_with_a_gradient_is_refused(unit: str) -> None:
    with refused(ModelError):
        own(Recomputed(reentrant=True), unit)


class Features(toys.Toy):
    """Computes frozen features without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.features(x)
        return super().forward(x)


class Stopped(toys.Toy):
    """Learns to agree with its own scores, through which no gradient flows."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
        return super().forward(x) + 0.1 * target


def test_a_frozen_part_may_run_without_gradients_and_a_layer_a_second_time() -> None:
    toys.federation(model=Stopped()).run()
    toys.federation(model=Features()).run()
    whole = {"method.name": "fedft", "method.rank": 8, "method.modules_to_save": []}
    with refused(ModelError):
        toys.federation(whole, model=Features()).run()


class Failing(toys.Toy):
    """Cannot train."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("this model cannot train")
        return super().forward(x)


@every("model", [toys.Toy(), Failing(), Recomputed(reentrant=True)])
def test_nothing_that_watches_stays_on_a_model_after_its_run(model: torch.nn.Module) -> None:
    with suppress(ModelError, RuntimeError):
        toys.federation(model=model).run()
    assert not any(module._forward_pre_hooks for module in model.modules())
