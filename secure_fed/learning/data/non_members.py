"""Rows that no client trains on, of the same kind as the training rows (`evaluation.non_members`), and rows that are both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secure_fed.errors import DataError
from secure_fed.learning.data import fingerprint
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.data.texts import normal_text


def require_apart(rows: Rows, trained: Rows) -> None:
    """Refuse rows of `evaluation.non_members` whose texts are also the texts of a training row, whatever their labels are."""
    members = set(_plain(trained))
    if both := [number for number, row in enumerate(_plain(rows), 1) if row in members]:
        raise _refused(len(both), both[0], "labels, white space and capitals do not count")


def require_apart_of_objects(examples: Sequence[Any], train: Sequence[Sequence[Any]]) -> None:
    """The same for a user's own examples, by their content; nothing is refused where their content cannot be read."""
    try:
        members = {fingerprint.content(own[index]) for own in train for index in range(len(own))}
        found = [fingerprint.content(examples[index]) in members for index in range(len(examples))]
    except TypeError:
        return
    if any(found):
        raise _refused(sum(found), found.index(True) + 1, "by their content")


def _refused(count: int, first: int, compared: str) -> DataError:
    return DataError(
        f"evaluation.non_members has {count} rows that are also training rows, such as row {first} ({compared}): what a client "
        "trains on is a member, so take them out"
    ).about("evaluation.non_members", count, "rows that no client trains on")


def _plain(rows: Rows) -> list[tuple[str, str]]:
    seconds = rows.text_b or ("",) * len(rows)
    return [(normal_text(one), normal_text(two)) for one, two in zip(rows.text, seconds, strict=True)]
