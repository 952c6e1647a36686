"""The mean gradients for the steps of clients without private steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from secure_fed.learning.training.cohort.division import Passes
from secure_fed.learning.training.cohort.flat import add_in_order
from secure_fed.learning.training.cohort.one_pass import Places
from secure_fed.learning.training.local import Job


class Means:
    """Steps along the mean gradient of each client's next batch."""

    def __init__(self, jobs: Sequence[Job], places: Places) -> None:
        self._ahead = [(batch.inputs for batch in job.batches(list)) for job in jobs]
        self._gradient = torch.zeros_like(places.moving)
        self._found: list[tuple[Tensor, Tensor]] = []

    def gradients(self, passes: Passes, active: int) -> Tensor:
        """(active, P) the mean gradients of the first clients."""
        batches = [next(ahead) for ahead in self._ahead[:active]]
        gradient = self._gradient[:active].zero_()
        share = torch.tensor([1 / len(batch) for batch in batches], device=gradient.device)
        entries = [(row, item) for row, batch in enumerate(batches) for item in batch]
        for found in passes(entries, range(active)):
            add_in_order(gradient, found.owners, found.gradients * share[found.owners, None])
            self._found.append((found.owners, found.losses))
        return gradient

    def losses(self) -> list[float]:
        """The mean loss of each client over the examples seen."""
        total, seen = np.zeros(len(self._ahead)), np.zeros(len(self._ahead))
        for owners, losses in self._found:
            np.add.at(total, owners.cpu().numpy(), losses.cpu().numpy())
            np.add.at(seen, owners.cpu().numpy(), 1)
        return [float(of / count) if count else math.nan for of, count in zip(total, seen, strict=True)]
