"""The first screen of the page (the verdict and two pictures) and the last section (the full verdict)."""

from __future__ import annotations

import math

from attacks.report import significance
from attacks.report.audited import NO_UNIT, Audit
from attacks.report.headline import finding, headline, reading, tried_by_name, untried
from attacks.report.page.curves import first_curve
from attacks.report.sentences_estimates import NAMES, estimates
from attacks.report.sentences_guarantee import blunt
from attacks.report.verdict import in_short
from attacks.report.wording import apart, at_least, confidence, promised, sides, unit_one, units, who
from secure_fed.report.formatting import at_most, percent
from secure_fed.report.formatting import number as shown
from secure_fed.report.page import pictures
from secure_fed.report.page.markup import facts, figure, figures, paragraph, section, text
from secure_fed.report.page.observers import limit
from secure_fed.report.page.pictures import Bar

_ALLOWED = "Allowed by the guarantee"


def name(audit: Audit) -> str:
    """The run's name, without its folders."""
    return audit.run.replace("\\", "/").rstrip("/").rpartition("/")[2] or "a run without a name"


def first_screen(audit: Audit, level: str, summary: str) -> str:
    """The verdict in one sentence, the pictures of epsilon and of the attack, then the finding in words and the key figures."""
    css = "privacy" if in_short(audit, level) in ("none_found", "within") else "privacy warning"
    rest = paragraph(untried(audit)) if untried(audit) else ""
    return (
        f'<header>\n<p class="kind">Privacy audit</p>\n<h1>{text(name(audit))}</h1>\n</header>\n'
        + section(headline(audit, level), paragraph(_ends(audit)), rest, css_class=css)
        + section(
            "The evidence",
            figures(_epsilons(audit), first_curve(audit)),
            paragraph(summary.removeprefix(f"{finding(audit, level)}.").strip(), "lead"),
            facts(_key(audit), "key"),
            paragraph(reading(audit), "after") if reading(audit) else "",
        )
    )


def for_the_record(body: str) -> str:
    """The full verdict with all of its evidence."""
    return section("The verdict for the record", paragraph(body, "recorded"))


def _key(audit: Audit) -> tuple[tuple[str, str], ...]:
    """The key figures: members and non-members, accuracy, main AUC, and both bounds on epsilon."""
    return (
        (f"{units(audit)} {' and '.join(sides(audit))}", f"{shown(audit.members)} and {shown(audit.non_members)}"),
        ("accuracy of the model", percent(audit.accuracy)),
        *_main_figures(audit),
        ("epsilon accounted", promised(audit)),
        ("epsilon, lower bound", at_least(_lower(audit))),
    )


def _epsilons(audit: Audit) -> str:
    """The guarantee's epsilon, the lower bound and the estimates on one scale, with what each means for a guess."""
    cell = next(iter(audit.bounded), None)
    lower = None if cell is None else cell.lower
    by = (
        ""
        if not lower or cell is None
        else f"Lower bar: the attack “{audit.attack_title(cell.attack)}”, by {who(audit, cell.vantage)}. "
    )
    unproven = [
        Bar(
            f"Estimate, {NAMES.get(one.name, one.name)}",
            one.epsilon,
            f"ε ≥ {at_least(one.epsilon)}",
            "--second",
            hollow=True,
        )
        for one in estimates(audit)
    ]
    shown = Bar("Shown by the audit", lower, f"ε ≥ {_apart(audit)[1]}" if lower else "nothing", "--second")
    drawn = pictures.limits("epsilon allowed and epsilon shown", (_guarantee(audit), shown, *unproven))
    return figure("Epsilon, allowed and shown", drawn, f"{by}{_AXIS}{_OUTLINES if unproven else ''}")


def _guarantee(audit: Audit) -> Bar:
    """The guaranteed epsilon to compare with; without a bar if no epsilon is comparable."""
    cell = next(iter(audit.bounded), None)
    if audit.unit == NO_UNIT:
        return Bar("Allowed, without a guarantee", math.inf, "no limit")
    if not audit.comparable:
        return Bar(_ALLOWED, None, "not comparable" if audit.protected else promised(audit))
    accounted = audit.epsilon if cell is None else cell.accounted
    if accounted is None:
        return Bar(_ALLOWED, math.inf, "no limit against this adversary")
    broken = cell is not None and significance.contradicts(cell, audit)
    return Bar(_ALLOWED, accounted, f"ε ≤ {_apart(audit)[0]}" if broken else limit(accounted, audit.delta or 0.0))


def _apart(audit: Audit) -> tuple[str, str]:
    """The guaranteed epsilon and the largest lower bound in words, with enough digits to show a contradiction."""
    cell = next(iter(audit.bounded), None)
    if cell is not None and significance.contradicts(cell, audit):
        return apart(cell.accounted or 0.0, cell.lower or 0.0)
    return at_most(audit.epsilon), at_least(_lower(audit))


def _main_figures(audit: Audit) -> list[tuple[str, str]]:
    """The main attack's AUC, and the AUC that a run with exactly this guarantee may show."""
    cell = audit.main_cell
    if cell is None:
        return []
    between = "" if cell.interval is None else f" ({shown(cell.interval[0])} to {shown(cell.interval[1])})"
    most = significance.allows(cell, audit)
    rows = [(f"AUC of {audit.attack_title(cell.attack)}", f"{shown(cell.auc)}{between}")]
    if most is None:
        return rows
    whose = "this mechanism" if most.by == "mechanism" else "this epsilon"
    return [*rows, (f"AUC that {whose} allows", shown(most.auc))]


def _lower(audit: Audit) -> float | None:
    """The largest lower bound, over the adversaries that the guarantee covers, or over all if it covers none."""
    return next((cell.lower for cell in audit.bounded), None)


def _untested(audit: Audit) -> str:
    """In words, the epsilon of a guarantee whose neighbouring data sets differ from the audit's."""
    if audit.promised is None:
        return ""
    return f", epsilon {at_most(audit.promised)} for neighbours that differ by {audit.adjacency or 'something else'}"


def _ends(audit: Audit) -> str:
    """The run's guarantee and the audit's finding, in two sentences."""
    made = "No attack that was tried" if tried_by_name(audit) else "No attack"
    lower, (allowed, shown) = _lower(audit), _apart(audit)
    promise = (
        f"The run promises at most epsilon {allowed} for {unit_one(audit.unit)}"
        f"{'' if audit.delta is None else f', at delta {audit.delta:g}'}."
        if audit.protected
        else "The run promises no epsilon."
        if audit.unit == NO_UNIT
        else f"The run's guarantee is for {unit_one(audit.unit)}{_untested(audit)}; it has no epsilon that coins can test."
    )
    found = (
        f"The audit shows that epsilon is at least {shown} for {unit_one(audit.audited)}, with a confidence of"
        f" {confidence(audit)}."
        if lower
        else f"{made} proves an epsilon above 0: the lower bound on it is 0.{blunt(audit)}"
        if lower is not None
        else "The audit gave no lower bound on it."
    )
    return f"{promise} {found}"


_AXIS = (
    "Axis: epsilon; below it, the largest share of right guesses that this epsilon allows on whether a unit was in the"
    " training, if yes and no are equally likely. A coin is right in 50 %."
)
_OUTLINES = " Outlined bars are estimates, which assume more and prove nothing."
