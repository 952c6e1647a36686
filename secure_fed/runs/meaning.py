"""What a guarantee means beyond one epsilon: at other deltas, as a test between two laws, and for several clients together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privacy.plan import Plan

DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
GROUPS = (2, 5)


def meaning(plan: Plan, releases: int) -> dict[str, Any]:
    """The keys of the privacy part of `result.json` for readers of the models, after `releases` releases.

    curve: epsilon at deltas around the run's, as far as the accountant resolves them. gaussian_mu: as `Plan.gaussian`. groups:
    for groups of two and five units, epsilon at the run's delta; left out where none follows. exact: whether it is computed
    from mu.
    """
    from privacy.composition import group_epsilon, group_epsilon_by_curve

    curve = plan.curve(sorted({*DELTAS, plan.delta}, reverse=True), releases)
    mu = plan.gaussian(releases)
    found = [
        (m, group_epsilon(mu, m, plan.delta) if mu is not None else group_epsilon_by_curve(curve, m, plan.delta))
        for m in GROUPS
    ]
    return {
        "curve": [{"delta": delta, "epsilon": epsilon} for delta, epsilon in curve],
        "gaussian_mu": mu,
        "groups": [
            {"units": units, "epsilon": epsilon, "exact": mu is not None}
            for units, epsilon in found
            if epsilon is not None
        ],
    }
