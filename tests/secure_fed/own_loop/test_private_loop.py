"""A user's own loop after `wrap`: its steps are those of DP-SGD, and each is charged before it is made."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy import mechanisms
from privacy.accounting import epsilon
from privacy.errors import BudgetExhausted, LedgerError
from privacy.ledger import Ledger
from privacy.sampling_and_turns import Poisson
from secure_fed.errors import ConfigError, ModelError
from secure_fed.own_loop.rehearsal import Parts
from secure_fed.private import Budget, wrap
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed.own_loop import loops
from tests.secure_fed.own_loop.loops import (
    BUDGET,
    REHEARSAL,
    Loss,
    Tied,
    loader,
    mean,
    network,
    summed,
    train,
    wrapped,
)


def frozen() -> nn.Module:
    model = network(nn.Linear(8, 8))
    model[2].requires_grad_(False)  # type: ignore[index]
    return model


class Scaled(nn.Module):
    """A layer with a parameter that is one number, as CLIP has it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def scaled() -> nn.Module:
    return network(Scaled())


@pytest.mark.parametrize(
    ("make", "loss", "batch_size"),  # 1: every third draw is empty; 24: draws have all examples
    chosen(
        itertools.product([network, frozen, Tied, scaled], [mean, summed], [1, 8, 24]),
        [(network, mean, 8), (network, summed, 24), (frozen, summed, 8), (Tied, mean, 1), (scaled, mean, 8)],
    ),
)
def test_its_steps_are_those_of_one_example_at_a_time(make: type[nn.Module], loss: Loss, batch_size: int) -> None:
    model = make()
    private = wrapped(copy.deepcopy(model), batch_size=batch_size)
    found = train(private, loss)
    expected = loops.oracle(model, loss, BUDGET, 0, batch_size, private.plan.noise_multiplier)
    assert len(found) == 1 + len(expected) == 7
    for one, other in zip(found[1:], expected, strict=True):
        assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(one, other, strict=True))


def test_the_noise_is_of_the_stated_deviation_and_never_the_same() -> None:
    moved = []
    for _ in range(2):
        model = nn.Linear(5, 3000)
        before = [one.detach().clone() for one in model.parameters()]
        private = wrapped(model, None, budget=Budget(4.0, 1e-2, steps=1, clip_norm=1e-3))
        train(private)
        moved.append(torch.cat([(b - a).flatten() for a, b in zip(before, model.parameters(), strict=True)]).detach())
        std = private.plan.noise_multiplier * 1.01e-3 / 8  # a hundredth of the clip norm is for what rounding couples
        assert float(moved[-1].std()) == pytest.approx(std, rel=0.05)  # 18,000 numbers: 5% is nine standard errors
        assert private.statement().private
    assert not torch.equal(*moved)


def test_the_noise_multiplier_is_what_the_budget_takes() -> None:
    plan = wrapped(network()).plan
    assert plan.releases == 6
    spent = epsilon(Poisson(24, 8 / 24).release(plan.noise_multiplier), 6, 1e-2)
    assert 0.99 * 4.0 < spent <= 4.0
    assert wrapped(network(), budget=Budget(4.0, 1e-2, epochs=2)).plan.releases == 6


def test_a_loop_that_goes_on_is_refused() -> None:
    private = wrapped(network())
    train(private)
    before = [one.detach().clone() for one in private.model.parameters()]
    with refused(BudgetExhausted):
        next(iter(private.loader))
    assert all(torch.equal(a, b) for a, b in zip(before, private.model.parameters(), strict=True))
    assert private.spent().steps == 6


def test_a_step_is_charged_before_its_noise_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    private, charged = wrapped(network()), []
    perturbed = mechanisms.perturbed

    def noted(*given: object) -> Tensor:
        charged.append(private.spent().steps)
        return perturbed(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(mechanisms, "perturbed", noted)
    train(private)
    assert charged == [step for step in range(1, 7) for _ in private.model.parameters()]


def test_a_step_that_cannot_be_charged_is_not_made() -> None:
    private = wrapped(network())
    x, y = _rehearsed(private)
    private._steps._charge = _refuse
    before = [one.detach().clone() for one in private.model.parameters()]
    mean(private.model, x, y).backward()
    with pytest.raises(BudgetExhausted):
        private.optimizer.step()
    assert all(one.grad is None for one in private.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, private.model.parameters(), strict=True))


def _rehearsed(private: loops.Private) -> tuple[Tensor, Tensor]:
    """The first batch after the rehearsal."""
    for number, (x, y) in enumerate(private.loader):
        if number == REHEARSAL:
            return x, y
        mean(private.model, x, y).backward()
        private.optimizer.step()
    raise AssertionError


def _refuse(step: int) -> None:
    raise BudgetExhausted("no room")


def test_two_loops_on_one_ledger_add_up(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, data_set="patients", epsilon=8.5, delta=3e-2)
    for spent in (4.0, 8.0):
        model = network()
        private = wrap(model, torch.optim.SGD(model.parameters(), 0.1), loader(), BUDGET, ledger=path)
        train(private)
        ledger = Ledger.open(path)
        assert ledger.spent().epsilon == pytest.approx(spent, rel=0.01)
        assert sum(row.kind == "charge" for row in ledger.rows()) == 6 * round(spent / 4)
    model = network()
    with refused(BudgetExhausted, hide=r"epsilon \d\S*"):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), loader(), BUDGET, ledger=path)
    assert not hasattr(model, "autograd_grad_sample_hooks")
    with refused(LedgerError):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), loader(examples=30), BUDGET, ledger=path)


def test_a_loop_that_fails_its_rehearsal_pays_nothing(tmp_path: Path) -> None:
    path, model = tmp_path / "ledger.sqlite", network()
    Ledger.create(path, data_set="patients", epsilon=4.5, delta=3e-2)
    private = wrap(model, torch.optim.SGD(model.parameters(), 0.1), loader(), BUDGET, ledger=path)
    with pytest.raises(ModelError):
        train(private, lambda model, x, y: mean(model, x, y) + model[0].weight.square().sum())  # type: ignore[index]
    assert Ledger.open(path).spent().epsilon == 0
    private.close()
    train(wrap(model, torch.optim.SGD(model.parameters(), 0.1), loader(), BUDGET, ledger=path))
    assert Ledger.open(path).spent().epsilon == pytest.approx(4.0, rel=0.01)


def test_it_says_what_it_guarantees() -> None:
    private = wrapped(network())
    train(private)
    assert private.statement().text.startswith("NOT PRIVATE: noise or sampling coins were seeded")
    said = wrapped(network(), None).statement()
    assert "Against whoever sees which examples each step draws" in said.text
    assert (said.unit, said.delta) == ("one example", 1e-2)
    assert said.epsilon <= 4.0 < said.epsilon_participants
    assert "losses" in said.text
    assert "Neighbouring data sets: one example added or removed." in said.text
    spent = private.spent()
    assert (spent.steps, spent.planned, spent.epsilon) == (6, 6, said.epsilon)


@every(
    ("given", "about"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"epochs": 1}, "epochs"),
        ({"epsilon": "8"}, "epsilon"),
        ({"delta": None}, "delta"),
        ({"steps": 0}, "steps"),
        ({"delta": 0.05}, "delta"),
    ],
)
def test_a_budget_that_is_none_is_refused(given: dict[str, Any], about: str) -> None:
    with refused(ConfigError, about):
        wrapped(network(), budget=Budget(**({"epsilon": 4.0, "delta": 1e-2, "steps": 6} | given)))


def test_a_name_in_a_ledger_needs_one() -> None:
    model = network()
    with refused(ConfigError, "data_set"):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), loader(), BUDGET, ledger=None, data_set="notes")


def test_afterwards_the_model_is_as_it_was() -> None:
    model = network()
    private = wrapped(model)
    train(private)
    private.close()
    copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [one.detach().clone() for one in model.parameters()]
    mean(model, *next(iter(loader()))).backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_example_without_a_finite_gradient_counts_as_zero() -> None:
    broken = loops.data()
    broken.tensors[0][22] = float("nan")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    whole = torch.utils.data.DataLoader(broken, batch_size=loops.EXAMPLES)  # every example is in every batch
    private = wrap(model, optimizer, whole, BUDGET)
    assert 22 not in Parts(broken, 24.0).tried(0)  # type: ignore[arg-type]
    train(private)
    assert private.spent().steps == 6
    assert all(bool(one.isfinite().all()) for one in model.parameters())
