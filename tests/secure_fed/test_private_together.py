"""DP-SGD of many clients in common passes: how far one unit moves each client's sum, and a naive oracle."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from privacy.entropy import SeededEntropy, Stream
from privacy.mechanisms import Gaussian
from secure_fed.config import TrainingConfig
from secure_fed.learning.data.audit_unit import Pointing
from secure_fed.learning.training.canary_directions import direction, layout_of
from secure_fed.learning.training.common_passes.packing import Room
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import Job, PrivateSteps, Trained, batch_sampler, members_of
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import toys
from tests.secure_fed.example_gradients import losses_at
from tests.secure_fed.privately import Landing, Noted, less, norm
from tests.secure_fed.test_cohort import Setting, adapted, require_equal, toy
from tests.secure_fed.test_cohort_public import texts, wide

CLIP = 0.05
SIZES = (9, 4, 6)
GROUPS = ([0, 1, 1, 2, 2, 2, 3, 0, 4], [0, 0, 1, 2], [0, 1, 2, 3, 0, 0])
SETTINGS = TrainingConfig(batch_size=2, lr=0.05, optimizer="sgd", microbatch=4)


@dataclass
class Clients:
    """Three clients of a model. For the `wide` one, whose sums depend on their order, texts have 2 to 40 words."""

    setting: Setting
    grouped: bool = False
    ways: Ways = field(default_factory=Ways)

    def units(self, client: int) -> int:
        return len(set(GROUPS[client])) if self.grouped else SIZES[client]

    def jobs(self, settings: TrainingConfig = SETTINGS) -> list[Job]:
        jobs = self.setting.jobs(SIZES, settings=settings)
        if self.setting.objective.model.config.max_position_embeddings < 40:  # type: ignore[union-attr]
            return jobs
        return [replace(job, examples=texts(row, SIZES[row])) for row, job in enumerate(jobs)]

    def sums(self, present: dict[int, Sequence[int]]) -> dict[int, dict[str, Tensor]]:
        """Client -> its sum of clipped gradients, before noise, of one step that draws the units in `present`."""
        jobs, noted = self.jobs(), [Noted(1.0) for _ in SIZES]
        private = [
            replace(jobs[row], private=PrivateSteps(noted[row], CLIP, 1, Landing(drawn), self.groups(row)))
            for row, drawn in present.items()
        ]
        train_together(self.setting.objective, private, self.ways)
        return {row: noted[row].sums[0] for row in present}

    def groups(self, row: int) -> list[int] | None:
        return GROUPS[row] if self.grouped else None


@pytest.fixture(scope="module")
def alone() -> Clients:
    """Clients whose units are single examples."""
    return Clients(wide())


@pytest.fixture(params=[False, True], ids=["examples", "groups"])
def clients(request: pytest.FixtureRequest, alone: Clients) -> Clients:
    return replace(alone, grouped=request.param)


@pytest.fixture(scope="module")
def small() -> Clients:
    return Clients(adapted("bert"))


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


# Sensitivity, by brute force.


def worst(clients: Clients, victim: int, others: dict[int, Sequence[int]]) -> tuple[float, bool]:
    """How far the victim's sum moves at most when one of its units leaves; whether other clients' sums keep every bit."""
    everybody = range(clients.units(victim))
    whole = clients.sums({**others, victim: everybody})
    moved, stay = 0.0, True
    for left in everybody:
        fewer = clients.sums({**others, victim: [unit for unit in everybody if unit != left]})
        moved = max(moved, norm(less(whole[victim], fewer[victim])))
        stay = stay and all(same(whole[other], fewer[other]) for other in others)
    return moved, stay


def test_a_unit_moves_its_own_clients_sum_by_at_most_the_clip_norm_and_no_other(clients: Clients) -> None:
    moved, stay = worst(clients, 1, {0: [0, 3, 4], 2: [0, 2]})
    assert 0.999 * CLIP < moved <= CLIP
    assert stay


def test_whoever_shares_the_passes_a_sum_is_the_clients_own_to_the_bit(clients: Clients) -> None:
    """Also on another number of threads."""
    drawn: dict[int, Sequence[int]] = {0: [0, 3, 4], 1: [], 2: range(clients.units(2))}
    everybody = clients.sums(drawn)
    try:
        for company, threads in (([0], 1), ([1], 1), ([2], 1), ([0, 1], 1), ([2, 0], 3)):
            torch.set_num_threads(threads)
            found = clients.sums({row: drawn[row] for row in company})
            assert all(same(found[row], everybody[row]) for row in company)
    finally:
        torch.set_num_threads(1)
    assert norm(everybody[1]) == 0


def test_on_an_accelerator_too_pass_sizes_do_not_depend_on_who_trains(
    alone: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, of = [], Room.of

    def elsewhere(device: torch.device, model: nn.Module, numbers: int, **settings: Any) -> Room:
        rooms.append(of(torch.device("cuda"), model, numbers, **settings))
        return rooms[-1]

    monkeypatch.setattr(Room, "of", elsewhere)
    everybody, single = alone.sums({0: [0, 3], 1: [1], 2: [2, 4]}), alone.sums({2: [2, 4]})
    assert same(everybody[2], single[2])
    assert [(room.filled, room.rows) for room in rooms] == [(True, 7)] * 2


def private(job: Job, row: int, stream: Stream | None = None, groups: Sequence[int] | None = None, **own: Any) -> Job:
    """The job with 2 to 4 noised steps, its own stream, a dummy, and a direction in place of its last text."""
    marked = [*job.examples[:-1], Pointing(job.examples[-1], f"canary {row}", 1)]
    steps = PrivateSteps(
        Gaussian(0.5), CLIP, 2 + row, stream or SeededEntropy(row).stream("private"), groups, 2, [_dummy(row)]
    )
    return replace(job, examples=marked, private=replace(steps, **own))


def _dummy(row: int) -> Pointing:
    return Pointing({"input_ids": [1], "labels": 0}, f"dummy {row}", 2)


def oracle(setting: Setting, job: Job) -> Tensors:
    """The tensors after training by the formula of `cohort.sums`, one example at a time."""
    steps = job.private
    assert steps is not None
    moving = {name: job.before.tensor(name).clone().requires_grad_() for name in job.trainable}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(moving.values(), job.lr, momentum=job.settings.momentum)
    if job.settings.optimizer == "adamw":
        optimizer = torch.optim.AdamW(moving.values(), job.lr, weight_decay=job.settings.weight_decay)
    layout = layout_of(job.before, job.trainable)

    def gradient(item: Any) -> dict[str, Tensor]:
        if isinstance(item, Pointing):
            along = direction(item.unit, item.seed, layout)
            return {name: -2 * CLIP * along.tensor(name).double() for name in moving}
        loss = losses_at(setting.objective, moving, job.collate([item])).sum()
        return {
            name: part.double()
            for name, part in zip(moving, torch.autograd.grad(loss, list(moving.values())), strict=True)
        }

    units = [[job.examples[i] for i in members] for members in members_of(len(job.examples), steps.persons)]
    sampler = batch_sampler(len(units), job.settings)
    for _ in range(steps.count):
        coins = steps.stream.uniform(len(units))
        drawn = [unit for unit, coin in zip(units, coins, strict=True) if coin < sampler.rate]
        if len(steps.dummies) and steps.stream.uniform(1)[0] < sampler.rate:
            drawn.append([steps.dummies[0]])
        total = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in moving.items()}
        for unit in drawn:
            each = [gradient(item) for item in unit]
            mean = {name: sum(one[name] for one in each) / len(each) for name in moving}
            share = min(1.0, CLIP / norm(mean))
            total = {name: part + share * mean[name] for name, part in total.items()}
        noise = {
            name: 0.5 * CLIP * torch.from_numpy(steps.stream.normal(tuple(total[name].shape))) for name in sorted(total)
        }
        for name, tensor in moving.items():
            pull = job.settings.proximal * (tensor.detach() - job.before.tensor(name))
            tensor.grad = ((total[name] + noise[name]) / sampler.expected).float() + pull
        optimizer.step()
    return Tensors((name, tensor.detach()) for name, tensor in moving.items())


OPTIMIZERS = {
    "fedprox": replace(SETTINGS, proximal=0.5, momentum=0.9),
    "adamw": replace(SETTINGS, optimizer="adamw", weight_decay=0.1),
}


@pytest.mark.parametrize(
    ("optimizer", "grouped"),
    chosen(itertools.product(OPTIMIZERS, [False, True]), [("fedprox", True), ("adamw", False)]),
)
def test_together_each_is_what_the_formula_says(small: Clients, optimizer: str, grouped: bool) -> None:
    """Clients train 2, 3 and 4 steps, with directions among the texts, dummies, and empty draws."""
    small, settings = replace(small, grouped=grouped), OPTIMIZERS[optimizer]
    jobs = small.jobs(settings)
    asked, again = (
        [private(jobs[row], row, groups=small.groups(row), person_examples=None) for row in range(3)] for _ in range(2)
    )
    found = train_together(small.setting.objective, asked, small.ways)
    expected = [Trained(oracle(small.setting, job), math.nan) for job in again]
    require_equal(found, expected, 2e-4 if settings.optimizer == "adamw" else 1e-5)
    assert all((one.after - job.before.select(one.after)).norm() > 1e-2 for one, job in zip(found, jobs, strict=True))
    assert small.ways.why_not == ""


def test_clients_without_examples_and_without_steps_release_nothing(small: Clients) -> None:
    class Untouched(Stream):
        def words(self, count: int) -> Any:
            raise AssertionError("something was drawn")

    jobs = small.jobs()
    spent = private(jobs[0], 0, Untouched(bytes(32)), count=0)
    empty = replace(private(jobs[1], 1, Untouched(bytes(32))), examples=[])
    spent_, found, empty_ = train_together(small.setting.objective, [spent, private(jobs[2], 2), empty], small.ways)
    for one, job in ((spent_, spent), (empty_, empty)):
        assert toys.same(one.after, job.before.select(job.trainable))
    (alone,) = train_together(small.setting.objective, [private(small.jobs()[2], 2)], small.ways)
    assert toys.same(found.after, alone.after)


def test_dropout_follows_the_clients_secret_seeds() -> None:
    """Equal secret seeds give equal dropout masks, other seeds others; the process's generator is neither read nor moved."""
    setting = toy(dropout=0.5)
    ways = Ways()

    def trained(seed: int) -> list[bytes]:
        jobs = [replace(job, rng=np.random.default_rng([seed, row])) for row, job in enumerate(setting.jobs((4, 4)))]
        jobs = [replace(job, private=PrivateSteps(Gaussian(0.0), 1e3, 2, Landing(range(4)))) for job in jobs]
        return [one.after.to_bytes() for one in train_together(setting.objective, jobs, ways)]

    state = torch.get_rng_state()
    assert trained(0) == trained(0) != trained(1)
    assert torch.equal(torch.get_rng_state(), state)
