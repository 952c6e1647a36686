"""The input and the result of an attack. No attack reads the coins: with other coins, its scores are the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.null import Floats, Null
from attacks.adversary.vantage import Seen
from secure_fed.errors import UsageError
from secure_fed.learning.audit_pool.unit import Unit
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.membership.measured import confidences, looked_at, mean_of_units
from secure_fed.tensors.tensors import Tensors

if TYPE_CHECKING:
    from attacks.adversary.shadows import References


class Inapplicable(UsageError):  # noqa: N818 - a fact, no fault
    """The reason why an attack does not apply to a case."""


@dataclass(frozen=True)
class Settings:
    """The settings of an audit. references: shadow adapters; significance: of all findings together, and of all lower bounds
    together; max_rounds: the most rounds that an attack on rounds uses, evenly spaced, or the first ones for attacks on texts
    and labels. None: each attack's own number.
    """

    references: int = 16
    seed: int = 0
    significance: float = 0.05
    max_rounds: int | None = None


@dataclass(frozen=True)
class Finding:
    """scores: (units,), higher means more likely a member; None for attacks on something other than membership.

    measured: other results, as JSON. note: a caveat for readers of the number. null: the distribution of a non-member's score,
    where it is known.
    """

    scores: Floats | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    null: Null | None = None


@dataclass
class Shadows:
    """Reference adapters of one audit, trained on first use and then shared by all attacks and vantages.

    rounds: the rounds that the run completed, if it ended early.
    """

    assembly: Assembly
    seed: int = 0
    progress: Callable[[int, int], None] | None = None
    rounds: int | None = None
    _made: dict[int, References] = field(default_factory=dict)
    _read: dict[int, Floats] = field(default_factory=dict)

    def __call__(self, count: int) -> References:
        if count not in self._made:
            from attacks.adversary.shadows import references

            self._made[count] = references(self.assembly, count, self.seed, self.progress, rounds=self.rounds)
        return self._made[count]

    def confidences(self, count: int, of_one: Callable[[Tensors], Floats]) -> Floats:
        """(references, examples) `of_one` of each reference, computed once and shared by all cases."""
        if count not in self._read:
            self._read[count] = np.stack([of_one(state) for state in self(count).states])
        return self._read[count]


@dataclass(frozen=True)
class Case:
    """An adversary and a run: the adversary's view, the public facts of the federation, and the audited units."""

    assembly: Assembly
    seen: Seen
    references: Shadows

    @property
    def units(self) -> tuple[Unit, ...]:
        """The audited units; some were members."""
        return self.assembly.audit_pool.units

    @property
    def population(self) -> Sequence[Any]:
        """Examples of the same distribution that are certainly non-members: the test set."""
        return self.assembly.problem.test

    def confidences(self, tensors: Tensors, examples: Sequence[Any]) -> Floats:
        """(examples,) phi under a global state."""
        parts, config = self.assembly.problem, self.assembly.config
        model = self.assembly.objective.load(tensors)
        device, size = self.assembly.objective.device, config.evaluation.batch_size
        with self.assembly.objective.reading:
            return confidences(model, examples, parts.collate, parts.confidence, size, device)

    @cached_property
    def looked_at(self) -> tuple[list[Any], NDArray[np.int64]]:
        """A few examples of each unit, and the index of the unit of each example."""
        return looked_at(self.units)

    def unit_confidences(self, tensors: Tensors) -> Floats:
        """(units,) mean phi over a unit's examples."""
        examples, owner = self.looked_at
        return mean_of_units(self.confidences(tensors, examples), owner, len(self.units))

    def reference_confidences(self, count: int) -> Floats:
        """(references, examples) phi of the examples in `looked_at`, under `count` reference adapters."""
        examples, _ = self.looked_at
        return self.references.confidences(count, lambda state: self.confidences(state, examples))
