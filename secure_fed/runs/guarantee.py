"""The guarantee of a private run, from its plan and its actual charges: numbers and words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privacy.mechanisms import AdaptiveGaussian
from privacy.statement import NOT_COVERED, Statement
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.record import Record
from secure_fed.runs import participation
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.budget import RunBudget
from secure_fed.runs.meaning import meaning
from secure_fed.runs.trust_statement import trusted

if TYPE_CHECKING:
    from privacy.plan import Plan


def guarantee(assembly: Assembly, budget: RunBudget, run_dir: Path | None, records: Sequence[Record]) -> dict[str, Any]:
    """The privacy part of `result.json`.

    releases: the number charged, or where clients are charged, the most charged to one client. epsilon covers the whole plan
    and the repetitions of interrupted rounds: nothing is refunded for planned releases that were not made.
    """
    from privacy import composition

    protection, plan = assembly.protection, budget.plan
    spent = budget.ledger.spent()
    charged = max(budget.charged.values(), default=0)
    covered = plan.releases if plan.limits else max(charged, plan.releases)  # a client never exceeds its limit
    statement = statement_of(assembly, covered)
    return {
        "unit": protection.unit,
        "epsilon": statement.epsilon,
        "epsilon_participants": statement.epsilon_participants,
        "holds_against": list(statement.holds_against),
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.sampling_rate,
        "releases": charged,
        "epsilon_cumulative": spent.epsilon,
        "delta_cumulative": spent.delta,
        "privacy": {
            **statement.to_dict(),
            **meaning(plan, covered),
            "place": protection.placement.name,
            "hidden_cohort": protection.hidden,
            "clip_norm": protection.clip_norm,
            "planned_releases": _most(protection, plan.releases),
            "participations": plan.participations,
            "realised": _realised(assembly, plan, covered, records),
            "renyi": {f"{order:g}": found for order, found in composition.of_plan(plan, covered).items()},
            "ledger": str(budget.ledger.path) if run_dir else None,  # without a run directory it ends with the run
            "data_set": budget.ledger.data_set,
            "budget_epsilon": budget.ledger.epsilon,
            "budget_delta": budget.ledger.delta,
        },
        "privacy_statement": statement.text,
    }


def _realised(assembly: Assembly, plan: Plan, releases: int, records: Sequence[Record]) -> dict[str, Any] | None:
    """The epsilon of the releases under the survivors' noise, with the fewest survivors of any round. It refunds nothing."""
    shares, masks = assembly.protection.shares, assembly.masks
    if shares is None or masks is None or not records:
        return None
    from privacy.plan import realised

    counted = [record["masked"]["survivors"] for record in records if "masked" in record]
    survivors = min((count for count in counted if count is not None), default=None)
    if survivors is None:  # every round was lost
        return None
    honest = survivors - (masks.sums.terms.least(masks.invited) - shares.shares)
    multiplier = plan.noise_multiplier * math.sqrt(honest / shares.shares)
    epsilon = realised(plan, multiplier, releases, hidden=assembly.protection.hidden)
    return {"survivors": survivors, "noise_multiplier": multiplier, "epsilon": epsilon}


def planned(assembly: Assembly) -> dict[str, Any]:
    """The guarantee of the whole plan, as a run notes it at its start; a resumed run must compute the same."""
    protection, plan = assembly.protection, assembly.protection.plan
    if plan is None:
        return {}
    statement = statement_of(assembly, plan.releases)
    noise = {"noise_multiplier": plan.noise_multiplier, "clip_norm": protection.clip_norm}
    given = {"given": repr(plan.mechanism)} if protection.given else {}
    return {"privacy": {**statement.to_dict(), **noise, **given, "text": statement.text}}


def promised(assembly: Assembly, plan: Plan, cost: str) -> list[str]:
    """The guarantee of a private run, its noise and its cost, in sentences to read before the run reserves its budget."""
    statement = statement_of(assembly, plan.releases)
    return [
        f"guarantee: {statement.headline}",
        f"noise: {statement.mechanism}; it is added {statement.noise}.",
        f"cost: {cost}.",
    ]


def statement_of(assembly: Assembly, releases: int) -> Statement:
    """The statement of a run that makes `releases` releases."""
    protection, plan, tested = assembly.protection, assembly.protection.plan, assembly.problem.facts["test"]["from"]
    if plan is None:
        raise ValueError("a run without privacy has no guarantee to state")
    words = protection.placement.words
    held_out = _SHARE_HELD_OUT if protection.audited else ()
    kept = _PERSONAL if assembly.server.personal and not protection.placement.step_noise else ()
    return Statement(
        unit=_UNITS[protection.unit],
        adjacency=participation.neighbours(protection, plan),
        epsilon=plan.epsilon(releases),
        epsilon_participants=plan.epsilon_participants(releases),
        delta=plan.delta,
        mechanism=_mechanism(protection, plan, releases),
        sampling=participation.sampling(assembly, plan),
        accountant=_accountant(protection, plan),
        noise=f"{words.noise}{_over_rounds(plan)}",
        trust=trusted(protection, assembly.masks),
        holds_against=protection.placement.holds_against,
        released=f"{words.released.format(_most(protection, releases))}, and every model made of them{_phantoms(protection)}",
        not_covered=(
            *NOT_COVERED,
            *_MEMBERSHIP,
            *held_out,
            *_uncovered(protection, plan),
            *(_GIVEN if protection.given else ()),
            *(_LOCAL if assembly.local is not None and assembly.everybody_here else ()),
            *kept,
            *_TESTED.get(tested, ()),
        ),
        private=protection.entropy.private,
    )


def _phantoms(protection: Protection) -> str:
    """The clause on phantoms in the sentence about releases: they depend on nobody's data."""
    count = protection.phantoms.phantoms
    if not count:
        return ""
    return (
        f". The sums contain {count} phantoms: random contributions that depend on nobody's data and leave the noise as it is; "
        "the membership figures of phantoms are computed from the releases alone"
    )


def _uncovered(protection: Protection, plan: Plan) -> tuple[str, ...]:
    """The limits of the guarantee that follow from where the noise is, and from a public order."""
    if protection.hidden:
        return ("when a client drops out and how long it takes to answer, which may reveal whether it trained",)
    return (*protection.placement.words.not_covered, *(participation.PERSONS_AT_SEVERAL if plan.exposures else ()))


def _over_rounds(plan: Plan) -> str:
    """The clause on the noise over the rounds of a public order, after the words on who adds it."""
    if not plan.exposures:
        return ""
    if (band := plan.correlation.band) > 1:
        return f", correlated over {band} rounds: each round's noise cancels part of the noise of earlier rounds"
    return ", independent in every round"


def _most(protection: Protection, releases: int) -> int:
    """The most releases: of the federation, or of one client, which need not be the client with the largest epsilon."""
    return max(protection.plan.limits.values(), default=releases) if protection.plan else releases


def _mechanism(protection: Protection, plan: Plan, releases: int) -> str:
    mechanism, norm = plan.mechanism, "norm"
    law = "distributed discrete Gaussian" if protection.placement.share_noise else "Gaussian"
    if protection.given:
        law, norm = f"{type(mechanism).__name__}, given in Python,", f"L{mechanism.order:g} norm"
    clipped = f"every {protection.placement.words.clipped} clipped to {norm} {protection.clip_norm:g} over all tensors together"
    if isinstance(mechanism, AdaptiveGaussian):
        clipped += f" at first, later to quantile {mechanism.quantile:g}; every charge includes the noised count"
    if plan.exposures:
        moved = f"{plan.sensitivity(releases):.6g} times the clip norm"
        clipped += f"; all rounds together are one such mechanism, whose output one client changes by at most {moved}"
    return f"{law} with noise multiplier {plan.noise_multiplier:g}, {clipped}"


def _accountant(protection: Protection, plan: Plan) -> str:
    if protection.given:
        return (
            f"privacy loss distributions (dp_accounting) of the event that the mechanism states, {plan.mechanism.event}"
        )
    if plan.release.plain:
        return _EXACT
    return _ACCOUNTANTS["renyi" if protection.placement.share_noise else plan.release.accountant]


_TESTED = {
    HELD_OUT[unit]: (f"{whose} held out for testing: they never train, and measurements on them have no noise",)
    for unit, whose in (
        ("client", "the clients"),
        ("person", "the persons"),
        ("example", "the rows"),
    )
}
_GIVEN = ("a mechanism that adds less noise than it states, or noise of another law: secure-fed does not check this",)
_LOCAL = (
    "what the function that trains (local) keeps outside its model for another client's call, as in a global variable or a "
    "file: secure-fed does not see it",
)
_PERSONAL = ("a client's personal tensors, which have no noise: nothing protects the client's data once they leave it",)
_UNITS = {
    "client": "a client with everything it has",
    "example": "one example of one client",
    "group": "all examples of one person at one client",
}
_EXACT = "exact: one Gaussian mechanism for the whole run (dp_accounting)"
_ACCOUNTANTS = {
    "pld": "privacy loss distributions (dp_accounting), exact for plain Gaussians",
    "renyi": "Renyi privacy of distributed discrete Gaussians, at whole orders where they are sampled (dp_accounting)",
    "rdp": "Renyi privacy of sampling without replacement (dp_accounting), or no amplification where that is less",
}
_MEMBERSHIP = (
    "membership figures about units of the data, and audits and recordings of them: they are computed from the training data "
    "without noise, for the owners of the data",
    "where canaries are planted for an audit (evaluation.canaries), the data before planting",
)
_SHARE_HELD_OUT = (
    "the number of all units, which is taken as public: it decides which share of them is held out for an audit "
    "(evaluation.audit_fraction)",
)
