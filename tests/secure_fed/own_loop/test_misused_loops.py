"""Mistakes in a loop that would void its guarantee: each is refused with one sentence, or changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

from privacy.entropy import ForkError
from secure_fed.errors import DataError, ModelError, OwnLoopError, UsageError
from secure_fed.own_loop.batches import require_samplable
from secure_fed.own_loop.rehearsal import Parts
from secure_fed.private import Private, wrap
from tests.secure_fed.own_loop.loops import BUDGET, REHEARSAL, Loss, data, loader, mean, network, train, wrapped


def chosen(examples: Any) -> list[int]:
    return Parts(examples, 1.0).tried()


def state(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def same(before: list[Tensor], model: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def rehearse(private: Private) -> Any:
    """Runs the rehearsal; returns the iterator of the batches after it."""
    left = iter(private.loader)
    for _ in range(REHEARSAL):
        x, y = next(left)
        mean(private.model, x, y).backward()
        private.optimizer.step()
    return left


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
    x, y = next(rehearse(private))
    for _ in range(2):
        mean(private.model, x, y).backward()
        private.optimizer.step()


def other_loader(private: Private) -> None:
    rehearse(private)
    for x, y in loader():
        mean(private.model, x, y).backward()
        private.optimizer.step()


def other_batch(private: Private) -> None:
    next(rehearse(private))
    mean(private.model, *data()[:]).backward()
    private.optimizer.step()


def all_at_once(private: Private) -> None:
    for x, y in list(rehearse(private)):
        mean(private.model, x, y).backward()
        private.optimizer.step()


def skips(private: Private) -> None:
    for x, y in rehearse(private):
        if float(mean(private.model, x, y).detach()) > 100:
            private.optimizer.step()


def skips_unseen(private: Private) -> None:
    """Skips batches by their data, before the model's forward pass."""
    for x, y in rehearse(private):
        if float(x.max()) > 100:
            mean(private.model, x, y).backward()
            private.optimizer.step()


def skips_backward_passes(private: Private) -> None:
    """A huge loss would keep the whole batch out of the step."""
    for x, y in rehearse(private):
        loss = mean(private.model, x, y)
        if float(loss.detach()) > 100:
            loss.backward()
        private.optimizer.step()


def skips_single_examples(private: Private) -> None:
    for x, y in private.loader:
        if len(y) > 1:
            mean(private.model, x, y).backward()
            private.optimizer.step()


def closure(private: Private) -> None:
    x, y = next(rehearse(private))
    private.optimizer.step(lambda: float(mean(private.model, x, y).detach()))


def evaluates_as_it_trains(private: Private) -> None:
    x, y = next(rehearse(private))
    mean(private.model, x + 1, y)
    mean(private.model, x, y).backward()
    private.optimizer.step()


def only_evaluates(private: Private) -> None:
    x, y = next(rehearse(private))
    private.model.eval()
    mean(private.model, x, y).backward()
    private.optimizer.step()


def unfreezes(private: Private) -> None:
    left = rehearse(private)
    next(private.model.parameters()).requires_grad_(False)
    mean(private.model, *next(left)).backward()
    private.optimizer.step()


def another_group(private: Private) -> None:
    left = rehearse(private)
    private.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    mean(private.model, *next(left)).backward()
    private.optimizer.step()


def autocasts(private: Private) -> None:
    x, y = next(rehearse(private))
    with torch.autocast("cpu", torch.bfloat16):
        mean(private.model, x, y).backward()
    private.optimizer.step()


@pytest.mark.parametrize(
    ("misused", "says"),
    [
        (accumulates, r"without optimizer.step\(\): .* gradients are not accumulated"),
        (twice, "2 backward passes came before a step"),
        (again, "without a batch of the wrapped loader"),
        (other_loader, "without a batch of the wrapped loader"),
        (other_batch, "was given 24 examples, and the batch that the wrapped loader drew has"),
        (all_at_once, r"without optimizer.step\(\)"),
        (skips, r"without optimizer.step\(\)"),
        (skips_unseen, r"without optimizer.step\(\)"),
        (skips_backward_passes, r"without loss.backward\(\): .* must not depend on data"),
        (skips_single_examples, "left out batches of the rehearsal"),
        (closure, "closure"),
        (evaluates_as_it_trains, "a forward pass without a backward pass came between"),
        (only_evaluates, r"call model.train\(\) before"),
        (unfreezes, "the trained parameters differ from the wrapped ones"),
        (another_group, "the trained parameters differ from the wrapped ones"),
        (autocasts, "autocast"),
    ],
)
def test_a_loop_that_breaks_a_condition_is_refused(misused: Callable[[Private], None], says: str) -> None:
    private = wrapped(network())
    with pytest.raises(UsageError, match=says):
        misused(private)
    made = [one for one in private.model.parameters() if one.grad is not None]
    assert made == []


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


def test_a_rehearsal_has_the_rarest_class_and_different_lengths() -> None:
    labels = torch.zeros(500, dtype=torch.long)
    labels[375] = 1  # the only one of its class
    assert {0, 375} < set(chosen(TensorDataset(torch.ones(500, 5), labels)))  # type: ignore[arg-type]
    classes = [{"x": 0, "label": i // 100} for i in range(2000)]
    assert len(chosen(classes)) == 8
    words = torch.full((100, 4), -100)
    words[:, 0], words[57], words[23, 0] = 1, 1, -100
    assert chosen([(0, [{"box": 1}] * n) for n in range(4)]) == [0, 1, 2, 3]  # labels that are not numbers
    found = chosen(TensorDataset(torch.ones(100, 4), words))  # type: ignore[arg-type]
    assert {23, 50, 57} < set(found)
    assert {5, 70} < set(chosen([{"input_ids": [1] * (2 - (n == 5) + (n == 70))} for n in range(100)]))


@pytest.mark.parametrize(
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
    ids=["another key", "first", "float", "one element", "one-hot", "text", "in the middle", "a list of one"],
)
def test_a_rehearsal_has_the_rarest_class_wherever_it_stands(made: Callable[[Tensor, int], Any]) -> None:
    rows = [made(torch.ones(5), int(index == 431)) for index in range(500)]
    assert 431 in chosen(rows)


def test_the_classes_of_labels_come_before_those_of_other_columns() -> None:
    others = [{f"site {n}": (index + n) % 2 for n in range(10)} | {"labels": int(index == 431)} for index in range(500)]
    assert 431 in chosen(others)


def test_weights_of_classes_are_found_by_a_single_example_of_a_rare_class() -> None:
    """One example of that class in a batch would divide the gradients of all other examples by about its weight."""
    labels = torch.zeros(100, dtype=torch.long)
    labels[57] = 1
    rows = DataLoader(TensorDataset(torch.randn(100, 5, generator=torch.Generator().manual_seed(0)), labels), 10)
    model = network()
    private = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), rows, replace(BUDGET, delta=1e-3))
    with pytest.raises(ModelError, match="by weights of classes"):
        train(private, lambda model, x, y: cross_entropy(model(x), y, weight=torch.tensor([1.0, 99.0, 1.0])))
    assert private.spent().steps == 0


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (ratio_of_tokens, "averaged over all tokens of the batch"),
        (contrastive, "depends on the others in its batch"),
        (with_a_term_on_parameters, "the loss has a term of its own on the parameters"),
        (without_gradient, "no example that was tried has a gradient"),
    ],
)
def test_a_loss_that_is_not_each_examples_own_is_refused_before_anything_is_trained(loss: Loss, says: str) -> None:
    private = wrapped(network())
    before = state(private.model)
    with pytest.raises(ModelError, match=says):
        train(private, loss)
    assert same(before, private.model)
    assert private.spent().steps == 0


class Counting(nn.Module):
    """A layer whose buffer adds up the means of its inputs."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().mean()
        return x


class CountingLater(nn.Module):
    """A layer whose buffer changes in the second step after the rehearsal."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == REHEARSAL + 2:
            self.seen += x.detach().mean()
        return x


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


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Placed(), "2.places.weight was given 1 examples, .* or freeze that parameter"),
        (nn.BatchNorm1d(8), "BatchNorm1d, which couples the examples"),
        (nn.MultiheadAttention(8, 2), "2 is torch's MultiheadAttention, .* no example's gradient can be seen"),
        (nn.LSTM(8, 8), "2 is torch's LSTM, .* put opacus.layers.DPLSTM in its place"),
        (nn.GRU(8, 8), "2 is torch's GRU, .* put opacus.layers.DPGRU in its place"),
        (nn.Embedding(3, 8, sparse=True), "2 is an embedding with sparse gradients; make it with sparse=False"),
        (nn.Linear(8, 8).bfloat16(), "parameter 2.weight is bfloat16"),
        (Counting(), "buffer 2.seen of the model changes"),
        (Centred(), "depends on the others in its batch|do not add up"),
    ],
)
def test_a_model_that_couples_examples_or_remembers_them_is_refused(layer: nn.Module, says: str) -> None:
    model = network(layer)
    before = state(model)
    with pytest.raises(UsageError, match=says):
        train(wrapped(model))
    assert same(before, model)


def test_a_model_that_begins_to_remember_examples_after_the_rehearsal_is_stopped_before_the_step_is_paid() -> None:
    private = wrapped(network(CountingLater()))
    with pytest.raises(ModelError, match=r"buffer 2\.seen of the model changes"):
        train(private)
    assert private.spent().steps == 1


def test_a_loop_may_change_buffers_between_steps() -> None:
    layer = Counting()
    model = network(layer)
    layer.eval()  # so that it counts nothing
    private = wrapped(model)
    for x, y in private.loader:
        mean(model, x, y).backward()
        private.optimizer.step()
        layer.seen *= 0.9
        layer.seen += 1
    assert private.spent().steps > 0


def test_a_loss_that_is_not_finite_is_named_as_such() -> None:
    def unbounded(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x) / 0.0, y)

    with pytest.raises(ModelError, match="no example that was tried has a finite gradient"):
        train(wrapped(network()), unbounded)


def test_a_schedule_of_known_length_counts_the_rehearsal() -> None:
    private = wrapped(network())
    assert private.loader.rehearsal_batches == REHEARSAL
    schedule = torch.optim.lr_scheduler.OneCycleLR(private.optimizer, 1.0, total_steps=REHEARSAL + len(private.loader))
    for x, y in private.loader:
        mean(private.model, x, y).backward()
        private.optimizer.step()
        schedule.step()
    assert schedule.last_epoch == REHEARSAL + len(private.loader)


def test_another_optimizer_finds_no_gradient() -> None:
    private = wrapped(network())
    other = torch.optim.AdamW(private.model.parameters(), 0.1)
    before = state(private.model)
    left = rehearse(private)
    mean(private.model, *next(left)).backward()
    other.step()
    assert same(before, private.model)
    with pytest.raises(OwnLoopError):
        next(left)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, head = network(), nn.Linear(3, 2)
    with pytest.raises(ModelError, match=r"parameter 2.weight requires a gradient, but the optimizer does not have it"):
        wrap(model, torch.optim.SGD(model[:2].parameters(), 0.1), loader(), BUDGET)  # type: ignore[index]
    both = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    with pytest.raises(ModelError, match="2 parameters that are not the model's"):
        wrap(model, both, loader(), BUDGET)


def test_wrapping_twice_is_refused_until_the_first_is_closed() -> None:
    model = network()
    first = wrapped(model)
    with pytest.raises(ModelError, match=r"wrapped already; call close\(\)"):
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
    assert all(torch.equal(a, b) for a, b in zip(expected, state(looked.model), strict=True))


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
    with pytest.raises(ForkError, match=f"process {process + 1} uses secret random numbers of process {process}"):
        private.optimizer.step() if drawn else next(left)
    assert same(before, private.model)


def test_batches_may_be_fetched_by_workers() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = wrap(model, optimizer, DataLoader(data(), batch_size=8, num_workers=1), BUDGET)
    train(private)
    assert private.spent().steps == 6


D = data()
RARE = [2, 5]


@pytest.mark.parametrize(
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
    with pytest.raises(DataError, match=r"example \d+ of a data set more than once, .* leave out repeated indices"):
        require_samplable(DataLoader(made, batch_size=4))


@pytest.mark.parametrize(
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


def test_wrap_refuses_it() -> None:
    model = network()
    with pytest.raises(DataError, match="the loader's Subset has example 2 of a data set more than once"):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(Subset(D, [1, 2, 2]), 2), BUDGET)
