"""Misbehaving models, metrics and batches of a user: the run reports them or is unaffected."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from secure_fed.errors import ConfigError, ModelError, TrainingError
from secure_fed.learning.training.objective import to_device
from tests.secure_fed import toys


@pytest.mark.parametrize("name", ["round", "bytes_up", "seconds"])
def test_metrics_may_not_write_over_the_record(name: str, tmp_path: Path) -> None:
    federation = toys.federation(metrics=lambda model, batches: {"accuracy": 0.5, name: 9})
    with pytest.raises(ConfigError, match=f"metrics gives '{name}'"):
        federation.run(tmp_path / "run")


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(1), torch.tensor(0.5), torch.tensor(float("nan"))])
def test_any_kind_of_number_is_a_metric(value: Any, tmp_path: Path) -> None:
    result = toys.federation(metrics=lambda model, batches: {"accuracy": value}).run(tmp_path / "run")
    accuracy = result.summary["accuracy"]
    assert accuracy is None if float(value) != float(value) else accuracy == float(value)


@pytest.mark.parametrize("value", [None, [0.5], {"accuracy": "high"}, {"accuracy": torch.zeros(2)}])
def test_what_is_no_dict_of_numbers_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="metrics must give a dict of names and numbers"):
        toys.federation(metrics=lambda model, batches: value).run()


class Counting(toys.Toy):
    """A model whose output depends on the number of calls in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + self.calls)


def test_what_a_forward_pass_does_to_buffers_reaches_no_other_training() -> None:
    federation = toys.federation(model=Counting())
    first, again = federation.run(), federation.run()
    assert first.records[-1]["loss"] == again.records[-1]["loss"]
    assert all(torch.equal(first.state.tensors.tensor(n), again.state.tensors.tensor(n)) for n in first.state.tensors)


class Remembering(toys.Toy):
    """A model that keeps the mean of its inputs in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


@pytest.mark.parametrize(("unit", "together"), [("example", None), ("client", None), ("client", 1)])
def test_a_model_that_keeps_a_mean_in_a_parameter_is_refused_under_privacy(
    unit: str, together: int | None, tmp_path: Path
) -> None:
    settings = {"privacy.unit": unit, "privacy.noise_multiplier": 1.0, "training.together": together}
    with pytest.raises(ModelError, match=r"parameter centre of the model changes as it runs"):
        toys.federation(settings, model=Remembering()).run(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_a_user_may_change_the_model_between_two_runs() -> None:
    federation = toys.federation({"privacy.unit": "example", "privacy.noise_multiplier": 1.0}, model=toys.model())
    federation.run()
    with torch.no_grad():
        next(iter(federation.assembly.objective.model.parameters())).add_(0.1)
    assert federation.run().state.round > 0


class Pair(NamedTuple):
    text: Tensor
    label: Tensor


def test_a_named_tuple_moves_as_one() -> None:
    moved = to_device(Pair(torch.zeros(2), torch.ones(2)), torch.device("cpu"))
    assert isinstance(moved, Pair)
    assert torch.equal(moved.label, torch.ones(2))


def test_a_state_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    federation = toys.federation({"federation.server_lr": 1e39})
    with pytest.raises(TrainingError, match=r"server_lr"):
        federation.run(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
