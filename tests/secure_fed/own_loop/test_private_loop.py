"""A user's own loop after `wrap`: its steps are those of DP-SGD, and each is charged before it is made.

Its data: which loaders may be wrapped, and which examples a rehearsal tries.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

from privacy import mechanisms
from privacy.accounting import epsilon
from privacy.errors import BudgetExhausted, LedgerError
from privacy.ledger import Ledger
from privacy.participation import Poisson
from secure_fed.errors import ConfigError, DataError, ModelError
from secure_fed.own_loop.batches import require_samplable
from secure_fed.own_loop.rehearsal import Part, Parts
from secure_fed.private import Budget, wrap
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed.own_loop import loops
from tests.secure_fed.own_loop.loops import (
    BUDGET,
    EXAMPLES,
    REHEARSAL,
    Loss,
    Tied,
    data,
    loader,
    mean,
    network,
    same,
    state,
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
        [(network, mean, 8), (frozen, summed, 24), (Tied, mean, 1), (scaled, mean, 8)],
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
        before = state(model)
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


def test_a_loop_that_goes_on_is_refused_and_once_closed_its_model_is_as_it_was() -> None:
    private = wrapped(model := network())
    train(private)
    before = state(model)
    with refused(BudgetExhausted):
        next(iter(private.loader))
    assert same(before, model)
    assert private.spent().steps == 6
    private.close()
    copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mean(model, *next(iter(loader()))).backward()
    optimizer.step()
    assert not same(before, model)


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
    before = state(private.model)
    mean(private.model, x, y).backward()
    with pytest.raises(BudgetExhausted):
        private.optimizer.step()
    assert all(one.grad is None for one in private.model.parameters())
    assert same(before, private.model)


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
    for name in ("data_set", "unit_name"):
        with refused(ConfigError, name):
            wrap(model, torch.optim.SGD(model.parameters(), 0.1), loader(), BUDGET, **{name: "notes"})


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


# Its data.


def parts(examples: Any, expected: float, epoch: int = 0) -> list[Part]:
    return Parts(examples, expected).of_epoch(epoch)


def test_the_large_batch_has_the_tried_examples_in_all_its_parts() -> None:
    found = parts(data(1000), 100.0)
    many, tried = found[-1].indices, found[8].indices
    assert [part.kind for part in found] == [*["alone"] * 8, "together", *["many"] * 3]
    assert [part.number for part in found if not part.last] == list(range(11))
    assert [part.indices[0] for part in found[:8]] == tried
    assert len(many) == len(set(many)) == 100 + 6 * 10
    assert [many.index(index) for index in tried] == [row * 159 // 7 for row in range(8)]
    assert max(many) > 900
    halves = [part.indices for part in found[9:11]]
    assert [len(half) for half in halves] == [80, 80]
    assert {*halves[0], *halves[1]} == {*many}


def test_each_epoch_tries_other_examples() -> None:
    """Within five epochs all classes are tried, and most rows are in a large batch."""
    rows = [{"x": index, "label": index % 20} for index in range(1000)]
    epochs = [parts(rows, 100.0, epoch) for epoch in range(5)]
    tried = [found[8].indices for found in epochs]
    assert len({index for some in tried for index in some}) > 30
    assert {index % 20 for some in tried for index in some} == set(range(20))
    assert len({index for found in epochs for index in found[-1].indices}) > 500
    assert {len(found) for found in epochs} == {len(Parts(rows, 100.0))}  # schedules count them


@every(("examples", "expected", "size"), [(1000, 4.0, 16), (12, 12.0, 12), (24, 1.0, 0), (8, 8.0, 0)])
def test_it_is_as_large_as_the_largest_likely_draw(examples: int, expected: float, size: int) -> None:
    found = parts(data(examples), expected)
    assert len(found) == len(Parts(data(examples), expected))  # type: ignore[arg-type]
    assert size in (0, min(examples, math.ceil(expected + 6 * math.sqrt(expected))))
    assert [len(part.indices) for part in found if part.kind == "many"] == (
        [size // 2, -(-size // 2), size] if size else []
    )
    assert found[-1].last
    assert sum(part.last for part in found) == 1


def tried(examples: Any) -> list[int]:
    return Parts(examples, 1.0).tried()


def test_a_rehearsal_has_the_rarest_class_and_different_lengths() -> None:
    labels = torch.zeros(500, dtype=torch.long)
    labels[375] = 1  # the only one of its class
    assert {0, 375} < set(tried(TensorDataset(torch.ones(500, 5), labels)))  # type: ignore[arg-type]
    classes = [{"x": 0, "label": i // 100} for i in range(2000)]
    assert len(tried(classes)) == 8
    words = torch.full((100, 4), -100)
    words[:, 0], words[57], words[23, 0] = 1, 1, -100
    assert tried([(0, [{"box": 1}] * n) for n in range(4)]) == [0, 1, 2, 3]  # labels that are not numbers
    found = tried(TensorDataset(torch.ones(100, 4), words))  # type: ignore[arg-type]
    assert {23, 50, 57} < set(found)
    assert {5, 70} < set(tried([{"input_ids": [1] * (2 - (n == 5) + (n == 70))} for n in range(100)]))


@every(
    "made",
    [
        lambda x, y: {"x": x, "target": y},
        lambda x, y: (y, x),
        lambda x, y: (x, float(y)),
        lambda x, y: (x, torch.tensor([y])),
        lambda x, y: (x, torch.eye(2)[y]),
        lambda x, y: (x, "yes" if y else "no"),
        lambda x, y: (x, bool(y), 7),
        lambda x, y: (x, [y]),
    ],
)
def test_a_rehearsal_has_the_rarest_class_wherever_it_stands(made: Callable[[Tensor, int], Any]) -> None:
    rows = [made(torch.ones(5), int(index == 431)) for index in range(500)]
    assert 431 in tried(rows)


def test_the_classes_of_labels_come_before_those_of_other_columns() -> None:
    others = [{f"site {n}": (index + n) % 2 for n in range(10)} | {"labels": int(index == 431)} for index in range(500)]
    assert 431 in tried(others)


def test_weights_of_classes_are_found_by_a_single_example_of_a_rare_class() -> None:
    """One example of that class in a batch would divide the gradients of all other examples by about its weight."""
    labels = torch.zeros(100, dtype=torch.long)
    labels[57] = 1
    rows = DataLoader(TensorDataset(torch.randn(100, 5, generator=torch.Generator().manual_seed(0)), labels), 10)
    model = network()
    private = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), rows, replace(BUDGET, delta=1e-3))
    with refused(ModelError):
        train(private, lambda model, x, y: cross_entropy(model(x), y, weight=torch.tensor([1.0, 99.0, 1.0])))
    assert private.spent().steps == 0


def test_batches_may_be_fetched_by_workers() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = wrap(model, optimizer, DataLoader(data(), batch_size=8, num_workers=1), BUDGET)
    train(private)
    assert private.spent().steps == 6


D = data()


RARE = [2, 5]


@every(
    "made",
    [
        Subset(D, [*range(24), *RARE * 8]),
        Subset(D, torch.tensor([0, 1, 1])),  # type: ignore[arg-type]
        Subset(D, list(torch.tensor([0, 1, 1]))),  # type: ignore[arg-type]
        Subset(D, [23, -1]),
        ConcatDataset([D] + [Subset(D, RARE)] * 8),
        ConcatDataset([D, D]),
        ConcatDataset([Subset(D, [0, 1]), Subset(D, [1])]),
        ConcatDataset([data(3), ConcatDataset([D, data(3), Subset(Subset(D, [4, 5]), [1])])]),
        Subset(ConcatDataset([data(3), D]), [3, 4, -24]),
        Subset(Subset(D, [7, 7]), [0, 1]),
    ],
)
def test_an_example_that_is_there_twice_is_refused(made: Any) -> None:
    model = network()
    with refused(DataError):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(made, batch_size=4), BUDGET)


@every(
    "made",
    [
        D,
        Subset(D, [3, 1, -1]),
        Subset(Subset(D, [7, 7, 8]), [0, 2]),  # the repeated one is left out
        ConcatDataset([D, data()]),
        ConcatDataset([Subset(D, [0, 1]), Subset(D, [2]), data(3)]),
        ConcatDataset(random_split(D, [0.5, 0.5])),
        Subset([{"x": 0}] * 5, [0, 1]),  # type: ignore[arg-type]
    ],
)
def test_a_part_of_a_data_set_or_several_are_not(made: Any) -> None:
    require_samplable(DataLoader(made, batch_size=4))


@pytest.mark.parametrize(
    "sampler",
    [
        torch.utils.data.SequentialSampler(range(5)),
        torch.utils.data.RandomSampler(range(5)),
        torch.utils.data.RandomSampler(range(EXAMPLES), num_samples=5),
        torch.utils.data.RandomSampler(range(EXAMPLES), replacement=True),
        torch.utils.data.WeightedRandomSampler([1.0] * EXAMPLES, 5),
    ],
    ids=["sequential", "random", "fewer", "with replacement", "weighted"],
)
def test_a_sampler_of_some_examples_is_refused_since_the_loop_would_read_all(sampler: Any) -> None:
    model, some = network(), DataLoader(data(), batch_size=4, sampler=sampler)
    with refused(DataError):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), some, BUDGET)
