"""Texts recovered by the attacks of an audit: attempts of a cell, and the grade of the best (`attacks.evidence.attempts`)."""

from __future__ import annotations

from collections.abc import Iterator

from attacks.evidence.attempts import Attempt, Grade, best, exact, guessed, matched
from attacks.report.audited import Cell
from attacks.report.values import Row, count, row


def attempts(cell: Cell) -> tuple[Attempt, ...]:
    """Every attempt of an attack on texts that has a number."""
    return () if cell.of_membership else tuple(one for one in _all(cell.measured) if one.mean.most is not None)


def grade(cell: Cell) -> Grade | None:
    """The grade of the best attempt; None for an attack that is not on texts."""
    found = best(attempts(cell))
    return None if found is None else found.grade


def _all(measured: Row) -> Iterator[Attempt]:
    together = row(measured.get("all_rounds"))
    for figures, of_all in ((measured, False), (together, True)):
        looked, applied = count(figures.get("updates")), count(figures.get("exact_applicable"))
        most = row(figures.get("most_exposed"))
        yield Attempt("exact", exact(figures), exact(most) if most else None, of_all, looked, applied)
        most = row(figures.get("most_exposed_guess"))
        yield Attempt("guessed", guessed(figures), guessed(most) if most else None, of_all, looked)
    optimised = row(measured.get("matching"))
    yield Attempt("matched", matched(optimised), looked=count(optimised.get("updates")))
