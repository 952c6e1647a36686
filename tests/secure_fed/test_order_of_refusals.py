"""The order of refusals: those that cost nothing come first, then trials of the model, and only then budget is reserved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from privacy.errors import BudgetExhausted
from privacy.ledger import Ledger
from secure_fed.errors import ModelError, RunDirectoryError
from secure_fed.federation import Federation
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.private_toys import EXAMPLE, NOISE, federation

EXAMPLES = {**EXAMPLE, "privacy.noise_multiplier": 1.0}
NO_ROOM, ROOM = 1e-6, 1e6


class Coupled:
    """A loss that depends on the other examples of the batch, with the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        own = functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
        return own - own.mean()


class Remembering(toys.Toy):
    """A model that keeps the mean of its inputs in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.centre.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class Listening:
    """Keeps the promise, and the number of losses computed before it."""

    def __init__(self, loss: Coupled) -> None:
        self.loss, self.promised, self.before = loss, list[str](), -1

    def on_promise(self, sentences: list[str]) -> None:
        self.promised, self.before = sentences, self.loss.calls


def privately(tmp_path: Path, epsilon: float, loss: Coupled) -> tuple[Federation, Ledger]:
    """A private federation, and the ledger that it shares, with room for `epsilon`."""
    path = tmp_path / "wards.sqlite"
    book = Ledger.create(path, data_set="wards", epsilon=epsilon, delta=0.9)
    return federation({**EXAMPLES, "privacy.ledger": str(path)}, loss=loss), book


def test_a_ledger_without_room_refuses_before_any_trial(tmp_path: Path) -> None:
    loss = Coupled()
    with pytest.raises(BudgetExhausted):
        privately(tmp_path, NO_ROOM, loss)[0].run(tmp_path / "run")
    assert loss.calls == 0
    assert not (tmp_path / "run").exists()


def test_a_run_that_a_trial_refuses_has_spent_nothing_and_left_nothing(tmp_path: Path) -> None:
    """The guarantee, its noise and its cost come before any trial."""
    loss = Coupled()
    (built, book), listening = privately(tmp_path, ROOM, loss), Listening(loss)
    built.callbacks.append(listening)
    with refused(ModelError):
        built.run(tmp_path / "run")
    assert (listening.before, loss.calls > 0, book.spent().epsilon) == (0, True, 0)
    assert not (tmp_path / "run").exists()
    guarantee, noise, cost = listening.promised
    assert "one example of one client" in guarantee
    assert "noise multiplier 1," in noise
    assert "'wards'" in cost


def test_a_client_s_run_that_a_trial_refuses_has_spent_nothing(tmp_path: Path) -> None:
    book = Ledger.create(tmp_path / "wards.sqlite", data_set="wards", epsilon=ROOM, delta=0.9)
    built = toys.federation({**NOISE, "privacy.ledger": str(tmp_path / "wards.sqlite")}, model=Remembering())
    with refused(ModelError):
        built.run(tmp_path / "run")
    assert book.spent().epsilon == 0
    assert not (tmp_path / "run").exists()


def test_a_run_without_privacy_promises_nothing() -> None:
    loss = Coupled()
    built, listening = toys.federation({}, loss=loss), Listening(loss)
    built.callbacks.append(listening)
    built.run()
    assert listening.promised == []


def test_a_run_that_cannot_resume_here_is_refused_before_any_trial(tmp_path: Path) -> None:
    federation(EXAMPLES).run(tmp_path / "run")
    loss = Coupled()
    other = federation({**EXAMPLES, "training.lr": 0.1}, loss=loss)
    with refused(RunDirectoryError):
        other.run(tmp_path / "run", resume=True)
    assert loss.calls == 0
