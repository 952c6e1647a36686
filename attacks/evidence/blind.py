"""Blind baselines: members and others distinguished without the model, by their words, their length, and the dates in them.

The commonest difference between members and others, besides training, is a split by date. On published splits, dates and words
alone distinguish them better than published attacks do (Das, Zhang and Tramer 2024, arXiv 2406.16201).

Each baseline is a logistic regression, compared with itself on shuffled labels. For a fair split, words raise a false alarm
with a probability of at most 1/40, length and dates of at most 1/80 each. These add up to 1/20, so at most one in 20 fair
splits is called unfair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime

import numpy as np
from numpy.typing import NDArray

from attacks.evidence.baseline import Baseline, Words, baseline, told_apart

Floats = NDArray[np.float64]
SHUFFLES = 79  # for length and for dates
FEWEST_DATED = 10  # texts
_BINS = 10
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DATE = re.compile(
    r"\b(?P<year>(?:19|20)\d\d)(?:-(?P<number>0[1-9]|1[0-2])(?:-\d\d)?)?\b"
    rf"|\b(?P<name>{'|'.join(_MONTHS)})[a-z]*\.?,? +(?:\d{{1,2}}(?:st|nd|rd|th)?,? +)?(?P<of>(?:19|20)\d\d)\b",
    re.IGNORECASE,
)


def blind(
    units: Sequence[Words],
    texts: Sequence[str],
    members: NDArray[np.bool_],
    dates: Sequence[object] | None = None,
    seed: int = 0,
) -> dict[str, Baseline | str]:
    """The baselines by name, each or the reason why there is none. dates: when each text was written, if known."""
    when = dated(texts) if dates is None else np.array([_when(one) for one in dates])
    found: dict[str, Baseline | str] = {"words": baseline(units, members, seed)}
    found["length"] = told_apart(lengths(texts), members, seed, SHUFFLES)
    there = int((~np.isnan(when)).sum())
    few = f"{there or 'no'} text{'s have' if there > 1 else ' has'} a date"
    found["dates"] = few if there < FEWEST_DATED else told_apart(_binned(when), members, seed, SHUFFLES)
    return found


def lengths(texts: Sequence[str]) -> Floats:
    """(texts, features) of the numbers of characters and of words."""
    counts = np.array([(len(text), len(text.split())) for text in texts], dtype=np.float64)
    return np.concatenate([_binned(column) for column in counts.T], axis=1)


def dated(texts: Sequence[str]) -> Floats:
    """(texts,) the latest date in each text, in years; NaN without one."""
    return np.array([max(_years(text), default=np.nan) for text in texts])


def _years(text: str) -> list[float]:
    found = []
    for match in _DATE.finditer(text):
        month = _MONTHS.index(match["name"].lower()) + 1 if match["name"] else int(match["number"] or 1)
        found.append(int(match["year"] or match["of"]) + (month - 1) / 12)
    return found


def _when(value: object) -> float:
    """A date from a file in years, or the number that stands for a date; NaN for other values."""
    if isinstance(value, date):  # also a datetime
        return value.toordinal() / 365.25
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).toordinal() / 365.25
    except ValueError:
        return max(_years(str(value)), default=np.nan)


def _binned(values: Floats) -> Floats:
    """(values, features): the place of a value among ten equally frequent ranges, and whether the value is missing."""
    there = ~np.isnan(values)
    ends = np.unique(np.quantile(values[there], np.linspace(0, 1, _BINS + 1)[1:-1]))
    place = np.where(there, np.searchsorted(ends, values), len(ends) + 1)
    above = np.arange(1, len(ends) + 1) <= np.where(there, place, 0)[:, None]  # steps, so that neighbours are alike
    features: Floats = np.concatenate([above, ~there[:, None]], axis=1).astype(np.float64)
    return features
