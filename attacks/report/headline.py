"""The head of an audit's page: the finding, the number of attacks behind it, and how to read its AUCs."""

from __future__ import annotations

from attacks.catalogue import ATTACKS
from attacks.report import significance
from attacks.report.audited import Audit
from attacks.report.sentences_membership import uncovered
from attacks.report.verdict import in_short
from attacks.report.wording import COIN, sides, units
from secure_fed.report.formatting import number as shown
from secure_fed.report.membership import WIDE

_HEADLINES = {
    "none_found": "Nothing was found",
    "within": "The finding is within the guarantee",
    "leak": "A leak was found, and {uncovered}",
    "violation": "The privacy guarantee is contradicted",
    "unsupported": "This audit cannot tell",
    "texts": "A leak was found: texts were read back",
    "part": "Nothing of membership was found, and part of the texts was read back",
}


def finding(audit: Audit, level: str) -> str:
    """The finding, as a sentence without its full stop."""
    return _HEADLINES[in_short(audit, level)].format(uncovered=uncovered(audit))


def headline(audit: Audit, level: str) -> str:
    """The finding, with the number of attacks behind it if not all were made."""
    found, made = finding(audit, level), tried_by_name(audit)
    if audit.asked_for:
        return f"{made}: {found[:1].lower()}{found[1:]}" if made else found
    return found + (able(audit) if in_short(audit, level) == "none_found" else "")


def able(audit: Audit) -> str:
    """The number of attacks that found nothing, if not all were made: " by 4 of 13 attacks ..."."""
    applied, total = len(_made(audit)), len(audit.attacks)
    if audit.asked_for or applied == total:
        return ""
    these = f"one attack of {total}" if applied == 1 else f"{applied} of {total} attacks"
    return f" by {these} that {'was' if applied == 1 else 'were'} possible"


def tried_by_name(audit: Audit) -> str:
    """The number of attacks made, if only some were requested: "1 of 13 attacks tried"."""
    made = _made(audit)
    own = sum(name not in ATTACKS for name in made)
    if not audit.asked_for or len(made) - own == len(ATTACKS):
        return ""
    beside = f" and {own} of your own" if own else ""
    return f"{len(made) - own} of {len(ATTACKS)} attacks{beside} tried"


def untried(audit: Audit) -> str:
    """The attacks that were not requested, in a sentence; empty if all were."""
    left = [one.title for name, one in ATTACKS.items() if name not in audit.asked_for]
    return f"Not tried: {'; '.join(left)}." if audit.asked_for and left else ""


def reading(audit: Audit) -> str:
    """The meaning of an AUC, and a note if the main one is below 1/2 or too uncertain."""
    cell = audit.main_cell or significance.strongest(audit.results)
    if cell is None:
        return ""
    member, non_member = sides(audit)
    meaning = (
        f"An AUC says how often an attack picks the right one of two {units(audit)}, one {member} and one {non_member}: 1 is"
        " always, 0.5 is a coin. An AUC below 0.5 does not show privacy: it is chance, or the score has the wrong sign."
    )
    if cell.interval is None or not cell.interval[0] <= COIN <= cell.interval[1]:
        return meaning
    low, high = cell.interval
    sizes = f"{shown(cell.members)} and {shown(cell.non_members)}"
    wide = f" Here the interval, {shown(low)} to {shown(high)}, is wide: {sizes} are too few to show whether there is a leak."
    return meaning + (wide if high - low > WIDE else "")


def _made(audit: Audit) -> set[str]:
    return {cell.attack for cell in audit.cells if cell.applicable}
