"""Gradient checkpointing is refused: `Objective.losses` puts trained tensors in place for the forward pass alone."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from secure_fed.errors import ModelError
from secure_fed.federation import Federation
from secure_fed.private import Budget, wrap
from tests.secure_fed import small_models, toys

UNITS: dict[str, dict[str, Any]] = {
    "none": {},
    "client": {"privacy.unit": "client", "privacy.epsilon": 50.0, "privacy.delta": 0.1},
    "example": {"privacy.unit": "example", "privacy.epsilon": 50.0, "privacy.delta": 0.01},
}
TEXTS = [{"input_ids": list(range(1, 5 + row % 3)), "labels": row % 3} for row in range(8)]


def federation(model: Any, unit: str, **more: Any) -> Federation:
    settings = UNITS[unit] | {"method.modules_to_save": []}
    return Federation(toys.config(settings), model=model, train=[TEXTS, TEXTS[:4]], test=TEXTS, **more)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("architecture", "unit", "reentrant"),
    [("bert", "none", False), ("llama", "none", True), ("bert", "client", True), ("bert", "example", False)],
)
def test_a_model_with_checkpointing_on_is_refused(
    architecture: str, unit: str, reentrant: bool, tmp_path: Path
) -> None:
    model: Any = small_models.make(architecture)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with pytest.raises(ModelError, match="checkpointing"):
        federation(model, unit).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_an_own_loop_over_a_model_with_checkpointing_on_is_refused() -> None:
    model: Any = small_models.make("bert")
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match="checkpointing"):
        wrap(model, optimizer, DataLoader(TEXTS, 4), Budget(8.0, 1e-3, steps=1))  # type: ignore[arg-type]


class Recomputed(toys.Toy):
    """Calls torch's checkpoint itself, which no flag shows."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.again = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = self.again(lambda y: self.value(self.query(y).tanh()).tanh(), x)
        scores: Tensor = self.classifier(hidden)
        return scores


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"training.together": 8}, UNITS["client"]], ids=["alone", "together", "client"]
)
def test_checkpointing_in_the_code_of_a_model_is_refused(settings: dict[str, Any], reentrant: bool) -> None:
    with pytest.raises(ModelError, match="checkpoint"):
        toys.federation(settings, model=Recomputed(reentrant)).run()
    toys.federation(settings, model=toys.Toy()).run()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_part_may_run_without_gradients(frozen: bool) -> None:
    class Features(toys.Toy):
        def __init__(self) -> None:
            super().__init__()
            self.features = torch.nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.features(x)
            return super().forward(x)

    model = Features()
    if frozen:
        toys.federation(model=model).run()
    else:
        with pytest.raises(ModelError, match="checkpoint"):
            toys.federation({"method.name": "fedft", "method.rank": 8, "method.modules_to_save": []}, model=model).run()


class Stopped(toys.Toy):
    """Learns to agree with its own scores, through which no gradient flows."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
        return super().forward(x) + 0.1 * target


def test_a_layer_may_also_be_computed_without_a_gradient() -> None:
    toys.federation(model=Stopped()).run()


class Failing(toys.Toy):
    """Cannot train."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("this model cannot train")
        return super().forward(x)


@pytest.mark.parametrize("model", [toys.Toy(), Failing(), Recomputed(reentrant=False)])
def test_nothing_that_watches_stays_on_a_model_after_its_run(model: torch.nn.Module) -> None:
    with suppress(ModelError, RuntimeError):
        toys.federation(model=model).run()
    assert not any(module._forward_pre_hooks for module in model.modules())
