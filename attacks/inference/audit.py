"""The audit of an attribute: guesses with and without the model, for training records and for others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attacks.adversary.null import Floats
from attacks.any_model.subject import Subject
from attacks.any_model.texts import Texts
from attacks.inference.attribute import Advantage, Bools, Indices, advantage, guesses, prior, without_model
from secure_fed.errors import DataError, UsageError
from secure_fed.learning.data import files
from secure_fed.learning.data.rows import Rows

ALPHA, FEWEST, MOST_VALUES = 0.05, 10, 50
_UNCUT = 2**30  # tokens
_WORDS, _USUAL = "words alone", "the most frequent value"  # guesses without the model
Say = Callable[[str], None]


@dataclass(frozen=True)
class Attribute:
    """values: all values that occur. of: (records,) the index of each record's value."""

    name: str
    values: tuple[str, ...]
    of: Indices


def attribute(subject: Subject, name: str) -> Attribute:
    """The column's values for members and others. Refuses texts that do not contain their value, and a single value for all."""
    asked = subject.asked
    if asked.others is None:
        raise UsageError("--attribute compares records of the training with others: name both files")
    written: list[str] = []
    places = (asked.members, "--members"), (asked.others, "--non-members")
    for (place, option), kept in zip(places, subject.kept, strict=True):
        column = files.read(place, [name], option).column(name, "--attribute")
        written += [str(column[row]) for row in kept]
    values = tuple(sorted(set(written)))
    if not 2 <= len(values) <= MOST_VALUES:
        raise UsageError(f"{name!r} has {len(values)} values: an attribute to guess must have from 2 to {MOST_VALUES}")
    for index, (text, value) in enumerate(zip(subject.texts.plain, written, strict=True)):
        if not _place(value).search(text):
            raise DataError(
                f"the text of {_row(index, subject)} does not contain its {name}, {value!r}, and so it cannot be "
                f"replaced: remove the row, or set --text to a column that contains the {name}"
            )
    found = Attribute(name, values, np.array([values.index(value) for value in written]))
    _require_read(subject, found)
    return found


def _require_read(subject: Subject, found: Attribute) -> None:
    """UsageError if the model would not read an attribute, since its text is cut before.

    Then a text with one value is, once cut, the same as with another.
    """
    length, count = subject.asked.max_length, len(subject.texts.rows)
    cut, whole = ([set[bytes]() for _ in range(count)] for _ in range(2))
    for index in range(len(found.values)):
        rows = _with_value(subject, found, index)
        for longest, seen in ((length, cut), (_UNCUT, whole)):
            for own, ids in zip(seen, subject.task.encode(subject.tokenizer, rows, longest).input_ids, strict=True):
                own.add(ids.tobytes())
    beyond = [index for index in range(count) if len(cut[index]) < len(whole[index])]
    if beyond:
        raise UsageError(
            f"in {len(beyond)} of {count} texts, such as {_row(beyond[0], subject)}, the {found.name} lies beyond the {length} "
            "tokens that are read: raise --max-length"
        )


def audited(subject: Subject, found: Attribute, say: Say) -> dict[str, Any]:
    """Guesses by the model, by words alone, and by the most frequent value, for members and others."""
    members: Bools = np.arange(len(subject.texts.rows)) < subject.texts.members
    if min(members.sum(), (~members).sum()) < FEWEST:
        raise UsageError(
            f"there are {members.sum()} members and {(~members).sum()} others: give at least {FEWEST} of each"
        )
    losses = np.stack(
        [_losses(subject, found, index, say) for index in range(len(found.values))], axis=1
    )  # (records, values)
    shares = prior(found.of[~members], len(found.values))
    stripped = [_put(text, found.values[own], " ") for text, own in zip(subject.texts.plain, found.of, strict=True)]
    guessed = {
        "the model": guesses(losses, shares),
        _WORDS: without_model(stripped, found.of, members),
        _USUAL: np.full(len(members), int(shares.argmax())),
    }
    rows = {name: advantage(own == found.of, members) for name, own in guessed.items()}
    return {
        "schema": 1,
        "model": subject.asked.model,
        "adapter": None if subject.asked.adapter is None else str(subject.asked.adapter),
        "attribute": found.name,
        "values": len(found.values),
        "members": int(members.sum()),
        "non_members": int((~members).sum()),
        "guesses": [_to_dict(name, one) for name, one in rows.items()],
        "verdict": _verdict(rows),
        "sentences": _sentences(found.name, rows),
    }


def _row(index: int, subject: Subject) -> str:
    """A row of one of the two files, counted from 1."""
    members, others = subject.kept
    if index < len(members):
        return f"row {members[index] + 1} of --members"
    return f"row {others[index - len(members)] + 1} of --non-members"


def _place(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(value)}(?!\w)")


def _put(text: str, value: str, other: str) -> str:
    return _place(value).sub(lambda match: other, text)


def _with_value(subject: Subject, found: Attribute, index: int) -> Rows:
    """The records with this value instead of their own."""
    rows, own = subject.texts.rows, found.of

    def changed(texts: Sequence[Any]) -> tuple[str, ...]:
        return tuple(_put(text, found.values[old], found.values[index]) for text, old in zip(texts, own, strict=True))

    return replace(rows, text=changed(rows.text), text_b=rows.text_b and changed(rows.text_b))


def _losses(subject: Subject, found: Attribute, index: int, say: Say) -> Floats:
    """(records,) -log P of each record (or of its label) under the model, with this value instead of its own."""
    say(f"reading the records with {found.name} = {found.values[index]}")
    rows = _with_value(subject, found, index)
    encoded = subject.task.encode(subject.tokenizer, rows, subject.asked.max_length)
    changed_subject = replace(subject, texts=Texts(rows, subject.texts.members, encoded))
    if subject.language_model:  # its loss is a mean over tokens
        return np.array([-one.said.sum() for one in changed_subject.tokens()])
    return changed_subject.losses()


def _to_dict(name: str, one: Advantage) -> dict[str, Any]:
    return {
        "by": name,
        "members": one.members,
        "others": one.others,
        "advantage": one.advantage,
        "p_value": one.p_value,
    }


def _verdict(rows: dict[str, Advantage]) -> str:
    """Void if members and others differ by a guess without the model; they would then differ without any training."""
    if min(rows[_WORDS].p_value, rows[_USUAL].p_value) < ALPHA:
        return "void"
    return "leak" if rows["the model"].p_value < ALPHA else "nothing"


def _sentences(name: str, rows: dict[str, Advantage]) -> list[str]:
    model, words, usual = rows["the model"], rows[_WORDS], rows[_USUAL]
    without, by = (
        (words, "their words") if words.p_value <= usual.p_value else (usual, f"the shares of the values of {name}")
    )
    shares = f"{model.members:.1%} of the members and {model.others:.1%} of the others"
    first = {
        "void": f"Members and others differ by {by}: without the model {name} is guessed for {without.members:.1%} of the "
        f"members and {without.others:.1%} of the others. So the model's guesses say nothing about its training.",
        "leak": f"The model gives away {name} of its training records: it guesses right for {shares}. Chance makes as "
        f"large a difference with a probability of {model.p_value:.2g}.",
        "nothing": f"The model guesses {name} right for {shares}: no larger difference than by chance "
        f"(probability {model.p_value:.2g}).",
    }[_verdict(rows)]
    second = f"Without any model, words alone are right for {words.members:.1%} and {words.others:.1%}."
    return [first, second]
