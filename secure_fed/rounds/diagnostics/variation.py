"""FeDeRA's magnitude and direction variation between consecutive global states (equations 19 to 22, its figures 3 and 4).

The paper plots them of the factors A and B; here they are computed where a method has such factors and trains them, and also
for the product of the factors, which does not depend on how it is split. Each is the mean over all matrices. Only tensors that
the server sends out are used, so this reveals nothing new.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods.method import State
from secure_fed.rounds.diagnostics.angles import of_columns
from secure_fed.rounds.diagnostics.compared import Weights


@dataclass(frozen=True)
class Variation:
    weights: Weights

    def between(self, before: State, after: State) -> dict[str, float]:
        """Numbers by name."""
        trained = self.weights.trained(before)
        found = _named("", self.weights.pairs(before.tensors, after.tensors, trained))
        factors = pairs(before.tensors)
        for factor, names in (("_a", [pair.a for pair in factors]), ("_b", [pair.b for pair in factors])):
            both = [(before.tensors.tensor(name), after.tensors.tensor(name)) for name in names if name in trained]
            found |= _named(factor, (pair for pair in both if pair[0].shape == pair[1].shape))
        return found


def _named(ending: str, both: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    varied = [of_columns(before, after) for before, after in both]
    if not varied:
        return {}
    magnitudes, directions = zip(*varied, strict=True)
    count = len(varied)
    return {f"magnitude{ending}": math.fsum(magnitudes) / count, f"direction{ending}": math.fsum(directions) / count}
