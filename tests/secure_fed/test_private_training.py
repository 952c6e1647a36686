"""DP-SGD against its formula, its noise against its distribution, and its sensitivity by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import default_collate

from privacy.entropy import SeededEntropy, Stream, SystemEntropy
from privacy.mechanisms import Gaussian, Mechanism
from privacy.sampling_and_turns import Poisson
from secure_fed.config import MethodConfig, TrainingConfig
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes import trainings
from secure_fed.learning.training.common_passes.passes import Found, Pack, Places, Trial, found_in
from secure_fed.learning.training.common_passes.trainings import Ways
from secure_fed.learning.training.local import (
    Job,
    Placed,
    PrivateSteps,
    Trained,
    batch_sampler,
    members_of,
    planned_steps,
)
from secure_fed.learning.training.objective import Objective
from secure_fed.methods import build
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import toys
from tests.secure_fed.example_gradients import Gradients, losses_at, together
from tests.secure_fed.privately import Landing, Noted, less, norm, train_privately

CPU = torch.device("cpu")
LR, CLIP = 0.1, 0.3
SGD: dict[str, Any] = {"optimizer": "sgd"}


def objective(loss: Any = classification.loss, dropout: float = 0.0) -> Objective:
    made = Objective(toys.model(dropout=dropout), loss, CPU)
    made.public = toys.examples(9, 12)
    return made


def weights(model: nn.Module) -> Tensors:
    return Tensors((name, parameter.detach().clone()) for name, parameter in model.named_parameters())


def trained(
    target: Objective,
    items: Sequence[Any],
    settings: TrainingConfig,
    *,
    noise: float = 0.0,
    steps: int = 1,
    stream: Stream | None = None,
    lr: float = LR,
    seed: int = 0,
    collate: Any = default_collate,
    mechanism: Mechanism | None = None,
    clip_norm: float = CLIP,
    **groups: Any,
) -> tuple[Tensors, Trained]:
    before = weights(target.model)
    done = train_privately(
        target,
        Job(before, list(before), items, collate, settings, lr, np.random.default_rng(seed)),
        mechanism=mechanism or Gaussian(noise),
        clip_norm=clip_norm,
        steps=steps,
        stream=stream or SeededEntropy(0).stream("test"),
        **groups,
    )
    return before, done


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


def difference(left: Gradients, right: Gradients) -> float:
    return norm(less(left, right))


def full(**settings: Any) -> TrainingConfig:
    """Settings that draw every unit in every step, for up to 100 units."""
    return TrainingConfig(batch_size=100, **settings)


# The step.


@pytest.mark.parametrize("clip", [CLIP, 0.8, 1e3])
def test_a_step_is_the_formula(clip: float) -> None:
    target, items = objective(), toys.examples(1, 7)
    before, done = trained(target, items, full(**SGD), clip_norm=clip)
    total = clipped_by_hand(target, before, [[item] for item in items], clip)
    for name in before:
        expected = before.tensor(name) - LR * total[name] / 7
        torch.testing.assert_close(done.after.tensor(name), expected, rtol=0, atol=1e-6)
    assert math.isnan(done.loss)


def test_without_clipping_or_noise_it_is_plain_training() -> None:
    """Three steps of AdamW on full batches."""
    target, items = objective(), toys.examples(1, 7)
    _, done = trained(target, items, full(), steps=3, clip_norm=1e9)
    model = toys.model()
    optimizer, batch = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0), default_collate(items)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["labels"]).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(done.after.tensor(name), parameter.detach(), rtol=0, atol=1e-4)


def test_the_divisor_is_the_expected_size_whoever_is_drawn() -> None:
    """Ten examples at rate 0.4 give the divisor 4, for a batch of all ten and for a batch of one."""
    target, items = objective(), toys.examples(1, 10)
    for present in (range(10), [3]):
        before, done = trained(target, items, TrainingConfig(batch_size=4, **SGD), stream=Landing(present))
        total = clipped_by_hand(target, before, [[items[i]] for i in present], CLIP)
        for name in before:
            expected = before.tensor(name) - LR * total[name] / 4
            torch.testing.assert_close(done.after.tensor(name), expected, rtol=0, atol=1e-6)


def test_fedprox_pulls_back_after_the_noise_and_is_not_clipped() -> None:
    target, items = objective(), toys.examples(1, 7)
    mu = 5.0
    before, once = trained(target, items, full(**SGD), noise=1.0)
    _, twice = trained(target, items, full(**SGD), noise=1.0, steps=2)
    _, pulled = trained(target, items, full(**SGD, proximal=mu), noise=1.0, steps=2)
    for name in before:
        pull = LR * mu * (once.after.tensor(name) - before.tensor(name))
        torch.testing.assert_close(twice.after.tensor(name) - pull, pulled.after.tensor(name), rtol=0, atol=1e-5)


def test_nothing_else_moves_and_the_model_stays() -> None:
    target, items = objective(), toys.examples(1, 7)
    before = weights(target.model)
    names = ["value.weight", "classifier.bias"]
    done = train_privately(
        target,
        Job(before, names, items, default_collate, full(), LR, np.random.default_rng(0)),
        mechanism=Gaussian(1.0),
        clip_norm=CLIP,
        steps=2,
        stream=SystemEntropy().stream(),
    )
    assert set(done.after) == set(names)
    assert toys.same(weights(target.model), before)


def test_adapters_really_move_in_the_first_step() -> None:
    """A moves too: its gradient is zero at the usual start, but its noise is not."""
    for method in ("fedlora", "ffa_lora", "fra_lora"):
        model = toys.model()
        chosen = build(MethodConfig(name=method, rank=2))
        before = chosen.prepare(model, ["classifier.weight", "classifier.bias"], 0)
        names = [name for name in before if method != "ffa_lora" or "lora_A" not in name]
        done = train_privately(
            Objective(model, classification.loss, CPU),
            Job(before, names, toys.examples(1, 7), default_collate, full(), LR, np.random.default_rng(0)),
            mechanism=Gaussian(1.0),
            clip_norm=CLIP,
            steps=1,
            stream=SystemEntropy().stream(),
        )
        assert set(done.after) == set(names)
        assert not any(torch.equal(done.after.tensor(name), before.tensor(name)) for name in names)


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
    with pytest.raises(ValueError, match="2 groups are named for 3 examples"):
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


@pytest.mark.slow
def test_batches_are_poisson_and_come_from_the_stream_alone(seen: Callable[[float], Seen]) -> None:
    """Over 200 steps of 12 examples at rate 1/4, sizes and pairs are as for independent coins, whatever the seed."""
    found = []
    for seed, steps in ((0, 200), (1, 40)):
        mechanism = seen(0.0)
        stream = SeededEntropy(7).stream("coins")
        settings = TrainingConfig(batch_size=3)
        given = {"steps": steps, "stream": stream, "seed": seed, "collate": unnamed, "lr": 1e-9, "mechanism": mechanism}
        trained(objective(), named(12), settings, **given)
        found.append(mechanism.steps)
    calls = found[0]
    assert len(calls) == 200, "empty batches too"
    assert calls[:40] == found[1]
    sizes = np.bincount([len(call) for call in calls], minlength=13)
    expected = 200 * stats.binom.pmf(np.arange(13), 12, 0.25)
    few = slice(0, 7)
    assert stats.chisquare([*sizes[few], sizes[7:].sum()], [*expected[few], expected[7:].sum()]).pvalue > 1e-3
    together = sum(0 in call and 1 in call for call in calls)
    assert abs(together - 12.5) < 4 * math.sqrt(12.5)


def test_an_empty_first_batch_steps_with_noise_alone() -> None:
    target, items = objective(), toys.examples(1, 10)

    class Nobody(Landing):
        def normal(self, shape: tuple[int, ...]) -> Any:
            return np.ones(shape)

    settings = TrainingConfig(batch_size=4, **SGD)
    before, done = trained(target, items, settings, noise=2.0, stream=Nobody())
    for name in before:
        moved = before.tensor(name) - done.after.tensor(name)
        torch.testing.assert_close(moved, torch.full_like(moved, LR * 2.0 * CLIP / 4), rtol=1e-4, atol=1e-6)
    _, by_adam = trained(target, items, TrainingConfig(batch_size=4), noise=2.0, stream=Nobody(), steps=3)
    assert by_adam.after.is_finite()


def test_a_client_with_one_example_and_one_with_none() -> None:
    target = objective()
    before, one = trained(target, toys.examples(1, 1), TrainingConfig(batch_size=4, **SGD), noise=1.0, steps=2)
    assert one.after.is_finite()
    assert not toys.same(one.after, before)
    _, none = trained(target, [], TrainingConfig(), noise=1.0, steps=0)
    assert toys.same(none.after, before)
    assert math.isnan(none.loss)


# The noise.


def nothing(model: nn.Module, batch: Any) -> Tensor:
    """A loss whose gradient is zero, so that a step is its noise."""
    return classification.loss(model, batch) * 0.0


def noise_of_steps(mechanism: Mechanism, stream: Stream) -> np.ndarray[Any, Any]:
    """The coordinates of one step over their expected deviation: noise multiplier 1.5, clip norm 0.3, batch size 6."""
    target = objective(nothing)
    settings = TrainingConfig(batch_size=6, **SGD)
    before, done = trained(target, toys.examples(1, 10), settings, mechanism=mechanism, stream=stream, lr=1.0)
    moved = torch.cat([(done.after.tensor(name) - before.tensor(name)).flatten() for name in before])
    return moved.numpy() * 6 / (1.5 * CLIP)


@pytest.mark.slow
def test_the_noise_has_its_law_and_no_other_scale() -> None:
    def noise(multiplier: float, calls: int) -> np.ndarray[Any, Any]:
        streams = [SeededEntropy(i).stream("noise") for i in range(calls)]
        return np.concatenate([noise_of_steps(Gaussian(multiplier), stream) for stream in streams])

    def p(found: np.ndarray[Any, Any]) -> float:
        return float(stats.kstest(found, "norm").pvalue)

    found = noise(1.5, 10)
    assert p(found) > 1e-2
    assert p(found * 3 / 2) < 1e-12
    assert p(found * 2 / 3) < 1e-12
    assert p(noise(0.15, 2)) < 1e-12


def test_noise_is_new_in_every_step_and_call() -> None:
    one, other = (noise_of_steps(Gaussian(1.5), SystemEntropy().stream("same label")) for _ in range(2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 6 / math.sqrt(len(one))
    target = objective(nothing)
    stream = SeededEntropy(0).stream("x")
    settings = full(**SGD)
    steps = [trained(target, toys.examples(1, 4), settings, noise=1.0, stream=stream)[1].after for _ in range(2)]
    assert not toys.same(*steps)


# Sensitivity, by brute force.


def worst(over: Callable[[Sequence[Any]], Gradients], units: Sequence[Any]) -> float:
    """How far the sum moves at most when one unit leaves."""
    whole = over(units)
    return max(difference(whole, over([*units[:i], *units[i + 1 :]])) for i in range(len(units)))


@pytest.mark.parametrize("clip", [1e-3, 0.3, 1.0])
def test_no_example_moves_the_sum_by_more_than_the_clip_norm(clip: float) -> None:
    units = [[item] for item in toys.examples(1, 9)]
    found = worst(clipped(objective(), clip=clip), units)
    assert 0.999 * clip < found <= clip


def test_an_example_below_the_clip_norm_is_not_scaled() -> None:
    target, item = objective(), toys.examples(1, 1)[0]
    alone = clipped(target, clip=1e3)([[item]])
    assert difference(alone, gradient(target, weights(target.model), item)) < 1e-5


def test_no_group_moves_the_sum_by_more_than_the_clip_norm() -> None:
    """Groups of 40 examples, of a single example, of the same example 20 times, and of 7."""
    items = toys.examples(1, 50)
    groups = [items[:40], items[40:41], [items[42]] * 20, items[43:50]]
    for most in (None, 3):
        found = worst(clipped(objective(), most), groups)
        assert 0.999 * CLIP < found <= CLIP


def test_adding_to_a_group_moves_the_sum_by_at_most_twice_the_clip_norm() -> None:
    items, over = toys.examples(1, 50), clipped(objective())
    assert difference(over([items[:2], items[2:5]]), over([items[:2], items[2:50]])) <= 2 * CLIP


def skipped(factors: Tensor, name: str) -> Tensor:
    return torch.ones_like(factors) if name == "value.weight" else factors


def test_the_brute_force_sees_clipping_that_skips_a_tensor() -> None:
    """It also sees clipping tensor by tensor, which bounds each tensor by C but not the whole gradient."""
    units = [[item] for item in toys.examples(1, 9)]
    target = objective()
    placed = Placed.of(weights(target.model), list(weights(target.model)), CPU)
    each = partial(together, target, default_collate, placed)

    def one_skipped(units: Sequence[Any]) -> Gradients:
        found = each([item for unit in units for item in unit])
        rest = {name: part for name, part in found.items() if name != "value.weight"}
        norms = torch.stack([part.flatten(1).norm(dim=1) for part in rest.values()]).norm(dim=0)
        return {n: torch.tensordot(skipped((CLIP / norms).clamp(max=1), n), part, 1) for n, part in found.items()}

    def by_tensor(units: Sequence[Any]) -> Gradients:
        found = each([item for unit in units for item in unit])
        return {n: torch.tensordot((CLIP / p.flatten(1).norm(dim=1)).clamp(max=1), p, 1) for n, p in found.items()}

    assert worst(one_skipped, units) > 1.01 * CLIP
    assert worst(by_tensor, units) > 1.01 * CLIP


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_an_example_without_a_finite_gradient_counts_as_zero(bad: float) -> None:
    items = toys.examples(1, 5)
    broken = [*items, {"x": torch.full((6,), bad), "labels": 0}]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return classification.loss(model, batch) * (1 + batch["x"].square().sum(1))

    over = clipped(objective(loss))
    assert difference(over([[item] for item in items]), over([[item] for item in broken])) == 0


def test_a_finite_gradient_whose_square_overflows_is_clipped() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return classification.loss(model, batch) * 1e25

    total = clipped(objective(loss))([toys.examples(1, 1)])
    assert 0.999 * CLIP < norm(total) <= CLIP


# Groups and microbatches.


@pytest.mark.parametrize("clip", [CLIP, 1e3])
def test_the_gradient_of_a_group_is_the_mean_of_its_examples(clip: float) -> None:
    target, items = objective(), toys.examples(1, 9)
    groups = ["a", "b", "a", "c", "c", "c", "d", "a", "b"]
    before, done = trained(target, items, full(**SGD), groups=groups, clip_norm=clip)
    units = [[items[i] for i in members] for members in members_of(9, groups)]
    total = clipped_by_hand(target, before, units, clip)
    for name in before:
        expected = before.tensor(name) - LR * total[name] / 4
        torch.testing.assert_close(done.after.tensor(name), expected, rtol=0, atol=1e-6)


def test_groups_of_one_are_examples() -> None:
    target, items = objective(), toys.examples(1, 9)
    settings = TrainingConfig(batch_size=4, **SGD)
    done = [
        trained(target, items, settings, noise=1.0, steps=3, groups=groups)[1] for groups in (None, list("abcdefghi"))
    ]
    assert toys.same(done[0].after, done[1].after)


def test_of_a_group_at_most_so_many_examples_count_and_all_get_their_turn(seen: Callable[[float], Seen]) -> None:
    mechanism = seen(0.0)
    groups = [0] * 6 + [1] * 3 + [2]
    given = {"steps": 60, "collate": unnamed, "groups": groups, "group_examples": 2, "lr": 1e-9}
    trained(objective(), named(10), full(), mechanism=mechanism, **given)
    drawn = [
        [sum(name in range(*span) for name in call) for span in ((0, 6), (6, 9), (9, 10))] for call in mechanism.steps
    ]
    assert drawn == [[2, 2, 1]] * 60
    assert {name for call in mechanism.steps for name in call} == set(range(10))


@pytest.mark.parametrize("groups", [None, [0, 0, 0, 0, 0, 1, 2, 2, 3]])
def test_microbatches_change_nothing_but_memory(groups: list[int] | None, seen: Callable[[float], Seen]) -> None:
    done, largest = [], []
    for most in (None, 1, 2, 4):
        mechanism = seen(1.0)
        settings = TrainingConfig(batch_size=3, microbatch=most, **SGD)
        given = {"steps": 3, "groups": groups, "collate": unnamed, "mechanism": mechanism}
        done.append(trained(objective(), named(9), settings, **given)[1].after)
        largest.append(max(mechanism.largest))
    assert all((after - done[0]).norm() < 1e-5 * done[0].norm() for after in done[1:])
    assert largest[1:] == [1, 1, 4], "a pass of two is not worth its comparison"


def test_examples_train_alike_where_no_two_share_a_pass(seen: Callable[[float], Seen]) -> None:
    done, largest = [], []
    for why_not in ("", "as the test has it"):
        mechanism, target = seen(1.0), objective()
        job = Job(weights(target.model), list(weights(target.model)), [], None, full(), LR, np.random.default_rng(0))
        private = PrivateSteps(mechanism, CLIP, 3, SystemEntropy().stream())
        ways = Ways({replace(job, private=private).kind: Trial(why_not)})
        given = {"steps": 3, "collate": unnamed, "mechanism": mechanism, "ways": ways}
        done.append(trained(target, named(9), TrainingConfig(batch_size=4, **SGD), **given)[1].after)
        largest.append(max(mechanism.largest))
    assert (done[1] - done[0]).norm() < 1e-5 * done[0].norm()
    assert (largest[0] > 1, largest[1]) == (True, 1)


# Randomness.


def test_dropout_comes_from_the_generator_and_the_global_one_is_left_alone() -> None:
    items = toys.examples(1, 8)
    state = torch.get_rng_state()
    one, same, other = (
        trained(objective(dropout=0.4), items, full(), steps=2, seed=seed)[1].after for seed in (1, 1, 2)
    )
    assert toys.same(one, same)
    assert not toys.same(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_dropout_the_seed_decides_nothing() -> None:
    items = toys.examples(1, 8)
    settings = TrainingConfig(batch_size=3)
    done = [trained(objective(), items, settings, noise=1.0, steps=3, seed=seed)[1].after for seed in (1, 2)]
    assert toys.same(*done)


@pytest.mark.gpu
def test_a_gpu_trains_as_the_cpu_does() -> None:
    done = []
    for device in (CPU, torch.device("cuda")):
        model = toys.model()
        before = weights(model)
        done.append(
            train_privately(
                Objective(model.to(device), classification.loss, device),
                Job(
                    *(before, list(before), toys.examples(1, 9), default_collate),
                    *(TrainingConfig(batch_size=4, **SGD), LR, np.random.default_rng(0)),
                ),
                mechanism=Gaussian(1.0),
                clip_norm=CLIP,
                steps=3,
                stream=SeededEntropy(0).stream("test"),
                groups=[0, 0, 0, 1, 1, 2, 3, 4, 5],
            ).after
        )
    assert (done[0] - done[1]).norm() < 1e-4 * done[0].norm()
