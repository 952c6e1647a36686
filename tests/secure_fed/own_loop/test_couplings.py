"""Losses that couple the examples of a batch: refused, or no example moves a step's sum by more than the accounted sensitivity.

The models are linear, so that a gradient is (dL/ds_i) (x_i, 1) for a score s_i = w x_i + b, and the brute force needs none of
the product's code: it removes every example of a batch in turn and adds up the others' clipped gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from privacy.ledger import Ledger
from secure_fed.errors import ModelError
from secure_fed.own_loop.account import Allowance, Terms
from secure_fed.own_loop.rehearsal import Parts, Rows
from secure_fed.private import Budget, wrap
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed.own_loop import loops

Coupling = Callable[[Tensor, Tensor, Tensor], Tensor]  # of scores, targets and group membership: added to the loss


def fairness(s: Tensor, y: Tensor, group: Tensor) -> Tensor:
    """(mean score of one group - mean score of the other)^2."""
    return (s[group].sum() / group.sum().clamp(min=1) - s[~group].sum() / (~group).sum().clamp(min=1)).square()


def spread(s: Tensor, y: Tensor, group: Tensor) -> Tensor:
    """The variance of a group's scores."""
    return (s[group] - s[group].sum() / group.sum().clamp(min=1)).square().sum() / len(s)


def alike(s: Tensor, y: Tensor, group: Tensor) -> Tensor:
    """Products of the errors of neighbours in the batch, where one is of the group."""
    errors = (s - y) * group
    return (errors * errors.roll(1)).mean()


def hardest(s: Tensor, y: Tensor, group: Tensor) -> Tensor:
    return ((s - y).square() * group).max()


def ranked(s: Tensor, y: Tensor, group: Tensor) -> Tensor:
    """The share of each score in the sum of all, as in contrastive losses."""
    return -(s * group).log_softmax(0).mean()


COUPLINGS = (fairness, spread, alike, hardest, ranked)


def gradients(
    model: nn.Linear, loss: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, y: Tensor, g: Tensor
) -> Tensor:
    """(B, P) float64 of a loss that is a mean over B examples, times B."""
    s = model(x)[:, 0].detach().requires_grad_()
    (by_score,) = torch.autograd.grad(loss(s, y, g), s)
    return len(x) * by_score[:, None].double() * torch.cat([x, torch.ones_like(x[:, :1])], 1).double()


def clipped_sum(each: Tensor, clip_norm: float) -> Tensor:
    return (each * (clip_norm / each.norm(dim=1, keepdim=True)).clamp(max=1).nan_to_num(1.0)).sum(0)


def moved(model: nn.Linear, loss: Callable[..., Tensor], x: Tensor, y: Tensor, g: Tensor, clip_norm: float) -> float:
    """The farthest that removing one of these examples moves the clipped sum, in clip norms."""
    whole, most = clipped_sum(gradients(model, loss, x, y, g), clip_norm), 0.0
    for index in range(len(x)):
        kept = torch.arange(len(x)) != index
        others = clipped_sum(gradients(model, loss, x[kept], y[kept], g[kept]), clip_norm)
        most = max(most, float((whole - others).norm()) / clip_norm)
    return most


def accepted(model: nn.Linear, loss: Callable[..., Tensor], data: TensorDataset, batch: int, clip_norm: float) -> bool:
    """Whether a wrapped loop goes through its first rehearsal."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = wrap(model, optimizer, DataLoader(data, batch), Budget(8.0, 1e-3, steps=1, clip_norm=clip_norm))
    try:
        for x, y, g in private.loader:
            loss(model(x)[:, 0], y, g).backward()
            optimizer.step()
    except ModelError:
        return False
    finally:
        private.close()
    return True


def penalised(weight: float, coupling: Coupling = fairness) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda s, y, g: (s - y).square().mean() + weight * coupling(s, y, g)


def outlying(factor: float) -> TensorDataset:
    """A regression with two groups; 4 % of the targets are outliers, whose gradients are most of a stack's norm."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, generator=generator)
    g = torch.rand(400, generator=generator) < 0.5
    x[g] += 1
    y = x @ torch.ones(5) + 0.1 * torch.randn(400, generator=generator)
    y[::25] *= factor
    return TensorDataset(x, y, g)


@pytest.mark.parametrize(
    ("factor", "weight", "start"),
    chosen(
        [(30, 0.01, 1.0), (300, 0.1, 0.5), (3000, 0.3, 0.5), (10_000, 1.0, 0.5)], [(30, 0.01, 1.0), (10_000, 1.0, 0.5)]
    ),
)
def test_a_large_gradient_hides_no_coupling(factor: float, weight: float, start: float) -> None:
    data, model, loss = outlying(factor), nn.Linear(5, 1), penalised(weight)
    nn.init.constant_(model.weight, start)
    nn.init.zeros_(model.bias)
    assert moved(model, loss, *data[:120], 1.0) > 1.02
    assert not accepted(model, loss, data, 100, 1.0)
    assert accepted(model, penalised(0.0), data, 100, 1.0)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    coupling=st.sampled_from(COUPLINGS),
    weight=st.floats(-9, 2),
    factor=st.floats(-2, 5),
    share=st.sampled_from([0.02, 0.1, 0.5]),
    norm=st.floats(-3, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    shape=st.sampled_from([(12, 4), (40, 6), (40, 40), (90, 20)]),
)
def test_a_coupling_is_refused_or_accounted_for(
    seed: int,
    coupling: Coupling,
    weight: float,
    factor: float,
    share: float,
    norm: float,
    dtype: torch.dtype,
    shape: tuple[int, int],
) -> None:
    """Couplings of a random group that has a tried example; weight, factor of outliers and clip norm are powers of ten."""
    (examples, batch), rng = shape, np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(examples, 3))).to(dtype)
    y = torch.from_numpy(rng.normal(size=examples)).to(dtype)
    y[torch.from_numpy(rng.random(examples) < share)] *= 10**factor
    g = torch.from_numpy(rng.random(examples) < 0.5)
    data = TensorDataset(x, y, g)
    g[rng.choice(Parts(data, batch).tried(0))] = True  # type: ignore[arg-type]
    torch.manual_seed(seed)
    model, loss, clip_norm = nn.Linear(3, 1, dtype=dtype), penalised(10**weight, coupling), 10**norm
    if not accepted(model, loss, data, batch, clip_norm):
        return
    terms = Terms.of(Budget(8.0, 1e-3, steps=1), examples, batch)
    limit = Allowance.of(terms, 8.0, 1.0, torch.finfo(dtype).eps).sensitivity
    for size in {batch, (batch + min(examples, 2 * batch)) // 2, min(examples, 2 * batch)}:
        drawn = torch.from_numpy(rng.choice(examples, size, replace=False))
        assert moved(model, loss, x[drawn], y[drawn], g[drawn], clip_norm) <= limit


def test_a_coupling_that_has_no_gradient_at_a_zero_start_is_noticed() -> None:
    """At zero all scores are equal. One step later removing one record moves the sum by 3.3 C under the term for fairness."""
    data, model = outlying(1.0), nn.Linear(5, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    for coupling in COUPLINGS:
        assert not accepted(model, penalised(10.0, coupling), data, 100, 1.0), coupling
        assert not model.weight.any()
        assert not model.bias.any()
    assert accepted(model, penalised(0.0), data, 100, 1.0)


@every("batches", [1, 5, 12])
def test_a_loop_that_leaves_a_rehearsal_has_its_zero_parameters(batches: int) -> None:
    model, data = regression()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = wrap(model, optimizer, DataLoader(data, 20), Budget(8.0, 1e-3, epochs=1))
    for number, (x, y) in enumerate(private.loader, 1):
        if number == batches:  # and no step
            break
        plain(model, x, y).backward()
        optimizer.step()
        assert not model.weight.any()
    assert not model.weight.any()


def mixed(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    """Mix-up: every example is averaged with its neighbour in the batch."""
    return ((model((x + x.roll(1, 0)) / 2)[:, 0] - (y + y.roll(1)) / 2).square()).mean()


def plain(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return (model(x)[:, 0] - y).square().mean()


def regression(examples: int = 60) -> tuple[nn.Linear, TensorDataset]:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    return nn.Linear(3, 1), TensorDataset(*(torch.randn(examples, *shape, generator=generator) for shape in ((3,), ())))


def test_a_coupling_that_begins_in_a_later_epoch_is_refused_there_and_the_steps_before_stay_charged(
    tmp_path: Path,
) -> None:
    model, data = regression()
    Ledger.create(tmp_path / "ledger", data_set="rows", epsilon=9.0, delta=1e-2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = wrap(model, optimizer, DataLoader(data, 20), Budget(8.0, 1e-3, epochs=3), ledger=tmp_path / "ledger")

    def epoch(loss: Callable[..., Tensor]) -> None:
        for x, y in private.loader:
            loss(model, x, y).backward()
            optimizer.step()

    epoch(plain)
    before = model.weight.detach().clone()
    with refused(ModelError, worded=False):
        epoch(mixed)
    assert torch.equal(model.weight, before)
    assert private.spent().steps == len(private.loader) == 3
    assert sum(row.kind == "charge" for row in Ledger.open(tmp_path / "ledger").rows()) == 3


@every("coupled", [8, 9, 10, 11])
def test_mix_up_in_any_one_of_four_batches_is_noticed(coupled: int) -> None:
    """So mix-up of every tenth batch, by a coin, passes a rehearsal with probability .9^4 = .66."""
    model, data = regression()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = wrap(model, optimizer, DataLoader(data, 20), Budget(8.0, 1e-3, epochs=1))

    def loop() -> None:
        for number, (x, y) in enumerate(private.loader):
            (mixed if number == coupled else plain)(model, x, y).backward()
            optimizer.step()

    with refused(ModelError, worded=False):
        loop()
    assert private.spent().steps == 0


def test_a_loop_of_several_epochs_has_the_batches_that_a_schedule_counts() -> None:
    model, data = regression()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = wrap(model, optimizer, DataLoader(data, 20), Budget(8.0, 1e-3, steps=7))
    seen = 0
    while private.spent().steps < 7:
        for x, y in private.loader:
            plain(model, x, y).backward()
            optimizer.step()
            seen += 1
    assert seen == private.loader.all_batches == 7 + 3 * private.loader.rehearsal_batches


def test_a_coupling_of_examples_that_are_not_tried_is_noticed_in_the_large_batch() -> None:
    """Of a tenth of the examples, every second one that is in the batch counts. The column that marks them is no class."""
    model, data = regression(400)
    tried = Parts(data, 100.0).tried(0)  # type: ignore[arg-type]
    marks = torch.where(torch.rand(400, generator=torch.Generator().manual_seed(2)) < 0.1, 0.75, 0.25)
    marks[tried] = 0.25

    def loss(s: Tensor, y: Tensor, marks: Tensor) -> Tensor:
        marked = marks > 0.5
        return ((s - y).square() * torch.where(marked, marked.cumsum(0) % 2, 1.0)).mean()

    rows = TensorDataset(*data.tensors, marks)
    assert Parts(rows, 100.0).tried(0) == tried  # type: ignore[arg-type]
    assert moved(model, loss, *(one[:100] for one in rows.tensors), 1.0) > 1.5
    assert not accepted(model, loss, rows, 100, 1.0)


@every(
    ("examples", "batch", "most", "slack"),
    [(2000, 100, 201, 0.01), (50_000, 1000, 1290, 0.0197), (200_000, 4096, 4670, 0.0712), (400, 400, 400, 0.01)],
)
def test_the_slack_follows_from_settings(examples: int, batch: int, most: int, slack: float) -> None:
    terms = Terms.of(Budget(8.0, 1 / (50 * examples), steps=60), examples, batch)
    found = Allowance.of(terms, 8.0, 2.0)
    assert found.most == pytest.approx(most, rel=0.01)
    assert found.slack == pytest.approx(slack, rel=0.01)
    assert found.sensitivity == 2.0 * (1 + found.slack)
    tail = binom.sf(found.most, examples, batch / examples)
    assert 60 * (1 + math.exp(8.0)) * tail <= 1e-6 * terms.delta


@every("scale", [1e-3, 1.0, 1e3])
def test_sketches_of_long_gradients_have_their_distances(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    first = {"a": torch.randn(4, 90, 70, generator=generator), "b": torch.randn(4, 3000, generator=generator)}
    apart = {name: scale * torch.randn(each.shape, generator=generator) for name, each in first.items()}
    apart["a"][3], apart["b"][3] = 0.0, 0.0
    apart["b"][3, 7] = scale  # one number differs
    one, other = Rows.of(first), Rows.of({name: each + apart[name] for name, each in first.items()})
    true = sum(each.flatten(1).double().square().sum(1) for each in apart.values())
    found = (one.sketches - other.sketches).square().sum(1)
    assert torch.allclose(found, true, rtol=0.1)  # type: ignore[arg-type]
    assert torch.allclose(one.norms**2, sum(each.flatten(1).double().square().sum(1) for each in first.values()))  # type: ignore[arg-type]


# Losses and layers that couple examples in large batches alone: the rehearsal has a batch as large as a step's may be.


class Standardised(nn.Module):
    """A layer that standardises by the batch from 16 examples on."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) / 2 if len(x) >= 16 else x


class Capacity(nn.Module):
    """A layer that processes the last sixteen examples of a batch alone, and passes on the others as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return torch.cat([x[:-16], found[-16:]])


def hardest_of_many(reduce: Callable[[Tensor], Tensor]) -> loops.Loss:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        each = cross_entropy(model(x), y, reduction="none")
        return reduce(each.topk(min(16, len(each))).values)

    return loss


CASES: list[tuple[list[nn.Module], loops.Loss]] = [
    ([], hardest_of_many(torch.mean)),
    ([], hardest_of_many(torch.sum)),
    ([Standardised()], loops.mean),
    ([Capacity()], loops.mean),
]


@pytest.mark.parametrize(("layers", "loss"), CASES, ids=["hardest, mean", "hardest, sum", "standardised", "capacity"])
def test_what_couples_examples_of_large_batches_alone_is_refused(layers: list[nn.Module], loss: loops.Loss) -> None:
    private = loops.wrapped(
        loops.network(*layers)
    )  # 8 of 24 examples are expected in a batch, and more than 16 are possible
    before = loops.state(private.model)
    with refused(ModelError):
        loops.train(private, loss)
    assert loops.same(before, private.model)
    assert private.spent().steps == 0
