"""DP-SGD of one client against its formula, and its sensitivity by brute force; `test_private_together` has its draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from privacy.entropy import SeededEntropy, Stream, SystemEntropy
from privacy.mechanisms import Gaussian
from privacy.participation import Poisson
from secure_fed.config import TrainingConfig
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes import trainings
from secure_fed.learning.training.common_passes.passes import Found, Pack, Places, Trial, found_in
from secure_fed.learning.training.common_passes.trainings import Ways
from secure_fed.learning.training.local import (
    Job,
    PrivateSteps,
    Trained,
    batch_sampler,
    members_of,
    planned_steps,
)
from secure_fed.learning.training.objective import Objective
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.example_gradients import Gradients, losses_at
from tests.secure_fed.privately import Landing, Noted, less, norm, train_privately

CPU = torch.device("cpu")
LR, CLIP = 0.1, 0.3
SGD: dict[str, Any] = {"optimizer": "sgd"}


def objective(loss: Any = classification.loss, dropout: float = 0.0) -> Objective:
    made = Objective(toys.model(dropout=dropout), loss, CPU)
    made.public = toys.examples(9, 12)
    return made


def job_of(target: Objective, items: Sequence[Any], settings: TrainingConfig, **own: Any) -> Job:
    """The job to train all tensors of the model. own: fields that are replaced."""
    before = toys.weights(target.model)
    job = Job(before, list(before), items, default_collate, settings, LR, np.random.default_rng(0))
    return replace(job, **own)


def trained(
    target: Objective,
    items: Sequence[Any],
    settings: TrainingConfig,
    *,
    noise: float = 0.0,
    seed: int = 0,
    lr: float = LR,
    collate: Any = default_collate,
    **private: Any,
) -> tuple[Tensors, Trained]:
    """(the tensors before training, what one private training gives). private: parameters of `train_privately`."""
    job = job_of(target, items, settings, lr=lr, collate=collate, rng=np.random.default_rng(seed))
    usual = {"mechanism": Gaussian(noise), "clip_norm": CLIP, "steps": 1, "stream": SeededEntropy(0).stream("test")}
    return job.before, train_privately(target, job, **{**usual, **private})


def gradient(target: Objective, tensors: Tensors, item: Any) -> dict[str, Tensor]:
    moving = {name: tensors.tensor(name).clone().requires_grad_() for name in tensors}
    loss = losses_at(target, moving, default_collate([item])).sum()
    return dict(zip(moving, torch.autograd.grad(loss, list(moving.values())), strict=True))


def clipped_by_hand(target: Objective, tensors: Tensors, units: Sequence[Sequence[Any]], clip: float) -> Gradients:
    total = {name: torch.zeros_like(tensors.tensor(name)) for name in tensors}
    for unit in units:
        each = [gradient(target, tensors, item) for item in unit]
        mean = {name: torch.stack([one[name] for one in each]).mean(0) for name in total}
        factor = min(1.0, clip / norm(mean))
        total = {name: total[name] + factor * mean[name] for name in total}
    return total


def clipped(target: Objective, most: int | None = None, clip: float = CLIP) -> Callable[[Sequence[Any]], Gradients]:
    """A function: units -> the sum of clipped gradients at the model's weights, to which a step would add noise."""
    ways = Ways()

    def over(units: Sequence[Sequence[Any]]) -> Gradients:
        noted, items = Noted(1.0), [item for unit in units for item in unit]
        groups = [number for number, unit in enumerate(units) for _ in unit]
        settings = full(microbatch=most)
        trained(target, items, settings, mechanism=noted, groups=groups, clip_norm=clip, ways=ways)
        return noted.sums[0]

    return over


def full(**settings: Any) -> TrainingConfig:
    """Settings that draw every unit in every step, for up to 100 units."""
    return TrainingConfig(batch_size=100, **settings)


@pytest.mark.parametrize(("clip", "groups"), [(CLIP, list("abacccdabe")), (1e3, None)], ids=["groups", "examples"])
def test_a_step_is_the_formula(clip: float, groups: list[str] | None) -> None:
    """The gradient of a group is the mean of its examples'. The divisor is the expected size, whoever is drawn: here 4."""
    target, items, members = objective(), toys.examples(1, 10), members_of(10, groups)
    settings = TrainingConfig(batch_size=4, **SGD)
    for present in (range(len(members)), [3]):
        given = {"clip_norm": clip, "groups": groups, "stream": Landing(present)}
        before, done = trained(target, items, settings, **given)
        total = clipped_by_hand(target, before, [[items[i] for i in members[unit]] for unit in present], clip)
        for name in before:
            expected = before.tensor(name) - LR * total[name] / 4
            torch.testing.assert_close(done.after.tensor(name), expected, rtol=0, atol=1e-6)
    assert math.isnan(done.loss)


# Which examples are drawn.


def test_steps_and_rates() -> None:
    assert planned_steps(0, TrainingConfig(steps=5)) == 0
    assert planned_steps(9, TrainingConfig(steps=5)) == 5
    assert planned_steps(9, TrainingConfig(batch_size=4, epochs=2)) == 6
    assert planned_steps(3, TrainingConfig(batch_size=4)) == 1
    assert batch_sampler(100, TrainingConfig(batch_size=16)) == Poisson(100, 0.16)
    assert batch_sampler(5, TrainingConfig(batch_size=16)) == Poisson(5, 1.0)
    assert batch_sampler(0, TrainingConfig(batch_size=16)) == Poisson(0, 1.0)


def test_units() -> None:
    assert members_of(3, None) == [[0], [1], [2]]
    assert members_of(5, ["b", "a", "b", None, "a"]) == [[0, 2], [1, 4], [3]]
    with refused(ValueError):
        members_of(3, ["a", "b"])


@dataclass(frozen=True)
class Seen(Gaussian):
    """Notes the examples of each step, from the passes that precede its noise."""

    passes: list[list[int]] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)

    def found_in(self, objective: Objective, places: Places, pack: Pack) -> Found:
        self.passes.append([item["name"] for item in pack.items[: pack.count]])
        return found_in(objective, places, pack)

    def noised(self, total: Mapping[str, Tensor], clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        self.largest.append(max(map(len, self.passes), default=0))
        self.steps.append(sorted(name for one in self.passes for name in one))
        self.passes.clear()
        return super().noised(total, clip_norm, stream)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Seen]:
    """A function: noise multiplier -> a mechanism that notes the examples of each step."""

    def made(noise: float) -> Seen:
        mechanism = Seen(noise)
        monkeypatch.setattr(trainings, "found_in", mechanism.found_in)
        return mechanism

    return made


def unnamed(items: Sequence[Any]) -> Any:
    return default_collate([{"x": item["x"], "labels": item["labels"]} for item in items])


def named(count: int) -> list[dict[str, Any]]:
    return [item | {"name": i} for i, item in enumerate(toys.examples(1, count))]


def nothing(model: nn.Module, batch: Any) -> Tensor:
    """A loss whose gradient is zero, so that a step is its noise."""
    return classification.loss(model, batch) * 0.0


STILL, KNOWN = objective(nothing), Ways()


def noise_of_step(stream: Stream) -> np.ndarray[Any, Any]:
    """The coordinates of one step, which is noise alone."""
    given = {"mechanism": Gaussian(1.5), "stream": stream, "lr": 1.0, "ways": KNOWN}
    before, done = trained(STILL, toys.examples(1, 10), TrainingConfig(batch_size=6, **SGD), **given)
    moved = torch.cat([(done.after.tensor(name) - before.tensor(name)).flatten() for name in before])
    return moved.numpy()


def test_noise_is_new_in_every_step_and_call() -> None:
    one, other = (noise_of_step(SystemEntropy().stream("same label")) for _ in range(2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 6 / math.sqrt(len(one))
    stream = SeededEntropy(0).stream("x")
    steps = [noise_of_step(stream) for _ in range(2)]
    assert not np.array_equal(*steps)


# Sensitivity, by brute force.


def worst(over: Callable[[Sequence[Any]], Gradients], units: Sequence[Any]) -> float:
    """How far the sum moves at most when one unit leaves."""
    whole = over(units)
    return max(norm(less(whole, over([*units[:i], *units[i + 1 :]]))) for i in range(len(units)))


@pytest.mark.parametrize("clip", chosen([1e-3, 0.3, 1.0], [1e-3, 1.0]))
def test_no_example_moves_the_sum_by_more_than_the_clip_norm(clip: float) -> None:
    found = worst(clipped(objective(), clip=clip), [[item] for item in toys.examples(1, 9)])
    assert 0.999 * clip < found <= clip


def test_no_group_moves_the_sum_by_more_than_the_clip_norm() -> None:
    """Groups of 12 examples, of a single example, of the same example 8 times, and of 4."""
    items = toys.examples(1, 18)
    groups = [items[:12], items[12:13], [items[13]] * 8, items[14:]]
    for most in (None, 3):
        found = worst(clipped(objective(), most), groups)
        assert 0.999 * CLIP < found <= CLIP


@pytest.mark.parametrize("bad", chosen([math.nan, math.inf, 1e38], [math.nan, 1e38]))
def test_an_example_without_a_finite_gradient_counts_as_zero(bad: float) -> None:
    units = [[item] for item in toys.examples(1, 5)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return classification.loss(model, batch) * (1 + batch["x"].square().sum(1))

    over = clipped(objective(loss))
    assert norm(less(over(units), over([*units, [{"x": torch.full((6,), bad), "labels": 0}]]))) == 0


def test_a_finite_gradient_whose_square_overflows_is_clipped() -> None:
    total = clipped(objective(lambda model, batch: classification.loss(model, batch) * 1e25))([toys.examples(1, 1)])
    assert 0.999 * CLIP < norm(total) <= CLIP


# Groups and microbatches.


def test_of_a_group_at_most_so_many_examples_count_and_all_get_their_turn(seen: Callable[[float], Seen]) -> None:
    mechanism, spans = seen(0.0), (range(6), range(6, 9), range(9, 10))
    given = {"steps": 30, "collate": unnamed, "groups": [0] * 6 + [1] * 3 + [2], "person_examples": 2, "lr": 1e-9}
    trained(objective(), named(10), full(), mechanism=mechanism, **given)
    assert [[sum(name in span for name in call) for span in spans] for call in mechanism.steps] == [[2, 2, 1]] * 30
    assert {name for call in mechanism.steps for name in call} == set(range(10))


@pytest.mark.parametrize("groups", [None, [0, 0, 0, 0, 0, 1, 2, 2, 3]])
def test_passes_of_other_sizes_change_nothing_but_memory(
    groups: list[int] | None, seen: Callable[[float], Seen]
) -> None:
    """Microbatches, and a model of which no two examples share a pass."""
    done, largest = [], []
    for most, why_not in ((None, ""), (1, ""), (2, ""), (4, ""), (None, "as the test has it")):
        mechanism, target, settings = seen(1.0), objective(), TrainingConfig(batch_size=3, microbatch=most, **SGD)
        given: dict[str, Any] = {"steps": 3, "groups": groups, "collate": unnamed, "mechanism": mechanism}
        if why_not:
            private = PrivateSteps(mechanism, CLIP, 3, SystemEntropy().stream(), groups)
            given["ways"] = Ways({job_of(target, [], settings, private=private).kind: Trial(why_not)})
        done.append(trained(target, named(9), settings, **given)[1].after)
        largest.append(max(mechanism.largest))
    assert all((after - done[0]).norm() < 1e-5 * done[0].norm() for after in done[1:])
    assert largest[0] > 1
    assert largest[1:] == [1, 1, 4, 1], "a pass of two is not worth its comparison"


@pytest.mark.gpu
def test_a_gpu_trains_as_the_cpu_does() -> None:
    done = []
    for device in (CPU, torch.device("cuda")):
        target = Objective(toys.model().to(device), classification.loss, device)
        before = toys.weights(toys.model())
        job = job_of(target, toys.examples(1, 9), TrainingConfig(batch_size=4, **SGD), before=before)
        private = {"mechanism": Gaussian(1.0), "steps": 3, "groups": [0, 0, 0, 1, 1, 2, 3, 4, 5]}
        private |= {"stream": SeededEntropy(0).stream("test")}
        done.append(train_privately(target, job, clip_norm=CLIP, **private).after)
    assert (done[0] - done[1]).norm() < 1e-4 * done[0].norm()
