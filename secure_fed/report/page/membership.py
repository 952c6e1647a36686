"""Membership inference as measured by the run itself: how well the model separates members from non-members.

One attack, the cheapest one, on units whose membership was decided by coins. Finding nothing is reported as that and never as
privacy. The audit of the run, if there is one, is a page of its own and linked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secure_fed.report.formatting import MISSING, number, percent
from secure_fed.report.page.markup import facts, link, paragraph, section, subsection
from secure_fed.report.page.record import RunRecord

_CHANCE = 0.5


def membership(record: RunRecord) -> str:
    """Accuracy, AUC and true-positive rates with their meaning; empty where nothing was measured or audited."""
    found, own = measured(record), (record.result or {}).get("membership_of_data") or {}
    measured_here = "" if not found else _reported(record, found)
    of_data = subsection("Units of the data: only for those who hold the data", _reported(record, own)) if own else ""
    # In a private run only the page in the private folder has the link, and lies beside the audit.
    path = record.audit.rpartition("/")[2] if record.private else record.audit
    audit = link(path, _AUDIT) if path else ""
    return section("Membership inference: what the model reveals", measured_here, of_data, audit)


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
    """`(false-positive rate, share of members caught there with its interval)`, the largest rate first."""
    found_at = [(float(target), rate) for target, rate in (found.get("tpr_at_fpr") or {}).items()]
    return [(target, _rate(found, target, rate)) for target, rate in sorted(found_at, key=lambda one: -one[0])]


def _reported(record: RunRecord, found: Mapping[str, Any]) -> str:
    if found.get("auc") is None:
        why = str(found.get("why") or "it was not measured")
        return paragraph(f"Not measured: {why}.", "notice") + paragraph(_SILENT)
    key = (
        ("accuracy", percent(record.last("accuracy"))),
        ("membership AUC (a coin: 0.5)", auc(found)),
        (_sides(found), f"{number(found.get('members'))}, {number(found.get('non_members'))}"),
    )
    caught = [(f"members caught at {100 * target:g} % false accusations", rate) for target, rate in rates(found)]
    silent = _SILENT_PHANTOMS if _phantoms(found) else _SILENT
    return (
        paragraph(_meaning(found)) + facts(key, "key") + (facts(caught, "terms") if caught else "") + paragraph(silent)
    )


def _phantoms(found: Mapping[str, Any]) -> bool:
    return found.get("of") == "phantoms"


def _sides(found: Mapping[str, Any]) -> str:
    return "phantoms that pulled, and that did not" if _phantoms(found) else "in the training, and held out"


def _meaning(found: Mapping[str, Any]) -> str:
    if _phantoms(found):
        count = number(int(found.get("members") or 0) + int(found.get("non_members") or 0))
        right = f"{100 * float(found['auc']):.0f}"
        beside = _PAIRS.get(str(found.get("unit")), _PAIRS["example"])[0]
        return (
            f"{count} phantoms took part beside the {beside}. They are nobody's data. A coin decided for each whether it pulls"
            " the model along a random direction of its own whenever it is drawn, by the clip norm, the most that anybody may."
            " The attack sees everything that was released. Of a phantom that pulled and one that did not, it names the one"
            f" along whose direction the model moved further. It is right in {right} of 100 pairs, a coin in 50."
            f" {_judgement(found, 'a phantom')}"
        )
    whose = _PAIRS.get(str(found.get("unit")), _PAIRS["example"])
    right = f"{100 * float(found['auc']):.0f}"
    return (
        f"Of one that trained and one that was left out, the attack names the one that trained in {right} of 100 pairs; a coin"
        f" does in 50. {_judgement(found, whose[1])} Before training, coins decided which of some {whose[0]} were left out. The"
        " attack has the final model, and names the one that the model fits better."
    )


def _judgement(found: Mapping[str, Any], one: str) -> str:
    between = found.get("auc_interval")
    if not between:
        return ""
    low, high = map(float, between)
    interval = f"The 95 % interval is {100 * low:.1f} to {100 * high:.1f}"
    if low > _CHANCE:
        return f"{interval}: the model reveals something about whether {one} was in its training."
    if high < _CHANCE:
        return f"{interval}, below a coin. That is not privacy: the opposite guess is right more often than a coin."
    return f"{interval}: this attack found nothing."


def _rate(found: Mapping[str, Any], target: float, rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        others = "phantoms that did not pull" if _phantoms(found) else "held out"
        return f"not stated: {number(found.get('non_members'))} {others} are too few for a rate of {100 * target:g} %"
    accused = f"{percent(rate.get('fpr'))}{_share(rate.get('fpr_interval'))} falsely accused"
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
    "This is the cheapest attack, and it uses the final model only. Finding nothing is no sign of privacy: whoever sees more"
    " than the model may learn more. secure-fed audit tries stronger attacks."
)
_SILENT_PHANTOMS = (
    "These figures are computed from what was released, so the guarantee covers them as it covers the model. A phantom that"
    " pulls changes the model as much as anybody may, usually more than real data do, so it is easier to detect. secure-fed"
    " audit compares what phantoms show with the guarantee."
)
_AUDIT = "The audit of this run: every attack, from every vantage point"
