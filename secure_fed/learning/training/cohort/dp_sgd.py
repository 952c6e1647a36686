"""DP-SGD inside clients (Abadi et al. 2016, arXiv 1607.00133): one step is one noised sum of clipped gradients.

    w <- optimiser(w, (1 / (q n)) (sum_{u in S} clip_C(g_u) + N(0, (z C)^2)) + mu (w - w_before))

Each of a client's n units u is in S by an independent secret coin of probability q = min(1, batch_size / n). A unit is an
example, or with groups all examples of one person; g_u is the mean of the gradients of its examples. clip_C scales to an L2
norm of at most C over all trained tensors together; a gradient that is not finite counts as zero. The FedProx term is a
function of noised tensors, and is added after the noise. An example of a direction (`pointing.Pointing`, in an audit) has a
gradient along it that is longer than C, and is drawn and clipped like every other example.

Guarantee: adding or removing one unit of a client changes this client's sum by at most C, whichever other clients share the
passes, and does not change the sums of other clients. This holds in float32 and bfloat16, and needs gradients that are
bit-identical whatever the other examples of a pass (`division.Public`): then other units' contributions stay the same, up
to rounding of the client's own sum in float64, and a unit's clipped contribution is shorter than C by more than this rounding
(`mechanisms.clip_factor`). Dropout masks are drawn in secret, independently for each example of a pass, so with dropout the
other units' contributions keep their distribution. Coins and noise come from each client's own stream: one client's draws do
not depend on another's. So a step is a Poisson-sampled Gaussian mechanism of noise multiplier z
(`batch_sampler(...).release(z)`), and the steps of a training compose. Public are n, the settings and the number of steps. An
empty S is released like any other; a client without examples releases nothing. Losses are withheld: they have no noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privacy.sampling import Poisson
from secure_fed.learning.data.pointing import Pointing
from secure_fed.learning.training.canary_directions import direction, layout_of
from secure_fed.learning.training.cohort.division import Passes
from secure_fed.learning.training.cohort.flat import Flat, add_in_order
from secure_fed.learning.training.cohort.one_pass import Found
from secure_fed.learning.training.local import Job
from secure_fed.learning.training.private_steps import PrivateSteps, batch_sampler, members_of


@dataclass(frozen=True)
class Drawn:
    """A unit that was drawn in a step: its client's row, and its examples that enter the step."""

    owner: int
    items: Sequence[Any]


class Drawing:
    """The draws of one client, from its own secret numbers alone."""

    def __init__(self, row: int, job: Job, steps: PrivateSteps) -> None:
        self._row, self._job, self.steps = row, job, steps
        self._members = members_of(len(job.examples), steps.groups)
        self._sampler = batch_sampler(len(self._members), job.settings)
        self._beside = Poisson(len(steps.phantoms), self._sampler.rate)

    @property
    def expected(self) -> float:
        """The expected number of units in a step."""
        return self._sampler.expected

    def units(self) -> Iterator[Drawn]:
        """The units of the next step, then the phantoms."""
        coins, examples = self.steps.stream.uniform, self._job.examples
        for unit in self._sampler.draw(coins):
            counted = _counted(self._members[unit], self.steps.group_examples, self._job.rng)
            yield Drawn(self._row, [examples[i] for i in counted])
        for phantom in self._beside.draw(coins):
            yield Drawn(self._row, [self.steps.phantoms[phantom]])


class NoisedSums:
    """The private steps of some clients; row s of a sum is the s-th client's."""

    def __init__(self, jobs: Sequence[Job], flat: Flat, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        self._drawings = [Drawing(row, job, job.private) for row, job in enumerate(jobs) if job.private is not None]
        self._flat, self._layout = flat, layout_of(jobs[0].before, jobs[0].trainable)

    def gradients(self, passes: Passes, active: int) -> Tensor:
        """(active, P) the first clients' gradients: each client's noised sum divided by its expected number of units."""
        drawings = self._drawings[:active]
        units = [unit for drawing in drawings for unit in drawing.units()]
        steps, width = [drawing.steps for drawing in drawings], self._flat.width
        total = clipped_sums(self._found(passes, units), units, steps, width, self._device).cpu()
        return torch.cat([self._noised(drawing, total[row, None]) for row, drawing in enumerate(drawings)])

    def losses(self) -> list[float]:
        return [float("nan")] * len(self._drawings)

    def _found(self, passes: Passes, units: Sequence[Drawn]) -> Iterator[Found]:
        """The gradients of all examples, with their units' numbers; the gradient of an example of direction u is -2 C u."""
        entries = [(number, item) for number, unit in enumerate(units) for item in unit.items]
        yield from passes(
            [entry for entry in entries if not isinstance(entry[1], Pointing)], [unit.owner for unit in units]
        )
        pointing = [(number, item) for number, item in entries if isinstance(item, Pointing)]
        most = max(1, min(len(pointing), _POINTING // self._flat.width))
        for at in range(0, len(pointing), most):
            some = pointing[at : at + most]
            lengths = [2 * self._drawings[units[number].owner].steps.clip_norm for number, _ in some]
            along = self._flat.rows([direction(item.unit, item.seed, self._layout).parts() for _, item in some])
            owners = torch.tensor([number for number, _ in some])
            yield Found(owners, along * -torch.tensor(lengths)[:, None], torch.zeros(len(some)))

    def _noised(self, drawing: Drawing, total: Tensor) -> Tensor:
        """(1, P) float32."""
        steps = drawing.steps
        own = {name: part[0] for name, part in self._flat.parts(total).items()}
        noised = steps.mechanism.noised(own, steps.clip_norm, steps.stream)
        return self._flat.rows([{name: (part / drawing.expected).float() for name, part in noised.items()}])


def clipped_sums(
    passes: Iterable[Found], units: Sequence[Drawn], steps: Sequence[PrivateSteps], width: int, device: torch.device
) -> Tensor:
    """(S, P) sum_u clip_C(g_u) over each client's units, float64.

    passes: gradients of all examples, with their units' numbers; the order of one client's gradients depends on its own units
    alone. A unit is clipped after its last example, by its norm alone: so its contribution depends on that unit alone.
    """
    total = torch.zeros(len(steps), width, dtype=torch.float64, device=device)
    left, begun = [len(unit.items) for unit in units], dict[int, Tensor]()
    for found in passes:
        done: list[tuple[Drawn, Tensor]] = []
        for number, row in zip(found.owners.tolist(), found.gradients.to(device, torch.float64), strict=True):
            whole = begun.pop(number) + row if number in begun else row
            left[number] -= 1
            if left[number]:
                begun[number] = whole.clone()
            else:
                done.append((units[number], whole))
        if done:
            owners = torch.tensor([unit.owner for unit, _ in done], device=device)
            add_in_order(total, owners, _clipped(done, steps))
    return total


def _clipped(done: Sequence[tuple[Drawn, Tensor]], steps: Sequence[PrivateSteps]) -> Tensor:
    """(B, P) the mean gradient of each unit, clipped in float64, so that rounding does not lengthen it.

    done: units with the sums of their examples' gradients. Zeros for a mean that cannot be bounded.
    """
    sizes = torch.tensor([len(unit.items) for unit, _ in done], device=done[0][1].device)
    means = torch.stack([whole for _, whole in done]) / sizes[:, None]
    # Each norm apart, since one reduction of all rows may round a row by their number; read at once, since a GPU waits.
    norms = torch.stack([torch.linalg.vector_norm(mean) for mean in means]).tolist()
    factors = [
        steps[unit.owner].mechanism.scale(partial(float, norm), steps[unit.owner].clip_norm)
        for (unit, _), norm in zip(done, norms, strict=True)
    ]
    scale = torch.tensor(factors, dtype=means.dtype, device=means.device)[:, None]
    return torch.where(scale != 0, means * scale, 0.0)  # infinity times zero is NaN


_POINTING = 2**23  # numbers of directions at once


def _counted(members: list[int], most: int | None, rng: np.random.Generator) -> list[int]:
    if most is None or len(members) <= most:
        return members
    return sorted(rng.choice(members, most, replace=False).tolist())
