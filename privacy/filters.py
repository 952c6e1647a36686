"""Privacy filters: limits on the total cost of runs on one data set, each chosen in view of earlier releases.

A privacy filter admits a run if the sum of all costs, its own included, stays within a limit that was fixed before the first:

- `basic`: sum of epsilon_i <= epsilon and sum of delta_i <= delta. All runs together are (epsilon, delta)-DP (Rogers, Roth,
  Ullman, Vadhan 2016, who show this for basic composition even if the parameters are chosen adaptively).
- `rdp`: at one order a, sum of rho_i(a) <= rho. All runs together are (a, rho)-RDP (Feldman, Zrnic 2021), hence (epsilon,
  delta)-DP with epsilon = rho + (log(1/delta) - log a) / (a - 1) + log(1 - 1/a) (Canonne, Kamath, Steinke 2020, proposition 12,
  which is tighter than Mironov's rho + log(1/delta) / (a - 1)). The order is fixed beforehand too: the best of several orders,
  picked afterwards, is not a filter.

Orders are compared by the number of Gaussian mechanisms, with rho(a) proportional to a, that would fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from privacy.errors import PlanError

Composition = Literal["basic", "rdp"]
ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *map(float, range(11, 64)), 64.0, 128.0, 256.0, 512.0, 1024.0)

# A decimal becomes a float with a relative error of at most 2^-53, and so do the correctly rounded sum and the limit: costs
# that fit exactly on paper are within 2^-50. The tolerance applies to the whole sum and never accumulates.
TOLERANCE = 2.0**-50


@dataclass(frozen=True)
class Cost:
    """The maximum cost of a run: (epsilon, delta)-DP, and for an RDP ledger rho at each of the ledger's orders."""

    epsilon: float
    delta: float
    rdp: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("epsilon", self.epsilon),
            ("delta", self.delta),
            *(("rdp", rho) for rho in self.rdp or ()),
        ):
            _check_number(f"a cost's {name}", value)
        if self.delta > 1:
            raise PlanError(f"a cost's delta is {self.delta:g}, above 1: lower privacy.delta")

    def or_more(self, other: Cost) -> Cost:
        """The larger of both costs in each part."""
        rdp = self.rdp if other.rdp is None else tuple(map(max, self.rdp or other.rdp, other.rdp))
        return Cost(max(self.epsilon, other.epsilon), max(self.delta, other.delta), rdp)


@dataclass(frozen=True)
class Budget:
    """The limit, None for no limit, and the filter that enforces it; `order`: the Renyi order of an `rdp` filter."""

    epsilon: float | None
    delta: float | None
    composition: Composition = "basic"
    order: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if value is not None:
                _check_number(f"a budget's {name}", value)
        if self.delta is not None and self.delta >= 1:
            raise PlanError(
                f"a budget's delta is {self.delta:g}, and a delta of 1 or more guarantees nothing: lower it"
            )
        if self.composition not in get_args(Composition):
            raise PlanError(f"composition is {self.composition!r}: choose one of {', '.join(get_args(Composition))}")
        if (self.composition == "rdp") != (self.order is not None and math.isfinite(self.order) and self.order > 1):
            raise PlanError(f"composition {self.composition!r} does not go with the order {self.order}")
        if self.composition == "rdp" and (self.epsilon is None or not self.delta):
            raise PlanError(
                "an RDP filter needs a budget's epsilon, and a delta above 0: give them, or use basic composition"
            )

    @classmethod
    def fixed(cls, epsilon: float | None, delta: float | None, composition: Composition) -> Budget:
        """The budget of a new ledger, its order chosen once and for all."""
        if composition != "rdp":
            return cls(epsilon, delta, composition)
        candidates = [cls(epsilon, delta, composition, order) for order in ORDERS]
        best = max(candidates, key=lambda budget: budget.limits[0] / (budget.order or 1))
        if best.limits[0] <= 0:
            text = (
                f"epsilon {epsilon} and delta {delta} leave an RDP filter no budget at any order up to {ORDERS[-1]:g}"
            )
            raise PlanError(f"{text}: raise the budget, or use basic composition")
        return best

    @property
    def limits(self) -> tuple[float, ...]:
        """The limits of the sums: epsilon and delta, or rho."""
        if self.order is None:
            return tuple(math.inf if limit is None else limit for limit in (self.epsilon, self.delta))
        return ((self.epsilon or 0.0) - self._conversion(self.order),)

    @property
    def _names(self) -> tuple[str, ...]:
        return ("epsilon", "delta") if self.order is None else ("RDP",)

    def parts(self, cost: Cost) -> tuple[float, ...]:
        """The numbers of a cost that are summed up; PlanError if an RDP ledger lacks them."""
        if self.order is None:
            return cost.epsilon, cost.delta
        if cost.rdp is None or len(cost.rdp) != 1:
            raise PlanError(
                f"this ledger adds up RDP at order {self.order:g}, and the cost's RDP is {cost.rdp}: give rho at that order"
            )
        return cost.rdp

    def sums(self, costs: Iterable[Cost]) -> tuple[float, ...]:
        """The sums of the parts, each rounded once."""
        parts = [self.parts(cost) for cost in costs]
        try:
            return tuple(map(math.fsum, zip(*parts, strict=True))) if parts else (0.0,) * len(self.limits)
        except OverflowError:
            return (math.inf,) * len(self.limits)

    def holds(self, costs: Iterable[Cost]) -> bool:
        """Whether the sums of these costs are within the limits, up to `TOLERANCE`."""
        return not self.exceeded(costs)

    def exceeded(self, costs: Iterable[Cost]) -> tuple[str, ...]:
        """The names of the limits that the sums of these costs exceed: "epsilon", "delta", or "RDP"."""
        return tuple(
            name
            for name, total, limit in zip(self._names, self.sums(costs), self.limits, strict=True)
            if not (total <= limit * (1 + TOLERANCE) and total < math.inf)
        )

    def left(self, costs: Iterable[Cost]) -> tuple[float, ...]:
        """The remainder of each limit after these costs."""
        return tuple(max(0.0, limit - total) for total, limit in zip(self.sums(costs), self.limits, strict=True))

    def remedy(self, others: Sequence[Cost], cost: Cost) -> str:
        """The settings to change for `cost` to fit beside the others. Lower epsilon or fewer rounds do not lower its delta."""
        exceeded, advice = self.exceeded([*others, cost]), list[str]()
        for name, limit, left in zip(self._names, self.limits, self.left(others), strict=True):
            if name in exceeded and limit > 0 and left <= limit * TOLERANCE:
                return "no further run on these data fits"
        if exceeded != ("delta",):
            advice.append("lower privacy.epsilon or federation.rounds, or raise privacy.noise_multiplier")
        if "delta" in exceeded:
            advice.append("lower privacy.delta")
        return "; ".join(advice)

    def total(self, costs: Iterable[Cost]) -> Cost:
        """All costs together as one cost.

        With `rdp`, if runs were chosen in view of each other's results, only the budget is guaranteed at any time. The epsilon
        here is computed from the sum, and is guaranteed if the runs were fixed beforehand.
        """
        sums = self.sums(costs)
        if self.order is None or self.delta is None:
            return Cost(sums[0], min(1.0, sums[1]))
        if not sums[0]:
            return Cost(0.0, 0.0, sums)
        return Cost(max(0.0, sums[0] + self._conversion(self.order)), self.delta, sums)

    def words(self, parts: tuple[float, ...]) -> str:
        """Parts of a cost in words, for messages."""
        if self.order is not None:
            return f"RDP {parts[0]:.6g} at order {self.order:g}"
        return " and ".join(f"{name} {part:.6g}" for name, part in zip(("epsilon", "delta"), parts, strict=True))

    def _conversion(self, order: float) -> float:
        """epsilon - rho."""
        return (-math.log(self.delta or 1.0) - math.log(order)) / (order - 1) + math.log1p(-1 / order)


def _check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise PlanError(f"{name} is {value!r}: it must be a finite number of at least 0")
