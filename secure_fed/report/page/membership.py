"""Membership inference as measured by the run itself: how well the model separates members from non-members.

One attack, the cheapest one, on units whose membership was decided by coins. A negative result is reported as such and never as
privacy. The audit of the run, if there is one, is a separate, linked page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secure_fed.report.formatting import number, percent
from secure_fed.report.membership import FOR_THE_OWNER, auc, meaning, name, of_phantoms, of_rows, rates, unit
from secure_fed.report.page.markup import facts, link, paragraph, section, subsection
from secure_fed.report.page.record import RunRecord


def membership(record: RunRecord) -> str:
    """Accuracy, AUC and true-positive rates with their meaning; empty where nothing was measured or audited."""
    found = measured(record)
    measured_here = "" if not found else _reported(record, found)
    of_data = "".join(_of_data(record, title, key) for title, key in _OF_DATA)
    # In a private run only the page in the private folder has the link, and lies beside the audit.
    path = record.audit.rpartition("/")[2] if record.private else record.audit
    audit = link(path, _AUDIT) if path else ""
    return section("Membership inference: what the model reveals", measured_here, of_data, audit)


def _of_data(record: RunRecord, title: str, key: str) -> str:
    """Figures of the data itself; a private run's are in the owner's page alone."""
    if not (found := (record.result or {}).get(key) or {}):
        return ""
    whose = paragraph(f"For {FOR_THE_OWNER}.", "notice") if record.private else ""
    return subsection(title, whose + _reported(record, found))


def measured(record: RunRecord) -> Mapping[str, Any]:
    """The membership part of the result; empty where there is none."""
    return (record.result or {}).get("membership") or {}


def _reported(record: RunRecord, found: Mapping[str, Any]) -> str:
    if found.get("auc") is None:
        why = str(found.get("why") or "it was not measured")
        return paragraph(f"No figure: {why}.", "notice") + paragraph(_SILENT)
    key = (
        ("accuracy", percent(record.last("accuracy"))),
        (f"{name(found)} (a coin: 0.5)", auc(found)),
        (_sides(found), f"{number(found.get('members'))}, {number(found.get('non_members'))}"),
    )
    caught = [(f"members found at {100 * target:g} % false positives", rate) for target, rate in rates(found)]
    silent = _SILENT_PHANTOMS if of_phantoms(found) else _SILENT
    return (
        paragraph(_meaning(found)) + facts(key, "key") + (facts(caught, "terms") if caught else "") + paragraph(silent)
    )


def _meaning(found: Mapping[str, Any]) -> str:
    """How it was measured, then what the figure means."""
    if of_phantoms(found):
        count = number(int(found.get("members") or 0) + int(found.get("non_members") or 0))
        return (
            f"{count} phantoms took part beside the {unit(found)[0]}. They are nobody's data. A coin decided for each whether"
            " it contributes a random direction of its own whenever it is drawn, as long as the clip norm, the most that"
            " anybody may. The attack sees everything that was released, and goes by how far the model moved along each"
            f" direction. {meaning(found)}"
        )
    if of_rows(found):
        return f"{meaning(found)} {found['misleads']}"
    return (
        f"{meaning(found)} Before training, coins decided which of some {unit(found)[0]} were left out. The attack has the"
        " final model, and names the one that the model fits better."
    )


def _sides(found: Mapping[str, Any]) -> str:
    if of_rows(found):
        return "rows that trained, that did not"
    return "phantoms that contributed, that did not" if of_phantoms(found) else "members, held out"


_OF_DATA = (
    ("Units of the data", "membership_of_data"),
    ("Rows that trained, and rows that did not", "membership_of_rows"),
)
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
