"""The distribution of canary directions, and that their units are clipped, sampled and noised like all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import default_collate

from privacy.entropy import SeededEntropy
from privacy.mechanisms import Gaussian
from secure_fed.config import TrainingConfig
from secure_fed.learning.audit_pool.canaries import length_beyond_clipping
from secure_fed.learning.data.audit_unit import Plain, Pointing, reading
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.canary_directions import direction, length_of_steps, trains_towards
from secure_fed.learning.training.local import Job
from secure_fed.learning.training.objective import Objective
from secure_fed.rounds.transport import Request
from secure_fed.tensors.tensors import Layout, Tensors
from tests.secure_fed import private_toys, toys
from tests.secure_fed.canary_texts import PAD, changed, text
from tests.secure_fed.privately import Landing, Noted, train_privately

CPU = torch.device("cpu")


LAYOUT = Layout((("a", (30, 40)), ("b", ()), ("c", (7,))))


def test_a_direction_has_unit_norm_and_is_its_units_alone() -> None:
    u = direction("client-3", 0, LAYOUT)
    assert Layout.of(u) == LAYOUT
    assert abs(u.norm() - 1) < 1e-6
    assert toys.same(u, direction("client-3", 0, LAYOUT))
    for other in (direction("client-4", 0, LAYOUT), direction("client-3", 1, LAYOUT)):
        assert abs(float(LAYOUT.flatten(u) @ LAYOUT.flatten(other))) < 5 / math.sqrt(LAYOUT.size)


def test_a_direction_is_uniform_on_the_sphere() -> None:
    """Against the exact law of a coordinate of a uniform point in five dimensions, where a normal law is rejected."""
    layout = Layout((("a", (2, 2)), ("b", (1,))))
    drawn = np.stack([layout.flatten(direction(f"unit {i}", 0, layout)).numpy() for i in range(3000)])
    fixed = np.array([0.5, -0.5, 0.1, 0.7, 0.0])
    for seen in (*drawn.T, drawn @ fixed / np.linalg.norm(fixed)):
        assert stats.kstest((1 + seen) / 2, stats.beta(2, 2).cdf).pvalue > 1e-3
    assert stats.kstest(drawn[:, 0] * math.sqrt(5), "norm").pvalue < 1e-3


def test_a_client_of_a_direction_ends_its_length_along_it() -> None:
    before = Tensors({"w": torch.randn(4, 5), "frozen": torch.ones(3)})
    settings = TrainingConfig(batch_size=2, epochs=3)
    args: Any = (None, Job(before, ["w"], [1, 2, 3], list, settings, 0.1, np.random.default_rng(0)))
    u = direction("anna", 5, Layout((("w", (4, 5)),))).tensor("w")
    for length, expected in ((7.0, 7.0), (None, 0.1 * math.sqrt(20) * 6)):
        done = trains_towards("anna", 5, length)(*args)
        assert list(done.after) == ["w"]
        assert math.isnan(done.loss)
        torch.testing.assert_close(done.after.tensor("w"), before.tensor("w") + expected * u)
    layout = Layout((("w", (4, 5)), ("head", (2,))))
    assert length_of_steps(layout, (), 3, TrainingConfig(steps=4), 0.5) == pytest.approx(2 * math.sqrt(22))
    longer = length_of_steps(layout, ("head",), 3, TrainingConfig(steps=4, head_factor=3.0), 0.5)
    assert longer == pytest.approx(2 * math.sqrt(20 + 2 * 9))


@pytest.mark.parametrize("method", ["fedlora", "ffa_lora", "fra_lora"])
@pytest.mark.parametrize("clip_norm", [1e-3, 0.1, 50.0])
def test_the_contribution_of_a_client_of_a_direction_is_as_long_as_may_be(method: str, clip_norm: float) -> None:
    settings = {**private_toys.NOISE, "privacy.clip_norm": clip_norm, "method.name": method}
    built = private_toys.federation(settings, seed=0)
    far = length_beyond_clipping(built.config)
    client = built.assembly.clients[1]
    client._setup = replace(client._setup, train=trains_towards("ben", 0, far))
    plan = built.assembly.server.plan(built.assembly.initial)
    request: Request = built.assembly.server.request(built.assembly.initial, plan, plan.passes[0], 0.05, {})
    sent = client.handle(request).contribution
    assert sent.norm() == pytest.approx(clip_norm, rel=1e-5)
    if method != "fra_lora":
        layout = Layout.of(built.assembly.initial.tensors.select(plan.trainable))
        cosine = float(layout.flatten(sent) @ layout.flatten(direction("ben", 0, layout))) / sent.norm()
        assert cosine == pytest.approx(1, abs=1e-5)


def test_the_length_follows_the_clip_norm_as_far_as_that_may_grow() -> None:
    fixed = toys.config({**private_toys.NOISE, "privacy.clip_norm": 0.5})
    adapting = toys.config({**private_toys.NOISE, "privacy.clip_quantile": 0.5, "federation.rounds": 30})
    grown = 0.1 * math.exp(0.2 * 30 * 0.5)
    assert length_beyond_clipping(toys.config()) is None
    assert length_beyond_clipping(fixed) == pytest.approx(15)
    assert length_beyond_clipping(adapting) == pytest.approx(30 * grown)


def test_examples_of_a_direction_are_read_as_they_are() -> None:
    items = [text(0), Pointing(text(1), "u", 0)]
    batch = reading(Collate(PAD))(items)
    assert all(torch.equal(batch[name], value) for name, value in Collate(PAD)([text(0), text(1)]).items())
    seen = Plain(items)
    assert len(seen) == 2
    assert not any(changed(a, b) for a, b in zip(seen[:2], [text(0), text(1)], strict=True))


# Directions in the steps of private training.

CLIP, LR = 0.3, 0.1


def weights(target: Objective) -> Tensors:
    return Tensors((name, parameter.detach().clone()) for name, parameter in target.model.named_parameters())


def summed(target: Objective, items: Sequence[Any], groups: Sequence[Sequence[int]], most: int | None) -> Tensors:
    """The sum of clipped gradients at the model's own weights, to which the noise of a step would be added."""
    before, noted = weights(target), Noted(1.0)
    settings = TrainingConfig(batch_size=100, microbatch=most)
    examples = [items[i] for group in groups for i in group]
    train_privately(
        target,
        Job(before, list(before), examples, default_collate, settings, LR, np.random.default_rng(0)),
        mechanism=noted,
        clip_norm=CLIP,
        steps=1,
        stream=Landing(range(len(groups))),
        groups=[number for number, group in enumerate(groups) for _ in group],
    )
    return Tensors(noted.sums[0])


@pytest.mark.parametrize("most", [None, 1, 3])
def test_an_example_of_a_direction_moves_the_clipped_sum_by_the_clip_norm_along_it(most: int | None) -> None:
    target = Objective(toys.model(), classification.loss, CPU)
    items: list[Any] = toys.examples(1, 6)
    u = direction("dora", 2, Layout.of(weights(target)))
    for place in (0, 3, 5):
        marked = [*items[:place], Pointing(items[place], "dora", 2), *items[place + 1 :]]
        rest = [[i] for i in range(6) if i != place]
        moved = summed(target, marked, [[i] for i in range(6)], most) - summed(target, marked, rest, most)
        expected = Tensors((name, tensor.double() * -CLIP) for name, tensor in u.items())
        assert (moved - expected).norm() < 1e-5 * CLIP


def test_a_group_of_a_direction_moves_it_by_no_more() -> None:
    target = Objective(toys.model(), classification.loss, CPU)
    items: list[Any] = [Pointing(item, "ward 7", 2) for item in toys.examples(1, 5)]
    u = direction("ward 7", 2, Layout.of(weights(target)))
    total = summed(target, items, [[0, 1, 2, 3, 4]], 2)
    assert (total - Tensors((name, tensor.double() * -CLIP) for name, tensor in u.items())).norm() < 1e-5 * CLIP


def trained(items: Sequence[Any], noise: float, batch_size: int, seed: int = 0) -> tuple[Tensors, Tensors]:
    """The tensors before and after one private step of gradient descent."""
    target = Objective(toys.model(), classification.loss, CPU)
    before = weights(target)
    done = train_privately(
        target,
        Job(
            *(before, list(before), items, default_collate),
            *(TrainingConfig(batch_size=batch_size, optimizer="sgd"), LR, np.random.default_rng(0)),
        ),
        mechanism=Gaussian(noise),
        clip_norm=CLIP,
        steps=1,
        stream=SeededEntropy(seed).stream("test"),
    )
    return before, done.after


def test_a_step_goes_along_the_direction_with_the_noise_that_others_get() -> None:
    items: list[Any] = toys.examples(1, 6)
    marked = [*items[:5], Pointing(items[5], "dora", 2)]
    before, with_it = trained(marked, noise=0.5, batch_size=6)
    u = direction("dora", 2, Layout.of(before))
    target = Objective(toys.model(), classification.loss, CPU)
    clean = summed(target, items, [[i] for i in range(5)], None)
    noise = _noise(before, seed=0, coins=6)
    for name in before:
        total = clean.tensor(name) - CLIP * u.tensor(name).double() + noise[name]
        torch.testing.assert_close(
            with_it.tensor(name), (before.tensor(name).double() - LR * total / 6).float(), rtol=0, atol=1e-5
        )


def _noise(like: Tensors, seed: int, coins: int) -> dict[str, Any]:
    stream = SeededEntropy(seed).stream("test")
    stream.uniform(coins)
    return {name: 0.5 * CLIP * torch.from_numpy(stream.normal(tuple(like[name].shape))) for name in sorted(like)}


def test_an_example_of_a_direction_is_subject_to_sampling() -> None:
    items: list[Any] = [*toys.examples(1, 7), Pointing(toys.examples(9, 1)[0], "dora", 2)]
    along = []
    for seed in range(12):
        before, after = trained(items, noise=0.0, batch_size=2, seed=seed)
        layout = Layout.of(before)
        moved = layout.flatten(after - before) @ layout.flatten(direction("dora", 2, layout))
        drawn = 7 in np.flatnonzero(SeededEntropy(seed).stream("test").uniform(8) < 0.25)
        along.append((drawn, float(moved) / (LR * CLIP / 2)))
    assert {drawn for drawn, _ in along} == {True, False}
    assert all((share > 0.6) == drawn for drawn, share in along)


def test_a_client_whose_examples_all_have_directions_trains() -> None:
    items = [Pointing(item, f"unit {i}", 0) for i, item in enumerate(toys.examples(1, 4))]
    before, after = trained(items, noise=0.0, batch_size=4)
    assert (after - before).norm() == pytest.approx(LR * CLIP / 2, rel=0.15)  # a mean of four nearly orthogonal ones
