"""Sentences on the run's guarantee: contradicted, not contradicted, or not testable by this audit."""

from __future__ import annotations

from attacks.evidence.baseline import SHUFFLES
from attacks.report import significance
from attacks.report.audited import NO_UNIT, Audit
from attacks.report.wording import apart, at_least, confidence, unit_one, who
from secure_fed.report.formatting import at_most, counted

ONE_IN = SHUFFLES + 1  # one in so many audits with fair coins has a baseline that fails by chance


def contradicted(audit: Audit) -> str:
    """The largest lower bound above the accounted epsilon, and the doubt about it, if any."""
    broken = [cell for cell in audit.cells if significance.contradicts(cell, audit)]
    worst = max(broken, key=lambda cell: cell.lower or 0.0)
    bounds = sum(cell.lower is not None for cell in audit.results)
    promise, shown = apart(worst.accounted or 0.0, worst.lower or 0.0)
    return (
        f"THE GUARANTEE IS CONTRADICTED. The run claims epsilon {promise} for {unit_one(audit.audited)}, but"
        f" {who(audit, worst.vantage)} learned so much that epsilon is at least {shown}, with a"
        f" confidence of {confidence(audit)} ({audit.attack_title(worst.attack)}; {counted(bounds, 'such bound')} computed)."
        f"{_doubt(audit)} Either the noise, the accounting or the program is wrong; do not rely on the claimed epsilon."
    )


def _doubt(audit: Audit) -> str:
    """A doubt if the baseline fails. The bound depends on fair coins alone, so this is only a doubt."""
    if audit.baseline.at_chance is not False:
        return ""
    return (
        f" Members and non-members also differ without any model. Fair coins cause that in one audit in {ONE_IN}; then the"
        " contradiction stands, since it rests on the coins alone. If they were not divided by fair coins, nothing is shown."
    )


def guarantee(audit: Audit) -> str:
    """The sentences on a guarantee that nothing contradicts."""
    if audit.unit == NO_UNIT:
        return "The run has no privacy guarantee, so there is nothing to contradict."
    if not audit.protected:
        promise = "" if audit.promised is None else f" of epsilon {at_most(audit.promised)} ({audit.adjacency})"
        return f"{_COULD_NOT}{promise}: {_NO_EPSILON}"
    if not audit.comparable:
        return (
            f"{_COULD_NOT}: the guarantee is for {unit_one(audit.unit)} and the audit is about {unit_one(audit.audited)}, so"
            " the two are not compared."
        )
    covered = [cell for cell in audit.bounded if audit.covers(cell)]
    if not covered:
        return f"{_COULD_NOT}: {_BOUNDS_OF_OTHERS if audit.bounded else _NO_BOUND}"
    most, limit = covered[0], f"{best_possible(audit)}{blunt(audit)}"
    if not most.lower:
        return f"The guarantee, epsilon {at_most(most.accounted)}, is not contradicted: the largest lower bound is 0.{limit}"
    return (
        f"The guarantee is not contradicted: it allows epsilon {at_most(most.accounted)}, and the largest lower bound is"
        f" {at_least(most.lower)}, with a confidence of {confidence(audit)}.{limit}"
    )


def best_possible(audit: Audit) -> str:
    """The lower bound expected from the best possible attack, which distinguishes a weak attack from a strong guarantee."""
    if audit.expected is None:
        return ""
    return (
        f" The best possible attack on a mechanism of this epsilon, with as many units that each move the model as far as one "
        f"may, is expected to show {at_least(audit.expected)}."
    )


def blunt(audit: Audit) -> str:
    """A warning if there were too few units to contradict the guarantee, whatever an attack found."""
    covered = [cell for cell in audit.bounded if audit.comparable and audit.covers(cell)]
    pairs = [(cell.showable, cell.accounted) for cell in covered]
    if not pairs or any(most is None or promised is None or most > promised for most, promised in pairs):
        return ""
    most = max(cell.showable or 0.0 for cell in covered)
    return f" No attack on so few units could have shown more than {at_most(most)} or contradicted the guarantee."


_COULD_NOT = "This audit could not have contradicted the run's guarantee"
_NO_EPSILON = (
    "an audit leaves units out altogether, and no epsilon is accounted for that. There is none if every client adds a share"
    " of the noise and stays to send it, if the guarantee is about replacing a unit by another, or if the noise was seeded,"
    " which voids the guarantee. So this audit neither supports nor contradicts the guarantee."
)
_BOUNDS_OF_OTHERS = (
    "the only lower bounds are for adversaries that the guarantee does not cover, such as a server that adds the noise"
    " itself."
)
_NO_BOUND = (
    "no attack gave a lower bound on epsilon, because no attack on membership gave a result, or because delta is too large for"
    " the number of units."
)
