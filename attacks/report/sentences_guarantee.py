"""What an audit says of a run's guarantee, in sentences: contradicted, not contradicted, or beyond what it could contradict."""

from __future__ import annotations

from attacks.evidence.baseline import SHUFFLES
from attacks.report import significance
from attacks.report.reading import NO_UNIT, Audit, Cell
from attacks.report.wording import apart, at_least, confidence, unit_one, who
from secure_fed.report.formatting import at_most, counted

ONE_IN = SHUFFLES + 1  # so many audits with fair coins have one whose baseline fails by luck


def contradicted(audit: Audit) -> str:
    """The largest bound above what was promised, and what speaks against it."""
    broken = [cell for cell in audit.cells if significance.contradicts(cell, audit)]
    worst = max(broken, key=lambda cell: cell.lower or 0.0)
    bounds = sum(cell.lower is not None for cell in audit.results)
    promise, shown = apart(worst.accounted or 0.0, worst.lower or 0.0)
    return (
        f"THE GUARANTEE IS CONTRADICTED. The run claims epsilon {promise} for {unit_one(audit.audited)}, but"
        f" {who(audit, worst.vantage)} learned so much that epsilon must be at least {shown}, with a"
        f" confidence of {confidence(audit)} ({audit.attack_title(worst.attack)}; {counted(bounds, 'such bound')} computed)."
        f"{_doubt(audit)} Either the noise, the accounting or the program is wrong; do not rely on the claimed epsilon."
    )


def _doubt(audit: Audit) -> str:
    """That the two sides differ by themselves. The bound rests on nothing but fair coins, so it is no more than a doubt."""
    if audit.baseline.at_chance is not False:
        return ""
    return (
        f" Members and non-members also differ without any model; fair coins cause that in one audit in {ONE_IN}, and then the"
        " contradiction stands, since it rests on the coins alone. If they were divided by anything else, nothing is shown."
    )


def guarantee(audit: Audit) -> str:
    """What is to be said of it where nothing contradicts it."""
    if audit.unit == NO_UNIT:
        return "The run promises no limit on what it gives away, so there is no guarantee to contradict."
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
    most, blunt = covered[0], _blunt(covered)
    if not most.lower:
        return f"The guarantee, epsilon {at_most(most.accounted)}, is not contradicted: what was shown at least is 0.{blunt}"
    return (
        f"The guarantee is not contradicted: it allows epsilon {at_most(most.accounted)}, and at least {at_least(most.lower)}"
        f" was shown, with a confidence of {confidence(audit)}.{blunt}"
    )


def _blunt(covered: list[Cell]) -> str:
    """That with these units no attack could have contradicted the guarantee, whatever it found."""
    pairs = [(cell.showable, cell.accounted) for cell in covered]
    if any(most is None or promised is None or most > promised for most, promised in pairs):
        return ""
    most = max(cell.showable or 0.0 for cell in covered)
    return f" With so few units no attack could have shown more than {at_most(most)}, so it could not be contradicted."


_COULD_NOT = "This audit could not have contradicted the run's guarantee"
_NO_EPSILON = (
    "no epsilon is accounted for what an audit does, which is to leave a unit out altogether. That is so where every client"
    " adds a share of the noise and stays to send it, where the guarantee is about a unit that is replaced by another, and"
    " where noise was seeded, which voids the guarantee. So nothing here says that it holds, nor that it does not."
)
_BOUNDS_OF_OTHERS = (
    "lower bounds were found only for adversaries against whom it promises nothing, such as a server that adds the noise"
    " itself."
)
_NO_BOUND = (
    "no attack gave a lower bound on epsilon that could be set against it, because none on membership gave a result, or because"
    " delta is too large for the number of units for anything to be shown."
)
