"""Mistakes in a loop that would void its guarantee: each is refused with one sentence, or changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from privacy.entropy import ForkError
from secure_fed.errors import ModelError, OwnLoopError, UsageError
from secure_fed.private import Private, wrap
from tests.cells import every
from tests.golden import refused
from tests.secure_fed.own_loop.loops import (
    BUDGET,
    EXAMPLES,
    REHEARSAL,
    Loss,
    batches,
    data,
    loader,
    mean,
    network,
    same,
    state,
    train,
    wrapped,
)


def rehearse(private: Private) -> Any:
    """Runs the rehearsal; returns the iterator of the batches after it."""
    left = iter(private.loader)
    for _ in range(REHEARSAL):
        step(private, *next(left))
    return left


def step(private: Private, x: Tensor, y: Tensor) -> None:
    mean(private.model, x, y).backward()
    private.optimizer.step()


def accumulates(private: Private) -> None:
    left = rehearse(private)
    for _ in range(2):
        mean(private.model, *next(left)).backward()


def twice(private: Private) -> None:
    x, y = next(rehearse(private))
    for _ in range(2):
        mean(private.model, x, y).backward()
    private.optimizer.step()


def again(private: Private) -> None:
    batch = next(rehearse(private))
    step(private, *batch)
    step(private, *batch)


def other_loader(private: Private) -> None:
    rehearse(private)
    for batch in loader():
        step(private, *batch)


def other_batch(private: Private) -> None:
    next(rehearse(private))
    step(private, *data()[:])


def all_at_once(private: Private) -> None:
    for batch in list(rehearse(private)):
        step(private, *batch)


def skips(private: Private) -> None:
    for x, y in rehearse(private):
        if float(mean(private.model, x, y).detach()) > 100:
            private.optimizer.step()


def skips_unseen(private: Private) -> None:
    """Skips batches by their data, before the model's forward pass."""
    for x, y in rehearse(private):
        if float(x.max()) > 100:
            step(private, x, y)


def skips_backward_passes(private: Private) -> None:
    """A huge loss would keep the whole batch out of the step."""
    for x, y in rehearse(private):
        loss = mean(private.model, x, y)
        if float(loss.detach()) > 100:
            loss.backward()
        private.optimizer.step()


def leaves_out(size: int) -> Callable[[Private], None]:
    """A loop without the rehearsal's batches of this size."""

    def loop(private: Private) -> None:
        for x, y in private.loader:
            if len(y) != size:
                step(private, x, y)

    return loop


def closure(private: Private) -> None:
    x, y = next(rehearse(private))
    private.optimizer.step(lambda: float(mean(private.model, x, y).detach()))


def evaluates_as_it_trains(private: Private) -> None:
    x, y = next(rehearse(private))
    mean(private.model, x + 1, y)
    step(private, x, y)


def only_evaluates(private: Private) -> None:
    batch = next(rehearse(private))
    private.model.eval()
    step(private, *batch)


def unfreezes(private: Private) -> None:
    left = rehearse(private)
    next(private.model.parameters()).requires_grad_(False)
    step(private, *next(left))


def another_group(private: Private) -> None:
    left = rehearse(private)
    private.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    step(private, *next(left))


def autocasts(private: Private) -> None:
    x, y = next(rehearse(private))
    with torch.autocast("cpu", torch.bfloat16):
        mean(private.model, x, y).backward()
    private.optimizer.step()


MISUSED = (
    *(accumulates, twice, again, other_loader, other_batch, all_at_once, skips, skips_unseen, skips_backward_passes),
    *(closure, evaluates_as_it_trains, only_evaluates, unfreezes, another_group, autocasts),
)


@pytest.mark.parametrize("misused", MISUSED)
def test_a_loop_that_breaks_a_condition_is_refused(misused: Callable[[Private], None]) -> None:
    private = wrapped(network())
    with refused(UsageError, hide=r"drew has \d+|\d+ examples"):
        misused(private)
    assert all(one.grad is None for one in private.model.parameters())


@every("size", [24, 8, 1])
def test_no_batch_of_the_rehearsal_may_be_left_out(size: int) -> None:
    with refused(OwnLoopError):
        leaves_out(size)(wrapped(network(), batch_size=20))


def ratio_of_tokens(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over all tokens of a batch, as in a language model's loss; examples have different numbers of tokens."""
    tokens = y + 1.0
    return (cross_entropy(model(x), y, reduction="none") * tokens).sum() / tokens.sum()


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = model(x)
    return cross_entropy(found @ found.T, torch.arange(len(found)))


def with_a_term_on_parameters(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mean(model, x, y) + 0.1 * sum(one.square().sum() for one in model.parameters())


def without_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mean(model, x, y) * 0.0


def without_finite_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x) / 0.0, y)


@pytest.mark.parametrize(
    "loss", [ratio_of_tokens, contrastive, with_a_term_on_parameters, without_gradient, without_finite_gradient]
)
def test_a_loss_that_is_not_each_examples_own_is_refused_before_anything_is_trained(loss: Loss) -> None:
    private = wrapped(network())
    before = state(private.model)
    with refused(ModelError):
        train(private, loss)
    assert same(before, private.model)
    assert private.spent().steps == 0


class Writes(nn.Module):
    """A layer with a buffer, a frozen and a trained parameter of eight numbers each, to which it writes by `write`.

    calls: of forward passes that train, so far.
    """

    seen: Tensor

    def __init__(self, write: Callable[[Writes, Tensor], None]) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.scale = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.write, self.calls = write, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            with torch.no_grad():
                self.write(self, x.detach())
        found: Tensor = self.scale(x)
        return found


def keeps_a_mean(layer: Writes, x: Tensor) -> None:
    layer.centre.lerp_(x.mean(0), 0.1)


def keeps_a_mean_as_data(layer: Writes, x: Tensor) -> None:
    layer.centre.data = torch.lerp(layer.centre.data, x.mean(0), 0.1)


def keeps_one_number(layer: Writes, x: Tensor) -> None:
    layer.centre.data[3] = x.max()


def writes_to_what_trains(layer: Writes, x: Tensor) -> None:
    layer.scale.bias.data += x.mean(0)


def writes_in_the_backward_pass(layer: Writes, x: Tensor) -> None:
    def note(own: nn.Module, at: Any, after: Any) -> None:
        layer.centre.data += after[0].mean(0)

    if layer.calls == 1:
        layer.register_full_backward_hook(note)


def counts(layer: Writes, x: Tensor) -> None:
    layer.seen += x.mean(0)


def later(write: Callable[[Writes, Tensor], None]) -> Callable[[Writes, Tensor], None]:
    """The same from the second step after the rehearsal on."""
    return lambda layer, x: write(layer, x) if layer.calls >= REHEARSAL + 2 else None


WRITES = (
    counts,
    keeps_a_mean,
    keeps_a_mean_as_data,
    keeps_one_number,
    writes_to_what_trains,
    writes_in_the_backward_pass,
)


class Centred(nn.Module):
    """A layer that subtracts half of the batch's mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) / 2


class Placed(nn.Module):
    """A layer that adds one learned vector to all examples, which Opacus's rule counts as a single example."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.places(torch.zeros(1, dtype=torch.long))
        return found


LAYERS: dict[str, nn.Module] = {
    "placed": Placed(),
    "batch norm": nn.BatchNorm1d(8),
    "attention": nn.MultiheadAttention(8, 2),
    "LSTM": nn.LSTM(8, 8),
    "GRU": nn.GRU(8, 8),
    "sparse": nn.Embedding(3, 8, sparse=True),
    "bfloat16": nn.Linear(8, 8).bfloat16(),
    **{write.__name__: Writes(write) for write in WRITES},
    "centred": Centred(),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_model_that_couples_examples_or_remembers_them_is_refused(layer: str) -> None:
    model = network(LAYERS[layer])
    before = state(model[0])  # type: ignore[index]
    with refused(UsageError):
        train(wrapped(model))
    assert same(before, model[0]), "no step was made"  # type: ignore[index]


@every("write", [counts, keeps_a_mean_as_data])
def test_a_layer_that_begins_to_write_after_the_rehearsal_is_stopped_before_the_step_is_paid(
    write: Callable[[Writes, Tensor], None],
) -> None:
    private = wrapped(network(Writes(later(write))))
    with refused(ModelError):
        train(private)
    assert private.spent().steps == 1


def test_parameters_and_buffers_may_be_changed_between_steps_by_what_is_released() -> None:
    """A bound on weights, and a teacher that follows the model, are functions of noised steps."""
    layer = Writes(lambda layer, x: None)
    model = network(layer)
    private = wrapped(model)
    for x, y in batches(private):
        step(private, x, y)
        with torch.no_grad():
            model[0].weight.clamp_(-0.5, 0.5)  # type: ignore[index]
            layer.centre.lerp_(layer.scale.bias, 0.1)
            layer.seen += 1
    assert private.spent().steps == 6


def test_another_optimizer_finds_no_gradient() -> None:
    private = wrapped(network())
    other = torch.optim.AdamW(private.model.parameters(), 0.1)
    before = state(private.model)
    left = rehearse(private)
    mean(private.model, *next(left)).backward()
    other.step()
    assert same(before, private.model)
    with refused(OwnLoopError):
        next(left)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, head = network(), nn.Linear(3, 2)
    with refused(ModelError):
        wrap(model, torch.optim.SGD(model[:2].parameters(), 0.1), loader(), BUDGET)  # type: ignore[index]
    both = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    with refused(ModelError):
        wrap(model, both, loader(), BUDGET)


def test_an_optimizer_without_hooks_is_refused_and_leaves_the_model_as_it_was() -> None:
    class Unfinished(torch.optim.SGD):
        def __init__(self, model: nn.Module) -> None:
            self.param_groups, self.state = [{"params": [*model.parameters()]}], {}  # type: ignore[assignment]

    model = network()
    with refused(OwnLoopError):
        wrap(model, Unfinished(model), loader(), BUDGET)
    train(wrapped(model))


def test_wrapping_twice_is_refused_until_the_first_is_closed() -> None:
    model = network()
    first = wrapped(model)
    with refused(ModelError):
        wrapped(model)
    first.close()
    train(wrapped(model))


def test_evaluation_and_a_look_at_a_batch_change_nothing() -> None:
    """The final parameters equal those of a loop without them, bit for bit."""
    plain, looked = wrapped(network(), 3), wrapped(network(), 3)
    expected = train(plain)[-1]
    next(iter(looked.loader))  # looks at a batch of the rehearsal
    left = rehearse(looked)
    schedule = torch.optim.lr_scheduler.ConstantLR(looked.optimizer, 1.0)
    while True:
        for x, y in left:
            looked.model.eval()
            mean(looked.model, *data()[:])
            looked.model.train()
            with torch.no_grad():
                mean(looked.model, *data()[:])
            mean(looked.model, x, y).backward()
            looked.optimizer.step()
            looked.optimizer.zero_grad()
            schedule.step()
        if looked.spent().steps == 6:
            break
        left = iter(looked.loader)
    assert same(expected, looked.model)


def test_dropout_is_drawn_in_secret_and_leaves_the_global_generator() -> None:
    private = wrapped(network(nn.Dropout(0.5)), None)
    x, y = next(rehearse(private))
    torch.manual_seed(0)
    first = mean(private.model, x, y).detach()
    torch.manual_seed(0)
    second = mean(private.model, x, y).detach()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(after, torch.get_rng_state())
    assert len(x) < 2 or float(first) != float(second)


@pytest.mark.parametrize("drawn", [False, True], ids=["coins", "noise"])
def test_a_fork_has_neither_the_coins_nor_the_noise_of_its_first_process(
    drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = wrapped(network(), None)
    left, process, before = rehearse(private), os.getpid(), state(private.model)
    if drawn:
        mean(private.model, *next(left)).backward()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with refused(ForkError, hide=r"process \d+"):
        private.optimizer.step() if drawn else next(left)
    assert same(before, private.model)


class Bag(nn.Module):
    """An EmbeddingBag over ten words, or an Embedding that is averaged, and a head."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words, self.head = words, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.words(x)
        scores: Tensor = self.head(found if found.ndim == 2 else found.mean(1))
        return scores


@every("kind", [nn.Embedding, nn.EmbeddingBag])
@every("trains", [True, False])
def test_a_largest_norm_of_embeddings_is_refused_before_anything_runs(
    kind: Callable[..., nn.Module], trains: bool
) -> None:
    model = Bag(kind(10, 8, max_norm=0.5).requires_grad_(trains))
    before = model.words.weight.detach().clone()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)
    texts = DataLoader(TensorDataset(torch.arange(EXAMPLES)[:, None] % 10, torch.arange(EXAMPLES) % 3), 8)
    with refused(ModelError):
        wrap(model, optimizer, texts, BUDGET)
    assert torch.equal(before, model.words.weight)


def test_a_frozen_parameter_is_not_stepped_along_its_old_gradient() -> None:
    """A layer is frozen after a look at the gradients of all, which nobody removed."""
    model = network()
    cross_entropy(model(data().tensors[0]), data().tensors[1]).backward()
    model[0].requires_grad_(False)  # type: ignore[index]
    before = state(model[0])  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    private: Private = wrap(model, optimizer, loader(), BUDGET)
    for x, y in batches(private):  # no zero_grad
        mean(model, x, y).backward()
        optimizer.step()
    assert private.spent().steps == 6
    assert same(before, model[0])  # type: ignore[index]
