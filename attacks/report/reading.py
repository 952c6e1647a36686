"""audit.json as typed values. Missing and invalid values are None or empty.

An audit may be old, cut short or edited by hand, and its reader should still see the rest. So nothing here raises, and no
number is made up: an unreadable value is missing, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attacks.report.audited import NO_UNIT, Allowed, Audit, Baseline, Cell, Estimated, Named, Tail
from attacks.report.values import Row, count, interval, number, row, rows, share, words


def read(audit: Mapping[str, Any]) -> Audit:
    """The audit as typed values, as far as it can be read."""
    fields = row(audit)
    unit = words(fields.get("unit")) or NO_UNIT
    return Audit(
        run=words(fields.get("run_dir")),
        method=words(fields.get("method")),
        unit=unit,
        audited=words(fields.get("audited_unit")) or ("example" if unit == NO_UNIT else unit),
        epsilon=number(fields.get("epsilon_accounted")),
        delta=number(fields.get("delta")),
        accuracy=number(fields.get("accuracy")),
        members=count(fields.get("members")),
        non_members=count(fields.get("non_members")),
        significance=share(fields.get("significance"), 0.05),
        baseline=_baseline(row(fields.get("baseline"))),
        vantages=_named(fields, "vantages", "vantage", "sees"),
        attacks=_named(fields, "attacks", "attack", "paper"),
        cells=tuple(_cell(one, fields) for one in rows(fields.get("cells"))),
        roc={words(name): row(curve) for name, curve in row(fields.get("roc")).items()},
        clients=rows(fields.get("clients")),
        exposed=rows(fields.get("exposed")),
        sweep=rows(fields.get("sweep")),
        verdict=row(fields.get("verdict")),
        canaries=words(fields.get("canaries")) or "none",
        promised=number(fields.get("epsilon_promised")),
        adjacency=words(fields.get("adjacency")),
        asked_for=_names(fields.get("asked_for")),
        personal=_names(fields.get("personal")),
        main=_main(row(fields.get("main"))),
        accusations=rows(fields.get("accusations")),
        expected=number(row(fields.get("expected")).get("epsilon_lower")),
        phantoms=words(fields.get("audited_of")) == "phantoms",
    )


def _main(fields: Row) -> tuple[str, str] | None:
    attack, vantage = words(fields.get("attack")), words(fields.get("vantage"))
    return (attack, vantage) if attack and vantage else None


def _names(value: object) -> tuple[str, ...]:
    return tuple(filter(None, map(words, value))) if isinstance(value, list | tuple) else ()


def _cell(one: Row, fields: Row) -> Cell:
    applicable = one.get("applicable") is not False
    return Cell(
        attack=words(one.get("attack")),
        vantage=words(one.get("vantage")),
        applicable=applicable,
        why=words(one.get("why")),
        auc=number(one.get("auc")) if applicable else None,
        interval=interval(one.get("auc_interval")) if applicable else None,
        tails=_tails(row(one.get("tpr_at_fpr"))) if applicable else (),
        lower=number(one.get("epsilon_lower")) if applicable else None,
        how=words(one.get("epsilon_how")),
        accounted=_accounted(one, fields),
        members=_own(one, fields, "members"),
        non_members=_own(one, fields, "non_members"),
        measured=row(one.get("measured")) if applicable else {},
        note=words(one.get("note")),
        seconds=number(one.get("seconds")),
        showable=number(one.get("epsilon_showable")) if applicable else None,
        null=words(one.get("null")),
        estimates=_estimates(one.get("estimates")) if applicable else (),
        allowed=_allowed(row(one.get("allowed"))),
    )


def _estimates(value: object) -> tuple[Estimated, ...]:
    found = ((words(one.get("name")), number(one.get("epsilon")), number(one.get("point"))) for one in rows(value))
    return tuple(Estimated(name, epsilon, point) for name, epsilon, point in found if name and epsilon is not None)


def _allowed(fields: Row) -> Allowed | None:
    auc = number(fields.get("auc"))
    if auc is None:
        return None
    rates = {float(name): number(rate) for name, rate in row(fields.get("tpr_at_fpr")).items() if _is_rate(name)}
    return Allowed(auc, {at: rate for at, rate in rates.items() if rate is not None}, words(fields.get("by")))


def _is_rate(name: object) -> bool:
    try:
        return math.isfinite(float(name))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _accounted(one: Row, fields: Row) -> float | None:
    """The epsilon that holds against this adversary, None without one: the cell's, else its vantage point's, else the run's."""
    at = next((seen for seen in rows(fields.get("vantages")) if seen.get("name") == one.get("vantage")), {})
    for place in (one, at):
        if "epsilon_accounted" in place:
            return number(place["epsilon_accounted"])
    return number(fields.get("epsilon_accounted"))


def _own(one: Row, fields: Row, name: str) -> int | None:
    return next((found for found in (count(at.get(name)) for at in (one, fields)) if found is not None), None)


def _tails(fields: Row) -> tuple[Tail, ...]:
    found = []
    for name, rates in fields.items():
        if not _is_rate(name):
            continue
        at = row(rates)
        tpr, fpr = number(at.get("tpr")), number(at.get("fpr"))
        found.append(Tail(float(name), tpr, interval(at.get("tpr_interval")), fpr, interval(at.get("fpr_interval"))))
    return tuple(sorted(found, key=lambda tail: -tail.target))


def _baseline(fields: Row) -> Baseline:
    auc, about = number(fields.get("auc")), interval(fields.get("auc_interval"))
    at_chance = fields.get("at_chance")
    if not isinstance(at_chance, bool):
        at_chance = None if about is None else about[0] <= 0.5
    return Baseline(auc, about, at_chance, words(fields.get("why")))


def _named(fields: Row, several: str, one: str, about: str) -> tuple[Named, ...]:
    """The listed ones in their order, then any that only cells name."""
    listed = {words(entry.get("name")): entry for entry in rows(fields.get(several))}
    every: dict[str, Row] = {words(cell.get(one)): {} for cell in rows(fields.get("cells"))}
    every = {**listed, **{name: entry for name, entry in every.items() if name not in listed}}
    return tuple(
        Named(name, words(entry.get("title")) or name, words(entry.get(about))) for name, entry in every.items() if name
    )
