"""The membership figure in words: its meaning, also below a coin's, and whether there are too few units for a conclusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secure_fed.report.formatting import MISSING, number, percent

FOR_THE_OWNER = (
    "the owner of the data alone: computed from its rows without noise, so no guarantee covers it; show it to nobody"
)
_CHANCE = 0.5
WIDE = 0.1  # a wider interval around a coin excludes neither "no leak" nor a leak that matters


def auc(found: Mapping[str, Any]) -> str:
    """The AUC with its interval: "0.531 (0.501 to 0.560)"."""
    if found.get("auc") is None:
        return MISSING
    between = found.get("auc_interval")
    return number(float(found["auc"])) + (f" ({_between(between)})" if between else "")


def short(found: Mapping[str, Any]) -> str:
    """The AUC, or that there is none; the reason is elsewhere in the report."""
    return "no figure (why: below)" if found.get("auc") is None else auc(found)


def name(found: Mapping[str, Any]) -> str:
    """The name of the figure, which is about phantoms in a run that has them."""
    return "membership AUC of phantoms" if of_phantoms(found) else "membership AUC"


def rates(found: Mapping[str, Any]) -> list[tuple[float, str]]:
    """`(false-positive rate, share of members caught there with its interval)`, the largest rate first."""
    found_at = [(float(target), rate) for target, rate in (found.get("tpr_at_fpr") or {}).items()]
    return [(target, _rate(found, target, rate)) for target, rate in sorted(found_at, key=lambda one: -one[0])]


def of_phantoms(found: Mapping[str, Any]) -> bool:
    return found.get("of") == "phantoms"


def of_rows(found: Mapping[str, Any]) -> bool:
    """Whether no coin decided who trained."""
    return found.get("of") == "rows"


def unit(found: Mapping[str, Any]) -> tuple[str, str]:
    """The units, and one of them, in words."""
    return _UNITS.get(str(found.get("unit")), _UNITS["example"])


def meaning(found: Mapping[str, Any]) -> str:
    """The meaning of the AUC in a sentence, and the judgement on it; empty where nothing was measured."""
    if found.get("auc") is None:
        return ""
    right = f"{100 * float(found['auc']):.0f}"
    other = "one that did not" if of_rows(found) else "one that was held out"
    pair = (
        "Of a phantom that contributed and one that did not, the attack names the one that did"
        if of_phantoms(found)
        else f"Of {unit(found)[1]} that trained and {other}, the attack names the one that trained"
    )
    return f"{pair} in {right} of 100 pairs; a coin does in 50. {judgement(found)}".strip()


def judgement(found: Mapping[str, Any]) -> str:
    """The conclusion that the interval allows; empty without an interval."""
    between = found.get("auc_interval")
    if not between:
        return ""
    low, high = map(float, between)
    interval = f"The 95 % interval is {100 * low:.1f} to {100 * high:.1f}"
    if low > _CHANCE and of_phantoms(found):
        return f"{interval}: phantoms that contributed can be distinguished from others. {_ALLOWED}"
    if low > _CHANCE and of_rows(found):
        return f"{interval}: the model fits rows that trained better than the others, unless these are of another kind."
    if low > _CHANCE:
        return f"{interval}: the model reveals something about whether {unit(found)[1]} was in its training."
    if high < _CHANCE:
        return f"{interval}, below a coin. That is not privacy: the opposite guess is right more often than a coin."
    below = " A value below 50 is chance; it does not show privacy." if float(found["auc"]) < _CHANCE else ""
    if high - low > WIDE:
        sizes = f"{number(found.get('members'))} and {number(found.get('non_members'))}"
        return f"{interval}: {sizes} are too few to show whether there is a leak.{below}"
    return f"{interval}: this attack found nothing.{below}"


def _rate(found: Mapping[str, Any], target: float, rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        others = (
            "phantoms that did not contribute"
            if of_phantoms(found)
            else "that did not train"
            if of_rows(found)
            else "held out"
        )
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


_ALLOWED = "That is no leak by itself, since an epsilon allows some of it: secure-fed audit says how much."
_UNITS = {
    "example": ("examples", "an example"),
    "group": ("groups of examples", "a group"),
    "client": ("clients", "a client"),
}
