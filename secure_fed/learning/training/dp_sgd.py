"""DP-SGD inside a client (Abadi et al. 2016, arXiv 1607.00133): one step is one noised sum of clipped gradients.

    w <- optimiser(w, (1 / (q n)) (sum_{u in S} clip_C(g_u) + N(0, (z C)^2)) + mu (w - w_before))

Every unit u of the n is in S by a secret coin of its own, with q = min(1, batch_size / n). A unit is an example, or with groups
all examples of one person; g_u is the mean of the gradients of its examples. clip_C scales to an L2 norm of at most C over all
trained tensors together; a gradient that is not finite counts as zero. The FedProx term is a function of what has been noised,
and is added after.

Guarantee: the sum moves by at most C if one unit is added or removed (`ClippedSum`), in float32 and bfloat16 alike, since the
gradient of an example is the same to the bit whoever is drawn with it (`packs`). So a step is a Poisson-sampled Gaussian
mechanism of noise multiplier z (`batch_sampler(...).release(z)`), and the steps of a call compose. Public are n, the settings
and the number of steps. An empty S is released like any other. No loss is told: it would be a release without noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privacy.entropy import Stream
from privacy.mechanisms import Mechanism
from privacy.sampling import Poisson
from secure_fed.config import TrainingConfig
from secure_fed.errors import ModelError
from secure_fed.learning.data.dealing import places_of
from secure_fed.learning.data.pointing import Plain, Pointing
from secure_fed.learning.training.canary_directions import pointing
from secure_fed.learning.training.gradient_trial import length
from secure_fed.learning.training.local import Job, Objective, Placed, Trained, seeded
from secure_fed.learning.training.packs import Packs
from secure_fed.learning.training.per_example import Gradients

Unit = list[Any]  # the examples that count of one unit


def batch_sampler(units: int, settings: TrainingConfig) -> Poisson:
    """The sampler of a step: each unit is drawn with probability min(1, batch_size / units)."""
    return Poisson(units, min(1.0, settings.batch_size / max(1, units)))


def members_of(count: int, groups: Sequence[Hashable] | None) -> list[list[int]]:
    """The indices of each unit's examples: one an example, or all of one group, in order of their first examples."""
    if groups is None:
        return [[i] for i in range(count)]
    if len(groups) != count:
        raise ValueError(f"{len(groups)} groups are named for {count} examples; name one for each")
    return list(places_of(groups).values())


def train_privately(
    objective: Objective,
    job: Job,
    *,
    mechanism: Mechanism,
    clip_norm: float,
    steps: int,
    stream: Stream,
    groups: Sequence[Hashable] | None = None,
    group_examples: int | None = None,
    phantoms: Sequence[Any] = (),
) -> Trained:
    """Take `steps` private steps of the job, moving its trainable tensors and nothing else. Each step is one release.

    stream: the secret coins and the noise, in turn; a new one for each call. job.rng: dropout, and which examples of a group
    count; it must be as secret as the coins, since what it draws for one unit depends on how many units came before.
    groups: whose each example is. group_examples: the most examples of one group that count in a step, drawn anew whenever
    the group is; it bounds the work, while clipping bounds what a group moves. job.settings.microbatch: how many examples of
    one kind are worked on at a time; it changes nothing beyond rounding. A client without examples releases nothing.

    An example of a direction (`pointing.Pointing`, in an audit) has a gradient along it that is longer than `clip_norm`, and is
    drawn and clipped like every other. phantoms: such examples beside the units, which are nobody's data: each is drawn by a
    secret coin of the same rate, clipped as the units are and added to their sum. Neither the rate nor the divisor depends on
    phantoms, and phantoms depend on no unit.
    """
    members = members_of(len(job.examples), groups)
    sampler = batch_sampler(len(members), job.settings)
    beside = Poisson(len(phantoms), sampler.rate)
    placed = job.placed(objective.device)
    clipped = _clipped_sum(objective, job, placed, mechanism, clip_norm, try_out=bool(members))
    optimizer = job.optimizer(placed)
    objective.begin()
    with seeded(objective.device, job.rng):
        for _ in range(steps if members else 0):
            drawn = [_counted(members[unit], group_examples, job.rng) for unit in sampler.draw(stream.uniform)]
            total = clipped.over([[job.examples[i] for i in unit] for unit in drawn], placed)
            if nobody := [[phantoms[i]] for i in beside.draw(stream.uniform)]:
                pulled = clipped.over(nobody, placed)
                total = {name: part + pulled[name] for name, part in total.items()}
            noised = mechanism.noised(total, clip_norm, stream)
            _set_gradients(placed, noised, sampler.expected, job.settings.proximal)
            optimizer.step()
    return placed.trained(math.nan)


def _clipped_sum(
    objective: Objective, job: Job, placed: Placed, mechanism: Mechanism, clip_norm: float, *, try_out: bool
) -> ClippedSum:
    """The clipped sum over a job's examples, by gradients that have been tried out on some of them."""
    examples = Plain(job.examples)
    packs = Packs.of(objective, job.collate, job.settings, examples)
    if try_out:
        packs.try_out(placed, [examples])

    def kind(item: Any) -> Hashable:
        """The kind of an example; those of a direction are no model's business, and are of none."""
        return None if isinstance(item, Pointing) else packs.kinds(item)

    return ClippedSum(pointing(packs, 2 * clip_norm), mechanism, clip_norm, packs.most, kind)


def _set_gradients(placed: Placed, noised: Mapping[str, Tensor], expected: float, mu: float) -> None:
    """The gradients that the optimiser sees: the noised sum over the expected number of units, and FedProx's pull."""
    for name, tensor in placed.moving.items():
        pull = mu * (tensor.detach() - placed.start[name])
        tensor.grad = (noised[name] / expected).to(tensor) + pull


@dataclass(frozen=True)
class ClippedSum:
    """sum_u clip_C(g_u) over units, of which at most `microbatch` examples are worked on at a time.

    kind: which examples are best given to `gradients` together.

    Guarantee: the sum moves by at most C in the L2 norm, over all tensors together, when a unit is added or removed. It needs
    `gradients` that give each example the same numbers whoever comes with it (`packs.Packs`): then the others' shares stay,
    up to rounding in float64, and the clipped share of a unit is shorter than C by more than that (`mechanisms.clip_factor`).
    """

    gradients: Callable[[Placed, Sequence[Any]], Gradients]
    mechanism: Mechanism
    clip_norm: float
    microbatch: int | None
    kind: Callable[[Any], Hashable] = lambda item: None

    def over(self, units: Sequence[Unit], placed: Placed) -> Gradients:
        """The sum, float64 on the CPU."""
        total = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in placed.moving.items()}
        units = sorted(units, key=lambda unit: max(map(length, unit)))
        begun: dict[int, Gradients] = {}
        left = [len(unit) for unit in units]
        for pack in _packs(units, self.kind, self.microbatch):
            found = self._each(placed, [item for _, item in pack])
            single = [row for row, (number, _) in enumerate(pack) if len(units[number]) == 1]
            if single:
                self._add(
                    total, {name: each if len(single) == len(pack) else each[single] for name, each in found.items()}
                )
            for row, (number, _) in enumerate(pack):
                if len(units[number]) > 1:
                    own, before = _wide({name: each[row] for name, each in found.items()}), begun.get(number)
                    begun[number] = own if before is None else {name: before[name] + part for name, part in own.items()}
                    left[number] -= 1
                    if not left[number]:
                        size = len(units[number])
                        self._add(total, {name: part[None] / size for name, part in begun.pop(number).items()})
        return total

    def _add(self, total: Gradients, means: Gradients) -> None:
        """Add units' gradients, {name: (units, *shape)}, each clipped; in float64, so that no rounding lengthens a share."""
        wide = _wide(means)
        factors = self._factors(wide)
        for name, mean in wide.items():
            column = factors.view(-1, *[1] * (mean.ndim - 1))  # (units, 1, ..., 1)
            kept = mean.masked_fill(column == 0, 0)  # an infinity times zero is no zero
            total[name] += torch.tensordot(factors, kept, 1).cpu()

    def _factors(self, means: Gradients) -> Tensor:
        """(units,) what to scale each by; its norm is taken over all tensors together."""
        flat = [mean.flatten(1) for mean in means.values()]
        norms = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part, dim=1) for part in flat]), dim=0)
        factors = [self.mechanism.scale(partial(float, norm), self.clip_norm) for norm in norms.tolist()]
        return torch.tensor(factors, dtype=torch.float64, device=norms.device)

    def _each(self, placed: Placed, items: Sequence[Any]) -> Gradients:
        """{name: (B, *shape)}, and nothing of another length: what is not an example's own cannot be clipped as its own."""
        found = self.gradients(placed, items)
        for name, tensor in placed.moving.items():
            if found[name].shape != (len(items), *tensor.shape):
                raise ModelError(
                    f"the per-example gradients of {name} have shape {tuple(found[name].shape)} for {len(items)} examples "
                    f"of shape {tuple(tensor.shape)}; keep this tensor frozen"
                )
        return found


def _packs(units: Sequence[Unit], kind: Callable[[Any], Hashable], most: int | None) -> Iterator[list[tuple[int, Any]]]:
    """All examples, with the number of their unit, in lists of at most `most` of one kind.

    A list is given as soon as it is full, so that few units are begun and not finished.
    """
    waiting: dict[Hashable, list[tuple[int, Any]]] = {}
    for number, unit in enumerate(units):
        for item in unit:
            its = kind(item)
            waiting.setdefault(its, []).append((number, item))
            if len(waiting[its]) == most:
                yield waiting.pop(its)
    yield from waiting.values()


def _wide(found: Gradients) -> Gradients:
    """In float64, on the CPU where the device knows none."""
    return {
        name: part.detach().to(device="cpu" if part.device.type == "mps" else part.device, dtype=torch.float64)
        for name, part in found.items()
    }


def _counted(members: list[int], most: int | None, rng: np.random.Generator) -> list[int]:
    if most is None or len(members) <= most:
        return members
    return sorted(rng.choice(members, most, replace=False).tolist())
