"""Local training of one client: its start, its steps, and its result.

A `Job` holds what one training depends on, and `train` carries it out. The steps follow a schedule of learning rates, which
falls over the rounds of a run and, with many steps, within a round. `PrivateSteps` are the parameters of steps under DP-SGD,
which `common_passes/step_gradients.py` computes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privacy.entropy import Stream
from privacy.mechanisms import Mechanism
from privacy.participation import Poisson
from secure_fed.config import TrainingConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.data.encode import batches
from secure_fed.learning.data.rows import places_of
from secure_fed.learning.tasks.next_tokens import rows_together
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.objective import Objective, to_device
from secure_fed.tensors.tensors import Layout, Tensors


@dataclass(frozen=True)
class Trained:
    """The result of local training: the trained tensors, and the mean loss over the examples seen (NaN if withheld)."""

    after: Tensors
    loss: float


@dataclass(frozen=True)
class Placed:
    """The tensors that local training starts from, on its device: `moving` are the optimised leaves, `held` the rest.

    start: the values of `moving` before the first step.
    """

    start: Mapping[str, Tensor]
    moving: dict[str, Tensor]
    held: dict[str, Tensor]

    @classmethod
    def of(cls, before: Tensors, trainable: Sequence[str], device: torch.device) -> Placed:
        start = {name: before.tensor(name).to(device).contiguous() for name in before}
        moving = {name: start[name].detach().clone().requires_grad_() for name in trainable}
        held = {name: tensor for name, tensor in start.items() if name not in moving}
        return cls({name: start[name] for name in moving}, moving, held)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All of them, for `Objective.holding`."""
        return self.held | self.moving

    @property
    def shapes(self) -> Hashable:
        """Names and shapes of the moving tensors, and of the rest."""
        return tuple(tuple((name, tuple(one.shape)) for name, one in part.items()) for part in (self.moving, self.held))

    def trained(self, loss: float) -> Trained:
        return Trained(Tensors((name, tensor.detach().cpu()) for name, tensor in self.moving.items()), loss)


@dataclass(frozen=True)
class Job:
    """One local training: the tensors it starts from, which of them move, the examples, the optimiser, and the random numbers.

    before: every tensor that replaces one of the model's. trainable: the names of those that are optimised. last: the names of
    the head's last layer, which has another learning rate (`TrainingConfig.head_times`). settings: the optimiser, the batch
    size and the number of steps. lr: the learning rate of the first step. falling: its decay from there; None for a constant
    rate. rng: the source of the order of examples, and of dropout. private: the parameters of private steps, if they are
    private; rng, which also chooses the examples of a person, is then as secret as the coins, since its draw for one unit
    depends on the number of units before. whole: the layout of the trained tensors at all ranks, where this client has
    only the first ones (`rounds.ranks`). round: the finished rounds of the run.
    """

    before: Tensors
    trainable: Sequence[str]
    examples: Sequence[Any]
    collate: Collate
    settings: TrainingConfig
    lr: float
    rng: np.random.Generator
    private: PrivateSteps | None = None
    last: tuple[str, ...] = ()
    falling: Falling | None = None
    whole: Layout | None = None
    round: int = 0

    @property
    def scoring(self) -> list[str]:
        """The names of the head's last layer among those that train."""
        return [name for name in self.trainable if name in self.last]

    @property
    def kind(self) -> Hashable:
        """Equal for jobs that can be stacked: names and shapes of tensors, which of them train, their rates, and privacy."""
        return tuple(self.trainable), Layout.of(self.before).entries, self.private is not None, tuple(self.scoring)

    @property
    def steps(self) -> int:
        """The number of steps; 0 without examples."""
        if self.private is None or not len(self.examples):
            return planned_steps(len(self.examples), self.settings)
        return self.private.count

    def share(self, step: int) -> float:
        """The fraction of the learning rate at a step, counted from 0."""
        return 1.0 if self.falling is None else self.falling.left(step / self.steps)

    def placed(self, device: torch.device) -> Placed:
        """The tensors on the device, ready to be optimised."""
        return Placed.of(self.before, self.trainable, device)

    def batches(self) -> Iterator[list[Any]]:
        """The examples of every step's mini-batch, in the order of the steps, drawn from `rng`.

        They are `epochs` passes over the examples, or exactly `steps` batches from as many passes as needed.
        """
        if not len(self.examples):
            return iter(())
        epochs = itertools.count() if self.settings.steps is not None else range(self.settings.epochs)
        passes = (batches(self.examples, self.settings.batch, list, self.rng) for _ in epochs)
        every = itertools.chain.from_iterable(passes)
        return (batch.inputs for batch in itertools.islice(every, self.settings.steps))


Train = Callable[[Objective, Job], Trained]  # `train`, or a replacement


def train(objective: Objective, job: Job) -> Trained:
    """Minimise the mean loss over the job's examples, moving its trainable tensors and nothing else.

    With FedProx the local objective is F(w) + mu/2 ||w - w_before||^2. `max_grad_norm` bounds the gradient of a step, all
    tensors together. The result depends on the arguments alone: the order of examples and the model's dropout both come from
    `job.rng`.
    """
    placed = job.placed(objective.device)
    optimizer = optimizer_of(placed.moving.values(), job.settings, job.lr)
    last = [placed.moving[name] for name in job.scoring]
    each: list[Tensor] = []
    objective.begin()
    with seeded(objective.device, job.rng), rows_together():
        for step, batch in enumerate(job.batches()):
            optimizer.param_groups[0]["lr"] = job.lr * job.share(step)
            optimizer.zero_grad()
            most = job.settings.microbatch or len(batch)
            for start in range(0, len(batch), most):
                with objective.holding(placed.tensors):
                    loss = losses(objective, job.collate, batch[start : start + most])
                    each.append(loss.detach())
                    (loss.sum() / len(batch)).backward()
            if mu := job.settings.proximal:
                moves = [(tensor - placed.start[name]).square().sum() for name, tensor in placed.moving.items()]
                (mu / 2 * torch.stack(moves).sum()).backward()
            gradients = [tensor.grad for tensor in placed.moving.values() if tensor.grad is not None]
            if (bound := job.settings.max_grad_norm) is not None and gradients:
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                for gradient in gradients:
                    gradient.mul_((bound / norm.clamp_min(bound)).to(gradient))
            stepped(optimizer, last, job.settings.head_times)
    return placed.trained(float(torch.cat(each).mean()) if each else math.nan)


def losses(objective: Objective, collate: Collate, items: Sequence[Any]) -> Tensor:
    """(B,) losses of the items as one batch, at the tensors that `objective` holds; ConfigError for another shape."""
    found = objective.losses(to_device(collate(items), objective.device))
    if found.shape != (len(items),):
        raise ConfigError(
            f"the loss must give one number for each of the {len(items)} examples of a batch, shape ({len(items)},), and gave "
            f"shape {tuple(found.shape)}; a loss of torch's does with reduction='none'"
        )
    return found


@contextmanager
def seeded(device: torch.device, rng: np.random.Generator) -> Iterator[None]:
    """Within the block, dropout depends on `rng` alone; afterwards torch's global generator is restored."""
    seed = int(rng.integers(2**63))
    kind = device.type if device.type in ("cuda", "mps") else None
    with torch.random.fork_rng([device] if kind else [], device_type=kind or "cuda"):
        torch.default_generator.manual_seed(seed)
        if kind == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif kind == "mps":
            torch.mps.manual_seed(seed)
        yield


def optimizer_of(parameters: Iterable[Tensor], settings: TrainingConfig, lr: float) -> torch.optim.Optimizer:
    """A new local optimiser, as named in the settings, with empty state."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(list(parameters), lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(list(parameters), lr, weight_decay=settings.weight_decay)


def stepped(optimizer: torch.optim.Optimizer, parts: Sequence[Tensor], times: float) -> None:
    """Make one optimiser step in place, `times` as long for `parts` of its parameters: as with `times` the learning rate.

    Steps of SGD and AdamW, including weight decay, are proportional to the rate.
    """
    before = [] if times == 1 else [part.detach().clone() for part in parts]
    optimizer.step()
    with torch.no_grad():
        for part, start in zip(parts, before, strict=False):
            part.copy_(start + times * (part - start))


def planned_steps(units: int, settings: TrainingConfig) -> int:
    """The number of a client's steps in one round, if it has `units` examples, or units of them; 0 without any."""
    if not units:
        return 0
    return settings.steps if settings.steps is not None else settings.epochs * math.ceil(units / settings.batch)


_DECAY = 1 / 5  # of the run


def scheduled_lr(settings: TrainingConfig, round_: float, rounds: int) -> float:
    """The local learning rate of round `round_` (from 0) of `rounds`; a fraction is a point within a round."""
    if round_ < settings.lr_warmup:
        return settings.rate * (round_ + 1) / (settings.lr_warmup + 1)
    share = (round_ - settings.lr_warmup) / (rounds - settings.lr_warmup)
    if settings.lr_schedule == "linear":
        return settings.rate * (1 - share)
    if settings.lr_schedule == "stable_decay":
        return settings.rate * min(1.0, (1 - share) / _DECAY)
    if settings.lr_schedule == "cosine":
        return settings.rate * (1 + math.cos(math.pi * share)) / 2
    return settings.rate


@dataclass(frozen=True)
class Falling:
    """The decay of the learning rate within a round.

    A run may have few rounds of many steps. If the rate stayed constant until the last step, single batches would move the
    result. Within a round the rate never rises.
    """

    settings: TrainingConfig
    round: int
    rounds: int

    def left(self, made: float) -> float:
        """The fraction of the round's learning rate after the share `made` of its steps."""
        if self.round < self.settings.lr_warmup:
            return 1.0
        first, now = (scheduled_lr(self.settings, self.round + share, self.rounds) for share in (0, made))
        return min(1.0, now / first)

    def as_long(self, steps: int) -> float:
        """The number of steps at the round's full rate that are as long as all of its steps together."""
        return math.fsum(self.left(step / steps) for step in range(steps))


@dataclass(frozen=True)
class PrivateSteps:
    """The steps of one client's training, each of which is one release.

    count: the number of steps. stream: the source of the client's secret coins and noise; a new one for each training. persons:
    the person of each example. person_examples: the most examples of one person that enter a step, redrawn whenever the person
    is drawn; it bounds the work, while clipping bounds a person's influence. dummies: examples of a direction
    (`audit_unit.Pointing`) beside the units, which are nobody's data: each is drawn by a secret coin of the same rate, clipped
    like the units and added to their sum. Neither the rate nor the divisor depends on dummies, and dummies depend on no unit.
    """

    mechanism: Mechanism
    clip_norm: float
    count: int
    stream: Stream
    persons: Sequence[Hashable] | None = None
    person_examples: int | None = None
    dummies: Sequence[Any] = ()


def batch_sampler(units: int, settings: TrainingConfig) -> Poisson:
    """The sampler of a step: each unit is drawn with probability min(1, batch_size / units)."""
    return Poisson(units, min(1.0, settings.batch / max(1, units)))


def members_of(count: int, persons: Sequence[Hashable] | None) -> list[list[int]]:
    """The indices of each unit's examples: a single example, or all of one person, in the order of first examples."""
    if persons is None:
        return [[i] for i in range(count)]
    if len(persons) != count:
        raise ValueError(f"{len(persons)} persons are named for {count} examples; name one for each")
    return list(places_of(persons).values())
