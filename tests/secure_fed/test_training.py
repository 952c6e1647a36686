"""Local training against torch by hand."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from secure_fed.config import TrainingConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.local import Falling, Job, scheduled_lr, train
from secure_fed.learning.training.objective import Objective, to_device
from secure_fed.tensors.tensors import Tensors
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.example_gradients import losses_at

CPU = torch.device("cpu")
LR = 0.1


def objective(model: nn.Module | None = None, loss: Any = classification.loss) -> Objective:
    return Objective(model or toys.model(), loss, CPU)


def trained(target: Objective, settings: TrainingConfig, **own: Any) -> tuple[Tensors, Tensors, float]:
    """(the tensors before, after, the loss). own: parameters of `job_of`."""
    before = toys.weights(target.model)
    done = train(target, job_of(before, toys.examples(1, 7), settings, **own))
    return before, done.after, done.loss


def job_of(
    start: Tensors,
    examples: Any,
    settings: TrainingConfig,
    lr: float = LR,
    trainable: Any = None,
    seed: int = 0,
    **own: Any,
) -> Job:
    names = list(start) if trainable is None else trainable
    return Job(start, names, examples, default_collate, settings, lr, np.random.default_rng(seed), **own)


def by_hand(optimizer_of: Any, steps: int, mu: float) -> Tensors:
    """The tensors after training on full batches in plain torch."""
    model = toys.model()
    start = toys.weights(model)
    batch = default_collate(toys.examples(1, 7))
    optimizer = optimizer_of(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
        for name, parameter in model.named_parameters():
            loss = loss + mu / 2 * (parameter - start.tensor(name)).pow(2).sum()
        loss.backward()
        optimizer.step()
    return toys.weights(model)


def assert_close(left: Tensors, right: Tensors, tolerance: float = 2e-6) -> None:
    assert set(left) == set(right)
    for name in left:
        torch.testing.assert_close(left.tensor(name), right.tensor(name), rtol=0, atol=tolerance)


def test_a_block_that_fails_gives_the_model_its_parameters_back() -> None:
    model = toys.model()
    own = dict(model.named_parameters())
    with pytest.raises(KeyError), objective(model).holding({name: tensor + 1 for name, tensor in own.items()}):
        raise KeyError
    assert dict(model.named_parameters()) == own


def test_a_half_precision_model_trains_float32_tensors() -> None:
    start, target = toys.weights(toys.model()), objective(toys.model().bfloat16(), _bfloat16_loss)
    done = train(target, job_of(start, toys.examples(1, 7), TrainingConfig()))
    assert {tensor.dtype for tensor in done.after.parts().values()} == {torch.float32}
    assert done.after.is_finite()
    assert not toys.same(done.after, start)


def _bfloat16_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"].bfloat16()).float(), batch["labels"], reduction="none")


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: classification.loss(model, batch).mean(),
        lambda model, batch: classification.loss(model, batch)[:-1],
        lambda model, batch: classification.logits(model, batch),
        nn.CrossEntropyLoss(),
    ],
    ids=["a mean", "too few", "too many", "a module of torch"],
)
def test_a_loss_that_is_not_one_number_an_example_is_refused(loss: Any) -> None:
    with refused(ConfigError):
        trained(objective(loss=loss), TrainingConfig(batch_size=7))


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [
        (nn.BatchNorm1d(8), True),
        (nn.BatchNorm1d(8, track_running_stats=False), True),
        (nn.InstanceNorm1d(8, track_running_stats=True), True),
        (nn.InstanceNorm1d(8), False),
        (nn.LayerNorm(8), False),
    ],
    ids=str,
)
def test_a_layer_with_running_statistics_is_refused_by_name(layer: nn.Module, wrong: bool) -> None:
    with refused(ModelError) if wrong else nullcontext():
        objective(nn.Sequential(nn.Linear(6, 8), nn.Sequential(layer)))


# The optimisers.


def sgd(momentum: float, weight_decay: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, LR, momentum=momentum, weight_decay=weight_decay)


@pytest.mark.parametrize(
    ("settings", "optimizer_of"),
    [
        ({"optimizer": "sgd"}, sgd(0.0, 0.0)),
        ({"optimizer": "sgd", "momentum": 0.8}, sgd(0.8, 0.0)),
        ({"optimizer": "sgd", "weight_decay": 0.3}, sgd(0.0, 0.3)),
        ({}, lambda parameters: torch.optim.AdamW(parameters, LR, weight_decay=0.0)),
        ({"weight_decay": 0.3}, lambda parameters: torch.optim.AdamW(parameters, LR, weight_decay=0.3)),
        ({"optimizer": "sgd", "proximal": 0.7}, sgd(0.0, 0.0)),
    ],
)
def test_three_steps_are_those_of_torch(settings: dict[str, Any], optimizer_of: Any) -> None:
    _, after, _ = trained(objective(), TrainingConfig(steps=3, batch_size=7, **settings))
    assert_close(after, by_hand(optimizer_of, 3, settings.get("proximal", 0.0)))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_head_factor_is_a_rate_of_the_heads_own_and_a_rate_that_falls_is_set_anew_for_every_step(
    optimizer: str, schedule: str
) -> None:
    settings = TrainingConfig(steps=4, batch_size=7, optimizer=optimizer, weight_decay=0.3, head_factor=4.0)
    model, target, head = toys.model(), objective(), ("classifier.weight", "classifier.bias")
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in named if (name in head) == last]} for last in (False, True)]
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](groups, LR, weight_decay=0.3)
    falling = Falling(TrainingConfig(lr=LR, lr_schedule=schedule), 0, 2)
    batch = default_collate(toys.examples(1, 7))
    rates = [LR, 0.875 * LR, 0.75 * LR, 0.625 * LR] if schedule == "linear" else [LR] * 4
    for rate in rates:
        for group, times in zip(made.param_groups, (1, 4), strict=True):
            group["lr"] = times * rate
        made.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["labels"]).backward()
        made.step()
    assert_close(trained(target, settings, last=head, falling=falling)[1], toys.weights(model))
    assert falling.as_long(4) == pytest.approx(sum(rates) / LR)


def test_proximity_is_no_part_of_the_loss_told() -> None:
    told = [trained(objective(), TrainingConfig(batch_size=7, proximal=mu))[2] for mu in (0.0, 5.0)]
    assert told[0] == told[1]


def test_a_longer_gradient_is_cut_to_the_norm_and_a_shorter_one_is_left() -> None:
    def moved(most: float | None) -> Tensors:
        settings = TrainingConfig(steps=1, batch_size=7, optimizer="sgd", max_grad_norm=most)
        before, after, _ = trained(objective(), settings)
        return after - before

    whole = moved(None)
    length = whole.norm() / LR
    assert_close(moved(2 * length), whole)
    assert_close(moved(length / 4), whole * 0.25)


def test_gradients_of_parts_add_up_to_the_batchs() -> None:
    seen: list[int] = []

    class Noting(Objective):
        def losses(self, batch: Any) -> Tensor:
            seen.append(len(batch["labels"]))
            return super().losses(batch)

    def run(part: int | None) -> tuple[Tensors, float]:
        made = Noting(objective().model, classification.loss, CPU)
        _, after, loss = trained(made, TrainingConfig(steps=2, batch_size=7, optimizer="sgd", microbatch=part))
        return after, loss

    (whole, loss), most = run(None), max(seen)
    seen.clear()
    parts, told = run(3)
    assert (most, max(seen)) == (7, 3)
    assert_close(parts, whole)
    assert told == pytest.approx(loss)


# The number of steps and their examples.


class Counting:
    """A data set that notes the index of every example read."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.items[index]


@pytest.mark.parametrize(
    ("settings", "batches"),
    [({"epochs": 1}, 3), ({"epochs": 2}, 6), ({"steps": 2}, 2), ({"steps": 5}, 5), ({"steps": 2, "epochs": 9}, 2)],
)
def test_epochs_and_steps_are_counted(settings: dict[str, int], batches: int) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(len(batch["labels"]))
        return classification.loss(model, batch)

    target, items = objective(loss=loss), Counting(toys.examples(1, 10))
    start, chosen = toys.weights(target.model), TrainingConfig(batch_size=4, **settings)
    train(target, job_of(start, items, chosen))
    assert len(seen) == batches
    assert sum(seen) == len(items.read)
    passes = [items.read[start : start + 10] for start in range(0, len(items.read), 10)]
    assert all(sorted(whole) == list(range(10)) for whole in passes if len(whole) == 10)
    assert len(set(passes[-1])) == len(passes[-1])
    assert len(passes) < 2 or passes[0] != passes[1][: len(passes[0])]


def test_nobodys_examples_change_nothing() -> None:
    target = objective()
    start = toys.weights(target.model)
    for settings in (TrainingConfig(), TrainingConfig(steps=3)):
        done = train(target, job_of(start, [], settings))
        assert toys.same(done.after, start)
        assert math.isnan(done.loss)


def test_only_what_is_trainable_moves_and_nothing_given_is_changed() -> None:
    target = objective()
    before, after, _ = trained(target, TrainingConfig(), trainable=["value.weight", "classifier.bias"])
    assert set(after) == {"value.weight", "classifier.bias"}
    assert all(not torch.equal(after.tensor(name), before.tensor(name)) for name in after)
    assert toys.same(before, toys.weights(toys.model()))
    assert toys.same(toys.weights(target.model), before)
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_loss_told_is_the_mean_over_examples_not_over_batches() -> None:
    target = objective()
    start, _, loss = trained(target, TrainingConfig(batch_size=4), lr=1e-12, trainable=["value.bias"])
    expected = losses_at(target, dict(start), default_collate(toys.examples(1, 7))).mean()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)


# Randomness.


def test_order_and_dropout_depend_on_the_generator_alone() -> None:
    settings = TrainingConfig(batch_size=2, epochs=2)
    runs = []
    for seed, disturbance in ((1, 10), (1, 20), (2, 10)):
        target = objective(toys.model(dropout=0.4))
        torch.manual_seed(disturbance)
        np.random.seed(disturbance)
        before = torch.get_rng_state()
        runs.append(trained(target, settings, seed=seed)[1])
        assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    assert toys.same(runs[0], runs[1])
    assert not toys.same(runs[0], runs[2])


def test_dropout_is_on_in_training_whatever_the_mode_that_the_model_was_given_or_left_in() -> None:
    full, model = TrainingConfig(batch_size=7), toys.model(dropout=0.6)
    model.train()
    model.dropout.eval()
    target = objective(model)
    first = trained(target, full)[1]
    assert not toys.same(first, trained(objective(toys.model(dropout=0.0)), full)[1])
    target.model.eval()
    assert toys.same(first, trained(target, full)[1])


def test_dropout_differs_from_step_to_step() -> None:
    masks: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        masks.append(model.get_submodule("dropout")(torch.ones(50)) == 0)
        return classification.loss(model, batch)

    trained(objective(toys.model(dropout=0.5), loss), TrainingConfig(steps=2, batch_size=7))
    assert not torch.equal(masks[0], masks[1])


def test_how_a_tensor_lies_in_memory_does_not_matter() -> None:
    """A state read from a file is contiguous; the state that was written need not be."""
    target, settings = objective(), TrainingConfig(batch_size=3)
    straight = toys.weights(target.model)
    askew = Tensors((name, t.T.contiguous().T if t.ndim == 2 else t) for name, t in straight.parts().items())
    done = [train(target, job_of(start, toys.examples(1, 7), settings)) for start in (straight, askew)]
    assert toys.same(done[0].after, done[1].after)
    assert all(part.is_contiguous() for part in done[1].after.parts().values())


@pytest.mark.gpu
def test_the_gpus_generator_is_left_alone_and_decides_nothing() -> None:
    device = torch.device("cuda")
    runs = []
    for disturbance in (1, 2):
        model = toys.model(dropout=0.4).to(device)  # seeds every generator
        torch.cuda.manual_seed(disturbance)
        state = torch.cuda.get_rng_state(device)
        start = Tensors((name, parameter.cpu()) for name, parameter in toys.weights(model).items())
        target = Objective(model, classification.loss, device)
        runs.append(train(target, job_of(start, toys.examples(1, 7), TrainingConfig())))
        assert torch.equal(torch.cuda.get_rng_state(device), state)
    assert toys.same(runs[0].after, runs[1].after)
    assert all(part.device.type == "cpu" for part in runs[0].after.parts().values())


# The learning rate over the rounds.


def test_learning_rate_schedules() -> None:
    def over(rounds: int, schedule: str, **own: Any) -> list[float]:
        settings = TrainingConfig(lr=8.0, lr_schedule=schedule, **own)
        return [scheduled_lr(settings, round_, rounds) for round_ in range(rounds)]

    assert over(4, "constant") == [8.0, 8.0, 8.0, 8.0]
    assert over(4, "linear") == [8.0, 6.0, 4.0, 2.0]
    assert over(20, "stable_decay") == pytest.approx([8.0] * 17 + [6.0, 4.0, 2.0])
    half = math.sqrt(0.5)
    assert over(4, "cosine") == pytest.approx([8.0, 4 * (1 + half), 4.0, 4 * (1 - half)])
    assert over(7, "linear", lr_warmup=3) == [2.0, 4.0, 6.0, 8.0, 6.0, 4.0, 2.0]


def test_within_a_round_the_rate_keeps_to_its_schedule_and_never_rises() -> None:
    def left(schedule: str, rounds: int, made: float, **own: Any) -> list[float]:
        settings = TrainingConfig(lr=8.0, lr_schedule=schedule, **own)
        return [Falling(settings, round_, rounds).left(made) for round_ in range(rounds)]

    assert left("constant", 4, 1.0) == [1, 1, 1, 1]
    assert left("linear", 4, 1.0) == pytest.approx([6 / 8, 4 / 6, 2 / 4, 0])
    assert left("linear", 4, 0.5) == pytest.approx([7 / 8, 5 / 6, 3 / 4, 1 / 2])
    assert left("stable_decay", 1, 0.75) == [1], "of one round the last fifth falls"
    assert left("stable_decay", 1, 0.9) == pytest.approx([0.5])
    assert left("cosine", 1, 0.5) == pytest.approx([0.5])
    assert left("linear", 4, 1.0, lr_warmup=3) == [1, 1, 1, 0]


def test_a_client_trains_at_the_rate_as_it_falls_in_the_round_that_is_asked_for() -> None:
    built = toys.federation({"training.lr_schedule": "linear", "training.steps": 2, "federation.rounds": 3})
    client, server, training = built.assembly.clients[0], built.assembly.server, built.assembly.config.training
    state = replace(built.assembly.initial, round=2)
    plan = server.plan(state)
    request = server.request(state, plan, plan.passes[0], scheduled_lr(training, 2, 3), {})
    job = client.job(request)
    assert job is not None
    assert job.falling == Falling(training, 2, 3)
    assert [job.share(step) for step in range(2)] == pytest.approx([1, 0.5])
    moved = train(built.assembly.objective, job).after - state.tensors.select(job.trainable)
    assert toys.same(client.handle(request).contribution, moved)


def test_batches_of_any_nesting_reach_the_device() -> None:
    moved = to_device(
        {"a": torch.ones(1), "b": [torch.ones(1), "word"], "c": (torch.ones(1), None)}, torch.device("meta")
    )
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1] == "word"
    assert moved["c"][0].is_meta
    assert moved["c"][1] is None
    pair = namedtuple("Pair", ["text", "label"])
    moved_pair = to_device(pair(torch.zeros(2), torch.ones(2)), torch.device("cpu"))
    assert isinstance(moved_pair, pair)
    assert torch.equal(moved_pair.label, torch.ones(2))
