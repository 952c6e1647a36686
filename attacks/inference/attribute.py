"""Attribute inference: the adversary knows a record except for one attribute, and guesses the value that fits the model best.

    guess(x) = argmax over v of P(v) exp(-loss(x with v))                     (after Yeom et al. 2018, section 4)

P(v) is the share of a value among records outside the training. A model that has learned how the attribute depends on the rest
guesses well for every record. Only better guesses for training records than for others reveal these records: the attribute
advantage (in the same section) is the difference of the two shares of right guesses. Beside it stand guesses without the model:
by words alone, and of the most frequent value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.null import Bools, Floats
from attacks.any_model.subject import Subject
from attacks.options import Say
from secure_fed.errors import DataError, UsageError
from secure_fed.learning.data import files
from secure_fed.learning.data.rows import Rows

Indices = NDArray[np.int64]
ALPHA, FEWEST, MOST_VALUES = 0.05, 10, 50
_UNCUT = 2**30  # tokens
_WORDS, _USUAL = "words alone", "the most frequent value"  # guesses without the model


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
    # (records, values)
    losses = np.stack([_losses(subject, found, index, say) for index in range(len(found.values))], axis=1)
    shares = prior(found.of[~members], len(found.values))
    stripped = [_put(text, found.values[own], " ") for text, own in zip(subject.texts.plain, found.of, strict=True)]
    guessed = {
        "the model": guesses(losses, shares),
        _WORDS: without_model(stripped, found.of, members),
        _USUAL: np.full(len(members), int(shares.argmax())),
    }
    rows = {name: advantage(own == found.of, members) for name, own in guessed.items()}
    return {
        **subject.asked.heading,
        "attribute": found.name,
        "values": len(found.values),
        "members": int(members.sum()),
        "non_members": int((~members).sum()),
        "guesses": [
            {"by": name} | {part: getattr(one, part) for part in ("members", "others", "advantage", "p_value")}
            for name, one in rows.items()
        ],
        "verdict": _verdict(rows),
        "sentences": _sentences(found.name, rows),
    }


def guesses(losses: Floats, prior: Floats) -> Indices:
    """(records,) the index of the guessed value; losses: (records, values) with each value in its place; prior: (values,)."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.argmax(np.log(prior)[None] - losses, axis=1))


def prior(values: Indices, count: int) -> Floats:
    """(count,) the smoothed share of each value, never 0."""
    counted = np.bincount(values, minlength=count) + 1.0
    return np.asarray(counted / counted.sum())


def without_model(texts: list[str], values: Indices, members: Bools) -> Indices:
    """The guesses of a bag-of-words classifier trained on the others alone, on texts without the attribute and without the
    model.

    Others are guessed by classifiers that have not seen them, in five folds. A value that too few others have is never guessed.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import KFold

    counted = CountVectorizer(binary=True).fit_transform(texts)
    found = np.full(len(values), np.bincount(values[~members]).argmax())
    outside = np.flatnonzero(~members)
    folds = KFold(min(5, len(outside)), shuffle=True, random_state=0).split(outside)
    tasks = [(outside[train], outside[test]) for train, test in folds] + [(outside, np.flatnonzero(members))]
    for train, test in tasks:
        if len(set(values[train])) > 1:
            found[test] = LogisticRegression(max_iter=1000).fit(counted[train], values[train]).predict(counted[test])
    return found


@dataclass(frozen=True)
class Advantage:
    """The shares of right guesses for members and for others. p_value: the probability of a difference as large if members are
    like others (Fisher).
    """

    members: float
    others: float
    p_value: float

    @property
    def advantage(self) -> float:
        return self.members - self.others


def advantage(right: Bools, members: Bools) -> Advantage:
    """right: (records,) whether each guess is right; members: whether each record was in the training."""
    from scipy.stats import fisher_exact

    ins, outs = right[members], right[~members]
    table = [[int(ins.sum()), int((~ins).sum())], [int(outs.sum()), int((~outs).sum())]]
    p_value = float(fisher_exact(table, alternative="greater").pvalue)
    return Advantage(float(ins.mean()), float(outs.mean()), p_value)


def _losses(subject: Subject, found: Attribute, index: int, say: Say) -> Floats:
    """(records,) -log P of each record (or of its label) under the model, with this value instead of its own."""
    say(f"reading the records with {found.name} = {found.values[index]}")
    changed = subject.reading(_with_value(subject, found, index))
    if subject.language_model:  # its loss is a mean over tokens
        return np.array([-one.said.sum() for one in changed.tokens()])
    return changed.losses()


def _with_value(subject: Subject, found: Attribute, index: int) -> Rows:
    """The records with this value instead of their own."""
    rows, own = subject.texts.rows, found.of

    def changed(texts: Sequence[Any]) -> tuple[str, ...]:
        return tuple(_put(text, found.values[old], found.values[index]) for text, old in zip(texts, own, strict=True))

    return replace(rows, text=changed(rows.text), text_b=rows.text_b and changed(rows.text_b))


def _row(index: int, subject: Subject) -> str:
    """A row of one of the two files, counted from 1."""
    option = "--members" if index < subject.texts.members else "--non-members"
    return f"row {subject.places[index] + 1} of {option}"


def _place(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(value)}(?!\w)")


def _put(text: str, value: str, other: str) -> str:
    return _place(value).sub(lambda match: other, text)


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
