"""One epsilon for all releases of several runs on the same units, planned beforehand.

Renyi divergences of independent releases add up at every order, so runs that state their divergences at common orders compose
without being repeated. The order may be chosen last, because the runs, and the noise of each, were fixed before the first run.
Where a later run was chosen in view of an earlier result, only a filter that was fixed beforehand holds (`filters`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from privacy.errors import PlanError

if TYPE_CHECKING:
    from privacy.run_plan import Plan

Divergences = Mapping[float, float]  # by order, of all releases of a run; finite ones only

ORDERS = (
    *(1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0),
    *(32.0, 40.0, 48.0, 64.0, 96.0, 128.0, 256.0, 512.0),
)


def of_plan(plan: Plan, releases: int) -> dict[float, float]:
    """The Renyi divergences of `releases` releases of a plan; empty where no accountant covers its noise.

    They grow with the order, so a smaller bound at a higher order also holds at lower orders.
    """
    try:
        found = plan.cost(releases, ORDERS).rdp or ()
    except PlanError:
        return {}
    least = [*accumulate(reversed(found), min)][::-1]
    return {order: one for order, one in zip(ORDERS, least, strict=True) if math.isfinite(one)}


def together(runs: Sequence[Divergences]) -> dict[float, float]:
    """The divergences of all runs together, at the orders that all of them state."""
    common = set.intersection(*map(set, runs)) if runs else set()
    return {order: math.fsum(run[order] for run in runs) for order in sorted(common)}


def largest(runs: Sequence[Divergences]) -> dict[float, float]:
    """Divergences that none of the runs exceeds, at the orders that all of them state."""
    common = set.intersection(*map(set, runs)) if runs else set()
    return {order: max(run[order] for run in runs) for order in sorted(common)}


def epsilon(found: Divergences, delta: float) -> float:
    """The least epsilon at this delta that follows from the divergences; infinite if there are none.

    By Canonne, Kamath and Steinke (2020), proposition 12.
    """
    return float(compute_epsilon(list(found), list(found.values()), delta)[0]) if found else math.inf
