"""Entities as tags spell them, and how many of them were found.

Tags are IOB2: B-TYPE begins an entity, I-TYPE goes on with it, O is outside. An I-TYPE that goes on with no entity of its type
begins one, as in the script of the CoNLL shared tasks: models write such tags, and so do annotators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

OUTSIDE = "O"


class Entity(NamedTuple):
    """Words `start` to `end` - 1."""

    type: str
    start: int
    end: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, in order."""
    found: list[Entity] = []
    for index, tag in enumerate(tags):
        mark, _, kind = tag.partition("-")
        goes_on = bool(found) and found[-1].end == index and found[-1].type == kind
        if mark == "I" and goes_on:
            found[-1] = found[-1]._replace(end=index + 1)
        elif mark in ("B", "I"):
            found.append(Entity(kind, index, index + 1))
    return found


def entity_scores(guesses: Iterable[Sequence[str]], truths: Iterable[Sequence[str]]) -> dict[str, float]:
    """precision, recall and f1 over all sentences: an entity is found if its type and both its ends are.

    Each is 0 where its denominator is, as when nothing was guessed.
    """
    right = guessed = true = 0
    for guess, truth in zip(guesses, truths, strict=True):
        ours, theirs = set(entities(guess)), set(entities(truth))
        right, guessed, true = right + len(ours & theirs), guessed + len(ours), true + len(theirs)
    return {
        "precision": right / guessed if guessed else 0.0,
        "recall": right / true if true else 0.0,
        "f1": 2 * right / (guessed + true) if guessed + true else 0.0,
    }
