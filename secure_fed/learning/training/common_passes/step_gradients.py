"""The gradients of a step, a client a row: means over batches, or DP-SGD's noised sums of clipped gradients.

DP-SGD inside clients (Abadi et al. 2016, arXiv 1607.00133): one step is one noised sum of clipped gradients.

    w <- optimiser(w, (1 / (q n)) (sum_{u in S} clip_C(g_u) + N(0, (z C)^2)) + mu (w - w_before))

Each of a client's n units u is in S by an independent secret coin of probability q = min(1, batch_size / n). A unit is an
example, or with persons all examples of one person; g_u is the mean of the gradients of its examples. clip_C scales to an L2
norm of at most C over all trained tensors together; a gradient that is not finite counts as zero. The FedProx term is a
function of noised tensors, and is added after the noise. An example of a direction (`audit_unit.Pointing`, in an audit) has a
gradient along it that is longer than C, and is drawn and clipped like every other example.

Guarantee: adding or removing one unit of a client changes this client's sum by at most C, whichever other clients share the
passes, and does not change the sums of other clients. This holds in float32 and bfloat16, and needs gradients that are
bit-identical whatever the other examples of a pass (`packing.Public`): then other units' contributions stay the same, up
to rounding of the client's own sum in float64, and a unit's clipped contribution is shorter than C by more than this rounding
(`mechanisms.clip_factor`). Dropout masks are drawn in secret, independently for each example of a pass, so with dropout the
other units' contributions keep their distribution. Coins and noise come from each client's own stream: one client's draws do
not depend on another's. So a step is a Poisson-sampled Gaussian mechanism of noise multiplier z
(`batch_sampler(...).release(z)`), and the steps of a training compose. Public are n, the settings and the number of steps. An
empty S is released like any other; a client without examples releases nothing. Losses are withheld: they have no noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privacy.participation import Poisson
from secure_fed.learning.data.audit_unit import Pointing
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.canary_directions import direction_of
from secure_fed.learning.training.common_passes.packing import Passes, Public, Room
from secure_fed.learning.training.common_passes.passes import Flat, Places, found_in
from secure_fed.learning.training.local import Job, Placed, PrivateSteps, batch_sampler, members_of
from secure_fed.learning.training.objective import Objective


class Means:
    """Steps along the mean gradient of each client's next batch."""

    def __init__(self, jobs: Sequence[Job], places: Places) -> None:
        self._ahead = [job.batches() for job in jobs]
        self._gradient, self._flat = torch.zeros_like(places.moving), places.flat
        self._found: list[tuple[list[int], Tensor]] = []

    def gradients(self, passes: Passes, active: int) -> Tensor:
        """(active, P) the mean gradients of the first clients, each summed in an order of its own examples."""
        batches = [next(ahead) for ahead in self._ahead[:active]]
        gradient = self._gradient[:active].zero_()
        share = torch.tensor([1 / len(batch) for batch in batches], device=gradient.device)
        entries = [(row, item) for row, batch in enumerate(batches) for item in batch]
        for found, owners in passes(entries, range(active)):
            at = torch.tensor(found.owners, device=gradient.device)
            for name, part in self._flat.parts(gradient).items():
                rows = found.gradients[name]
                part.index_add_(0, at, rows * share[at].view(-1, *[1] * (rows.ndim - 1)))
            self._found.append((owners, found.losses))
        return gradient

    def losses(self) -> list[float]:
        """The mean loss of each client over the examples seen."""
        total, seen = np.zeros(len(self._ahead)), np.zeros(len(self._ahead))
        for owners, losses in self._found:
            np.add.at(total, owners, losses.cpu().numpy())
            np.add.at(seen, owners, 1)
        return [float(mean) for mean in total / np.maximum(seen, 1)]


def example_gradients(
    objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]
) -> dict[str, Tensor]:
    """{name: (B, *shape)} the gradient of each example at these tensors, in the order of the items."""
    numbers = sum(tensor.numel() for tensor in placed.moving.values())
    room = Room.of(objective.device, objective.model, numbers, public=True)
    public, places = Public(objective, collate, room, placed), Places.of([placed])
    found = {name: tensor.new_zeros((len(items), *tensor.shape)).detach() for name, tensor in placed.moving.items()}
    for pack, at in public.packs(list(enumerate(items)), [0] * len(items)):
        for name, rows in found_in(objective, places, pack).gradients.items():
            found[name][at] = rows
    return found


@dataclass(frozen=True)
class Drawn:
    """A unit that was drawn in a step: its client's row, and its examples that enter the step."""

    owner: int
    items: Sequence[Any]


class Drawing:
    """The draws of one client, from its own secret numbers alone."""

    def __init__(self, row: int, job: Job, steps: PrivateSteps) -> None:
        self._row, self._job, self.steps = row, job, steps
        self._members = members_of(len(job.examples), steps.persons)
        self._sampler = batch_sampler(len(self._members), job.settings)
        self._beside = Poisson(len(steps.dummies), self._sampler.rate)

    @property
    def expected(self) -> float:
        """The expected number of units in a step."""
        return self._sampler.expected

    def units(self) -> Iterator[Drawn]:
        """The units of the next step, then the dummies."""
        coins, examples = self.steps.stream.uniform, self._job.examples
        for unit in self._sampler.draw(coins):
            members, most = self._members[unit], self.steps.person_examples
            if most is not None and len(members) > most:
                members = sorted(self._job.rng.choice(members, most, replace=False).tolist())
            yield Drawn(self._row, [examples[i] for i in members])
        for dummy in self._beside.draw(coins):
            yield Drawn(self._row, [self.steps.dummies[dummy]])


class NoisedSums:
    """The private steps of some clients; row s of a sum is the s-th client's."""

    def __init__(self, jobs: Sequence[Job], flat: Flat, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        self._drawings = [Drawing(row, job, job.private) for row, job in enumerate(jobs) if job.private is not None]
        self._flat, self._first = flat, jobs[0]

    def gradients(self, passes: Passes, active: int) -> Tensor:
        """(active, P) the first clients' gradients: each client's noised sum divided by its expected number of units."""
        drawings = self._drawings[:active]
        units = [unit for drawing in drawings for unit in drawing.units()]
        entries = [(number, item) for number, unit in enumerate(units) for item in unit.items]
        real = [entry for entry in entries if not isinstance(entry[1], Pointing)]
        found = passes(real, [unit.owner for unit in units])
        steps = [drawing.steps for drawing in drawings]
        sums = ClippedSums(self._flat, units, steps, self._device)
        for one, numbers in found:
            sums.add(numbers, one.gradients)
        for number, item in entries:
            if isinstance(item, Pointing):  # the gradient of an example of direction u is -2 C u
                along, length = (
                    direction_of(self._first, item.unit, item.seed),
                    2 * steps[units[number].owner].clip_norm,
                )
                sums.add([number], {name: -length * part[None] for name, part in along.parts().items()})
        total = sums.total.cpu()
        return torch.cat([self._noised(drawing, total[row, None]) for row, drawing in enumerate(drawings)])

    def losses(self) -> list[float]:
        return [float("nan")] * len(self._drawings)

    def _noised(self, drawing: Drawing, total: Tensor) -> Tensor:
        """(1, P) float32."""
        steps = drawing.steps
        own = {name: part[0] for name, part in self._flat.parts(total).items()}
        noised = steps.mechanism.noised(own, steps.clip_norm, steps.stream)
        return self._flat.rows([{name: (part / drawing.expected).float() for name, part in noised.items()}])


class ClippedSums:
    """(S, P) sum_u clip_C(g_u) over each client's units, float64.

    A unit is clipped after its last example, by its norm alone, so its contribution depends on that unit alone. Norms are
    float64, over all tensors together; a clipped gradient is added in place, and none is kept.
    """

    def __init__(self, flat: Flat, units: Sequence[Drawn], steps: Sequence[PrivateSteps], device: torch.device) -> None:
        self.total = torch.zeros(len(steps), flat.width, dtype=torch.float64, device=device)
        self._parts, self._units, self._steps, self._device = flat.parts(self.total), units, steps, device
        self._left = [len(unit.items) for unit in units]
        self._begun: dict[int, dict[str, Tensor]] = {}

    def add(self, numbers: Sequence[int], gradients: Mapping[str, Tensor]) -> None:
        """Add gradients (B, *shape) of examples of the units with these numbers; one client's are in an order of its own."""
        gradients = {name: rows.to(self._device) for name, rows in gradients.items()}
        whole = all(len(self._units[number].items) == 1 for number in numbers)
        if self._device.type != "cpu" and whole and len({self._units[number].owner for number in numbers}) == 1:
            self._add_at_once(self._units[numbers[0]].owner, gradients)
            return
        for row, number in enumerate(numbers):
            own = {name: rows[row] for name, rows in gradients.items()}
            unit = self._units[number]
            if len(unit.items) > 1:
                begun = self._begun.setdefault(number, {})
                for name, part in own.items():
                    begun[name] = begun[name] + part if name in begun else part.double()
                self._left[number] -= 1
                if self._left[number]:
                    continue
                own = {name: part / len(unit.items) for name, part in self._begun.pop(number).items()}
            # Each norm apart, since one reduction of all rows may round a row by their number.
            squares = [torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in own.values()]
            factor = self._factor(unit.owner, float(torch.stack(squares).sum().sqrt()))
            if factor:  # zeros for a gradient that cannot be bounded
                for name, part in own.items():
                    self._parts[name][unit.owner].add_(part, alpha=factor)

    def _add_at_once(self, owner: int, gradients: Mapping[str, Tensor]) -> None:
        """The same for units of one example and one client, which alone determine the shape of these sums."""
        norms = [torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64) for rows in gradients.values()]
        factors = [self._factor(owner, norm) for norm in torch.stack(norms).square().sum(0).sqrt().tolist()]
        scale = torch.tensor(factors, dtype=torch.float64, device=self._device)
        for name, rows in gradients.items():
            sound = (
                rows.double()
                if all(factors)
                else rows.double().flatten(1).where(scale[:, None] != 0, 0.0).view_as(rows)
            )
            self._parts[name][owner].add_(torch.tensordot(scale, sound, 1))

    def _factor(self, owner: int, norm: float) -> float:
        return self._steps[owner].mechanism.scale(partial(float, norm), self._steps[owner].clip_norm)
