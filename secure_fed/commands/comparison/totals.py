"""The total privacy cost of several runs to one unit: what a comparison reveals about a unit that is in all of its runs.

Costs add up for one unit and one kind of neighbours. Two runs are about different units if

- they protect units of another kind or name, or have other neighbouring data sets;
- they generate the built-in notes with different seeds: then the notes differ, and nobody is in both;
- secure-fed assigned rows to clients, and not a column of the data, with another seed or other settings: then the rows of one
  run's client belong to many clients of the other run, and nothing bounds the cost to all their rows together.

For runs about one unit, (epsilon, delta) is the sum, or epsilon at the same delta by Renyi composition if that is less.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.data.named_files import generated
from secure_fed.report.record import RunRecord
from secure_fed.runs.budget import unit_name

Apart = Literal["", "notes", "clients"]  # why another seed has other units; "" if it has the same


@dataclass(frozen=True)
class Charge:
    """The cost of one private run, and the units that bear it.

    unit, neighbours: in words. promise: kind and name of the unit, and the neighbours. people: a key that distinguishes the
    units of runs with the same promise. epsilon_participants: against observers who also see who takes part. renyi: the
    divergences of all releases, by order. public_test: whether its accuracy was measured on a public test set.
    """

    name: str
    seed: int
    unit: str
    neighbours: str
    promise: tuple[str, str, str]
    people: Hashable
    apart: Apart
    epsilon: float
    epsilon_participants: float
    delta: float
    renyi: Mapping[float, float]
    public_test: bool


@dataclass(frozen=True)
class Total:
    """The cost of all charges about one unit together. epsilon: the lesser of Renyi composition and epsilon_basic, the sum."""

    charges: tuple[Charge, ...]
    epsilon: float
    epsilon_basic: float
    epsilon_participants: float
    delta: float

    @property
    def unit(self) -> str:
        return self.charges[0].unit

    @property
    def apart(self) -> Apart:
        return self.charges[0].apart

    def to_dict(self) -> dict[str, Any]:
        """The total for programs."""
        return {
            "unit": self.unit,
            "neighbours": self.charges[0].neighbours,
            "configurations": list(dict.fromkeys(charge.name for charge in self.charges)),
            "seeds": list(dict.fromkeys(charge.seed for charge in self.charges)),
            "runs": len(self.charges),
            "epsilon": self.epsilon,
            "epsilon_basic": self.epsilon_basic,
            "epsilon_participants": self.epsilon_participants,
            "delta": self.delta,
        }


def charge_of(name: str, record: RunRecord) -> Charge | None:
    """The cost of a finished run; None for a run without privacy, or with a void guarantee."""
    config, result = record.config, record.result or {}
    stated = result.get("privacy")
    if not isinstance(stated, Mapping) or not stated["private"]:
        return None
    apart, people = _people(record)
    return Charge(
        name=name,
        seed=config.federation.seed,
        unit=stated["unit"],
        neighbours=stated["adjacency"],
        promise=(config.privacy.unit, unit_name(config), stated["adjacency"]),
        people=people,
        apart=apart,
        epsilon=float(result["epsilon"]),
        epsilon_participants=float(result["epsilon_participants"]),
        delta=float(result["delta"]),
        renyi={float(order): found for order, found in stated.get("renyi", {}).items()},
        public_test=is_declared(result["test"]["from"]),
    )


def _people(record: RunRecord) -> tuple[Apart, Hashable]:
    """Why another seed has other units, and the key that distinguishes a run's units from other runs' beside their name."""
    config, made = record.config, generated(record.config.data)
    drawn = config.privacy.unit == "client" and record.facts["partition"]["kind"] != "natural"
    if drawn:
        return ("notes" if made else "clients"), (config.federation.seed, config.federation.clients, config.data)
    return ("notes", config.federation.seed) if made else ("", None)


def totals(charges: Iterable[Charge]) -> list[Total]:
    """One total for every unit that the charges are about."""
    by_unit: dict[Hashable, list[Charge]] = {}
    for charge in charges:
        by_unit.setdefault((charge.promise, charge.people), []).append(charge)
    return [_total(tuple(own)) for own in by_unit.values()]


def _total(charges: tuple[Charge, ...]) -> Total:
    from privacy import composition

    basic, delta = math.fsum(one.epsilon for one in charges), math.fsum(one.delta for one in charges)
    epsilon = basic
    if len(charges) > 1 and delta < 1:
        found = composition.together([one.renyi for one in charges])
        epsilon = min(basic, composition.epsilon(found, delta))
    against_all = all(one.epsilon_participants == one.epsilon for one in charges)
    seen = epsilon if against_all else math.fsum(one.epsilon_participants for one in charges)
    return Total(charges, epsilon, basic, seen, min(1.0, delta))


def best_only(total: Total) -> tuple[float, float] | None:
    """The (epsilon, delta) of publishing only the best of a random number of such runs, on average `len(total.charges)`.

    Every run draws its configuration at random from these. None if there is a single run, or no Renyi divergences.
    """
    from privacy import composition

    runs, delta = len(total.charges), max(one.delta for one in total.charges)
    one = composition.largest([charge.renyi for charge in total.charges])
    if runs < 2 or not one:
        return None
    laws = (composition.of_best(law, float(runs), one) for law in composition.LAWS)
    return min(composition.epsilon(found, delta) for found in laws), delta
