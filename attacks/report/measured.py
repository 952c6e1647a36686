"""Figures that are specific to a cell's attack, such as the recall of recovered words, each with its name."""

from __future__ import annotations

from attacks.report.audited import Cell
from attacks.report.values import Row, count, number, row, words
from secure_fed.report.formatting import number as shown
from secure_fed.report.formatting import percent

_OWN = {  # shown first, in this order
    "bag_recall": "word recall",
    "bag_precision": "word precision",
    "recall": "recall with position",
    "precision": "precision with position",
    "guessed_bag_recall": "guessed word recall",
    "guessed_bag_precision": "guessed word precision",
    "guessed_recall": "guessed recall with position",
    "guessed_precision": "guessed precision with position",
    "baseline_bag_recall": "word recall of common words",
    "baseline_recall": "recall with position of common words",
}
_INSIDE = ("most_exposed", "most_exposed_guess", "all_rounds", "matching")
BY_COHORT = "by_cohort"  # recall by the number of clients in a sum


def measured(cell: Cell) -> list[tuple[str, str]]:
    """The attack-specific numbers: shares of recovered words first, then numbers for single cases."""
    inside = [
        (f"{_title(name)}: {own}", value)
        for name in _INSIDE
        for own, value in _numbers_in(row(cell.measured.get(name)))
    ]
    return [*_numbers_in(cell.measured), *inside, *_by_cohort(row(cell.measured.get(BY_COHORT)))]


def _by_cohort(recalls: Row) -> list[tuple[str, str]]:
    """The recall from sums over different numbers of clients."""
    noun = {"1": "client"}
    return [
        (f"recall with position, {clients} {noun.get(clients, 'clients')} in a sum", percent(found))
        for clients, value in recalls.items()
        if (found := number(value)) is not None
    ]


def _numbers_in(figures: Row) -> list[tuple[str, str]]:
    order = list(_OWN)
    found = [(name, value) for name, value in figures.items() if number(value) is not None]
    found.sort(key=lambda entry: order.index(entry[0]) if entry[0] in order else len(order))
    return [(_title(name), _value(name, value)) for name, value in found]


def _title(name: str) -> str:
    return _OWN.get(name, words(name).replace("_", " "))


def _value(name: str, value: object) -> str:
    found = number(value)
    if found is not None and name.endswith(("recall", "precision", "baseline")):
        return percent(found)
    return shown(count(value)) if isinstance(value, int) else shown(found)
