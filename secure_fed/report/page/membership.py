"""What the run itself measured of membership, beside accuracy: how well the model tells who was in its training.

One attack, the cheapest there is, on units whose membership was decided by coins. Finding nothing is told as that and never as
privacy; the audit of the run, where there is one, is a page of its own and linked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secure_fed.report.formatting import MISSING, number, percent
from secure_fed.report.page.markup import facts, link, paragraph, section, subsection
from secure_fed.report.page.record import RunRecord

_CHANCE = 0.5


def membership(record: RunRecord) -> str:
    """Accuracy, AUC and true-positive rates side by side, and what they mean; empty where nobody looked and nobody audited."""
    found, own = measured(record), (record.result or {}).get("membership_of_data") or {}
    told = "" if not found else _told(record, found)
    of_data = subsection("Units of the data, for those who hold them", _told(record, own)) if own else ""
    audit = link(_from_page(record), _AUDIT) if record.audit else ""
    return section("Who was in the training, as the model tells it", told, of_data, audit)


def _from_page(record: RunRecord) -> str:
    """Where the audit is, seen from the page that may tell of it: that of a private run lies beside the audit."""
    return record.audit.rpartition("/")[2] if record.private else record.audit


def measured(record: RunRecord) -> Mapping[str, Any]:
    """The membership part of the result; empty where there is none."""
    return (record.result or {}).get("membership") or {}


def auc(found: Mapping[str, Any]) -> str:
    """The AUC with its interval: "0.531 (0.501 to 0.560)"."""
    if found.get("auc") is None:
        return MISSING
    between = found.get("auc_interval")
    return number(float(found["auc"])) + (f" ({_between(between)})" if between else "")


def rates(found: Mapping[str, Any]) -> list[tuple[float, str]]:
    """By false-positive rate, the largest first: the share of members that is caught there, with its interval."""
    told = [(float(target), rate) for target, rate in (found.get("tpr_at_fpr") or {}).items()]
    return [(target, _rate(found, target, rate)) for target, rate in sorted(told, key=lambda one: -one[0])]


def _told(record: RunRecord, found: Mapping[str, Any]) -> str:
    if found.get("auc") is None:
        why = str(found.get("why") or "it was not measured")
        return paragraph(f"Not measured: {why}.", "notice") + paragraph(_SILENT)
    key = (
        ("accuracy", percent(record.last("accuracy"))),
        ("membership AUC (0.5 is a coin)", auc(found)),
        (_sides(found), f"{number(found.get('members'))}, {number(found.get('non_members'))}"),
    )
    caught = [(f"members caught, {100 * target:g} % falsely accused", rate) for target, rate in rates(found)]
    silent = _SILENT_PHANTOMS if _phantoms(found) else _SILENT
    return (
        paragraph(_meaning(found)) + facts(key, "key") + (facts(caught, "terms") if caught else "") + paragraph(silent)
    )


def _phantoms(found: Mapping[str, Any]) -> bool:
    return found.get("of") == "phantoms"


def _sides(found: Mapping[str, Any]) -> str:
    return "phantoms that pulled, that did not" if _phantoms(found) else "in training, held out"


def _meaning(found: Mapping[str, Any]) -> str:
    if _phantoms(found):
        count = number(int(found.get("members") or 0) + int(found.get("non_members") or 0))
        right = f"{100 * float(found['auc']):.0f}"
        beside = _PAIRS.get(str(found.get("unit")), _PAIRS["example"])[0]
        return (
            f"Beside the {beside} stood {count} phantoms, which are nobody's data. A coin decided of each whether it pulled the"
            " model along a random direction of its own, as hard as the clip norm lets anybody. Shown one that pulled and one"
            " that did not, somebody who has all that was released, and calls the one a member along whose direction it went"
            f" further, is right in {right} of 100 cases, where a coin is right in 50. {_judgement(found, 'a phantom')}"
        )
    whose = _PAIRS.get(str(found.get("unit")), _PAIRS["example"])
    right = f"{100 * float(found['auc']):.0f}"
    return (
        f"Before training, coins decided which of some {whose[0]} were left out. Shown one that trained and one that was left"
        f" out, somebody who has the final model and calls the one a member that it fits better is right in {right} of 100"
        f" cases, where a coin is right in 50. {_judgement(found, whose[1])}"
    )


def _judgement(found: Mapping[str, Any], one: str) -> str:
    between = found.get("auc_interval")
    if not between:
        return ""
    low, high = map(float, between)
    told = f"The 95 % interval is {100 * low:.1f} to {100 * high:.1f}"
    if low > _CHANCE:
        return f"{told}: the model gives away something of whether {one} was in its training."
    if high < _CHANCE:
        return (
            f"{told}, below a coin. That is not privacy: turned round, the same guess is right more often than a coin."
        )
    return f"{told}: this attack found nothing."


def _rate(found: Mapping[str, Any], target: float, rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        others = "phantoms that did not pull" if _phantoms(found) else "held out"
        return f"refused: {number(found.get('non_members'))} {others} cannot show a rate of {100 * target:g} %"
    accused = f"{percent(rate.get('fpr'))}{_share(rate.get('fpr_interval'))} accused"
    return f"{percent(rate['tpr'])}{_share(rate.get('tpr_interval'))}, with {accused}"


def _between(interval: Any) -> str:
    low, high = map(float, interval)
    return f"{number(low)} to {number(high)}"


def _share(interval: Any) -> str:
    if not interval:
        return ""
    low, high = map(float, interval)
    return f" ({percent(low)} to {percent(high)})"


_PAIRS = {
    "example": ("examples", "an example"),
    "group": ("groups of examples", "a group"),
    "client": ("clients", "a client"),
}
_SILENT = (
    "This is the cheapest attack there is, with the final model alone. That it finds nothing is no sign of privacy, and whoever"
    " sees more than the model may learn more: secure-fed audit tries stronger ones."
)
_SILENT_PHANTOMS = (
    "These figures are made of what was released, so that the guarantee covers them as it covers the model. A phantom pulls"
    " harder than real data do, and up to what the guarantee allows it may be seen. secure-fed audit holds what phantoms show"
    " against the guarantee."
)
_AUDIT = "The audit of this run: every attack, from every vantage point"
