"""Baselines: classifiers of texts without the model, which must be at chance: else attacks may measure how a split was made.

`baseline` is a logistic regression on a bag of words that predicts membership, trained on some units and tested on others. With
fair coins no unit reveals another's coin, so it cannot do better than chance. If it does (members from an earlier time, on
other topics, prepared in another way, or several units with one coin), an attack may do the same, and its success shows nothing
about the model.

`blind` is for members and others that were not chosen by coins: it distinguishes them by their words, their length, and the
dates in them. The commonest difference, besides training, is a split by date. On published splits, dates and words alone
distinguish them better than published attacks do (Das, Zhang and Tramer 2024, arXiv 2406.16201). For a fair split, words raise
a false alarm with a probability of at most 1/40, length and dates of at most 1/80 each. These add up to 1/20, so at most one in
20 fair splits is called unfair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attacks.adversary.null import Bools, Floats
from secure_fed.runs.roc import Ranking, auc, rank

FOLDS = 5
FEWEST = 2 * FOLDS  # units on either side
SHUFFLES = 39
MORE_SHUFFLES = 79  # for length and for dates
FEWEST_DATED = 10  # texts
_EIGHTHS = 8
_APART = 2**32  # above every token id: the pairs of a word and a label are no words
_BINS = 10
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DATE = re.compile(
    r"\b(?P<year>(?:19|20)\d\d)(?:-(?P<number>0[1-9]|1[0-2])(?:-\d\d)?)?\b"
    rf"|\b(?P<name>{'|'.join(_MONTHS)})[a-z]*\.?,? +(?:\d{{1,2}}(?:st|nd|rd|th)?,? +)?(?P<of>(?:19|20)\d\d)\b",
    re.IGNORECASE,
)


class Words(Protocol):
    """The part of a unit that the baseline reads."""

    @property
    def examples(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Baseline:
    """at_chance: False if the true coins are predicted better than every tried shuffling of them. With the default 39
    shufflings this happens for fair coins with a probability of at most 1/40. The ranking's interval is narrower: it treats the
    scores as fixed, although all of them depend on the coins. An AUC below 1/2 is chance too: a class that is rare in a fold
    was frequent in its training.
    """

    ranking: Ranking
    at_chance: bool


def baseline(units: Sequence[Words], members: ArrayLike, seed: int) -> Baseline | str:
    """The baseline of a split, or the reason why there is none. Equal arguments give equal results."""
    truth = np.asarray(members, dtype=np.bool_)
    if len(truth) != len(units):
        raise ValueError(f"{len(truth)} memberships do not fit {len(units)} units: one for each")
    fewest = int(min(truth.sum(), (~truth).sum()))
    if fewest < FEWEST:
        return f"{fewest} units on one side are too few for a baseline without a model, which takes {FEWEST}"
    bins = _bins(units)
    words = [_words(unit, bins) for unit in units]
    if any(one is None for one in words):
        return "a baseline without a model counts words, and these examples have no input_ids"
    features = _counts([one for one in words if one is not None])
    return told_apart(features, truth, seed)


def _bins(units: Sequence[Words]) -> NDArray[np.float64]:
    """The limits between eighths of the labels that are numbers; none if all are whole, as classes are."""
    from secure_fed.learning.data.audit_unit import plain

    examples = (plain(example) for unit in units for example in unit.examples)
    labels = [example.get("labels") for example in examples if isinstance(example, Mapping)]
    numbers = np.array([label for label in labels if label is not None and np.ndim(label) == 0], dtype=np.float64)
    if not len(numbers) or (numbers == np.round(numbers)).all():
        return np.zeros(0)
    return np.quantile(numbers, np.arange(1, _EIGHTHS) / _EIGHTHS)


def _words(unit: Words, bins: NDArray[np.float64]) -> NDArray[np.int64] | None:
    """All words of all examples of a unit. A label counts as further words, because attacks see it too: one by itself, and one
    with each word, for labels that fit the words on one side and not on the other.
    """
    from secure_fed.learning.data.audit_unit import plain

    found = [np.zeros(0, dtype=np.int64)]
    for example in map(plain, unit.examples):
        try:
            words = np.asarray(example["input_ids"], dtype=np.int64).ravel()
        except (KeyError, TypeError, IndexError, ValueError):
            return None
        found.append(words)
        if (label := example.get("labels")) is not None:
            labels = _of_label(label, bins)
            found += [labels, *(words + _APART * one for one in labels)]
    return np.concatenate(found)


def _of_label(label: Any, bins: NDArray[np.float64]) -> NDArray[np.int64]:
    """A label as words, which are negative, as token ids are not: its class, its classes, or its eighth."""
    if np.ndim(label) == 0:
        one = int(np.searchsorted(bins, float(label))) if len(bins) else int(label)
        return np.array([-1 - one])
    found = np.asarray(label).ravel()
    several = np.issubdtype(found.dtype, np.floating) and np.isin(found, (0, 1)).all()
    return -1 - np.flatnonzero(found) if several else np.zeros(0, dtype=np.int64)


def _counts(words: Sequence[NDArray[np.int64]]) -> Any:
    """log(1 + how often each unit has each word), as a sparse (units, words) matrix."""
    from scipy.sparse import csr_array

    unit = np.repeat(np.arange(len(words), dtype=np.int32), [len(one) for one in words])
    vocabulary, word = np.unique(np.concatenate(words), return_inverse=True)
    shape = (len(words), max(1, len(vocabulary)))
    return csr_array((np.ones(len(word)), (unit, word.astype(np.int32))), shape=shape).log1p()


def told_apart(features: Any, members: Bools, seed: int, shuffles: int = SHUFFLES) -> Baseline:
    """The baseline on any features (units, anything). With fair coins it fails with a probability of at most 1 / (shuffles +
    1).
    """
    scores = _tried(features, members, seed)
    ranking = rank(scores[members], scores[~members], seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(shuffles):  # random permutations of the coins: fair coins make all equally likely
        dealt = rng.permutation(members)
        scores = _tried(features, dealt, seed)
        if auc(scores[dealt], scores[~dealt]) >= ranking.auc:
            return Baseline(ranking, at_chance=True)
    return Baseline(ranking, at_chance=False)


def _tried(features: Any, members: Bools, seed: int) -> NDArray[np.float64]:
    """For each unit the log-odds of membership, from a regression trained without its fold."""
    from sklearn import config_context
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    regression, scores = LogisticRegression(solver="liblinear"), np.empty(len(members))
    # With few units, checking the features again in each of hundreds of trainings takes longer than the trainings.
    with config_context(assume_finite=True, skip_parameter_validation=True):
        for others, fold in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(features, members):
            scores[fold] = regression.fit(features[others], members[others]).decision_function(features[fold])
    return scores


def blind(
    units: Sequence[Words], texts: Sequence[str], members: Bools, dates: Sequence[object] | None = None, seed: int = 0
) -> dict[str, Baseline | str]:
    """The baselines by name, each or the reason why there is none. dates: when each text was written, if known, as `when`
    reads it.
    """
    when_written = dated(texts) if dates is None else np.array([when(one) for one in dates])
    found: dict[str, Baseline | str] = {"words": baseline(units, members, seed)}
    found["length"] = told_apart(lengths(texts), members, seed, MORE_SHUFFLES)
    there = int((~np.isnan(when_written)).sum())
    few = f"{there or 'no'} text{'s have' if there > 1 else ' has'} a date"
    found["dates"] = few if there < FEWEST_DATED else told_apart(_binned(when_written), members, seed, MORE_SHUFFLES)
    return found


def lengths(texts: Sequence[str]) -> Floats:
    """(texts, features) of the numbers of characters and of words."""
    counts = np.array([(len(text), len(text.split())) for text in texts], dtype=np.float64)
    return np.concatenate([_binned(column) for column in counts.T], axis=1)


def dated(texts: Sequence[str]) -> Floats:
    """(texts,) the latest date in each text, in years; NaN without one."""
    return np.array([max(map(_years, _DATE.finditer(text)), default=np.nan) for text in texts])


def _years(found: re.Match[str]) -> float:
    month = _MONTHS.index(found["name"].lower()) + 1 if found["name"] else int(found["number"] or 1)
    return int(found["year"] or found["of"]) + (month - 1) / 12


def when(value: object) -> float:
    """A date from a file in years, or the number that stands for a date; NaN for None and an empty text.

    ValueError for anything else, such as 04/07/2021, whose day and month cannot be distinguished.
    """
    if isinstance(value, date):  # also a datetime
        return value.year + (value.timetuple().tm_yday - 1) / 366
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    written = "" if value is None else str(value).strip()
    if not written:
        return np.nan
    with suppress(ValueError):
        return when(datetime.fromisoformat(written))
    found = [one for one in _DATE.finditer(written) if one["number"] or one["name"] or one[0] == written]
    return max(map(_years, found)) if found else float(written)


def _binned(values: Floats) -> Floats:
    """(values, features): the place of a value among ten equally frequent ranges, and whether the value is missing."""
    there = ~np.isnan(values)
    ends = np.unique(np.quantile(values[there], np.linspace(0, 1, _BINS + 1)[1:-1]))
    place = np.where(there, np.searchsorted(ends, values), len(ends) + 1)
    above = np.arange(1, len(ends) + 1) <= np.where(there, place, 0)[:, None]  # steps, so that neighbours are alike
    return np.concatenate([above, ~there[:, None]], axis=1).astype(np.float64)
