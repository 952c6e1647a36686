"""Figures of a cell that only its attack has, such as the recall of recovered words, each with its name."""

from __future__ import annotations

from attacks.report.reading import Cell
from attacks.report.values import Row, count, number, row, words
from secure_fed.report.formatting import number as shown
from secure_fed.report.formatting import percent

_OWN = {  # in this order, before all others
    "bag_recall": "words read back",
    "bag_precision": "words right",
    "recall": "in their places",
    "precision": "places right",
    "guessed_bag_recall": "words guessed",
    "guessed_bag_precision": "guesses right",
    "guessed_recall": "guessed in their places",
    "guessed_precision": "guessed places right",
    "baseline_bag_recall": "by the commonest public words",
    "baseline_recall": "in their places by the commonest",
}
_INSIDE = ("most_exposed", "most_exposed_guess", "all_rounds", "matching")


def measured(cell: Cell) -> list[tuple[str, str]]:
    """The numbers that an attack has of its own, words that were read back first, then those of single cases."""
    inside = [
        (f"{_title(name)}: {own}", value)
        for name in _INSIDE
        for own, value in _numbers_in(row(cell.measured.get(name)))
    ]
    return [*_numbers_in(cell.measured), *inside]


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
