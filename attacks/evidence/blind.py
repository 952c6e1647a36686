"""Blind baselines: members and others told apart without the model, by their words, their length, and the dates in them.

A split by date is the commonest way in which members and others differ for another reason than training; by dates and words
alone, published splits are told apart better than by published attacks (Das, Zhang and Tramer 2024, arXiv 2406.16201).

Each baseline is a logistic regression, compared with the same on shuffled labels. Words are wrong about a fair split with a
probability of at most 1/40, length and dates of at most 1/80 each. These add up to 1/20, so of all fair splits at most one
in 20 is called unfair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime

import numpy as np
from numpy.typing import NDArray

from attacks.evidence.baseline import Baseline, Words, baseline, told_apart

Floats = NDArray[np.float64]
SHUFFLES = 79  # of length and of dates
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
    """The baselines by name; where there can be none, the reason. dates: when each text was written, where that is known."""
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
    """(texts,) the latest date in each, in years; NaN where there is none."""
    return np.array([max(_years(text), default=np.nan) for text in texts])


def _years(text: str) -> list[float]:
    found = []
    for match in _DATE.finditer(text):
        month = _MONTHS.index(match["name"].lower()) + 1 if match["name"] else int(match["number"] or 1)
        found.append(int(match["year"] or match["of"]) + (month - 1) / 12)
    return found


def _when(value: object) -> float:
    """A date of a file as years, or as the number that stands for it; NaN where it is none."""
    if isinstance(value, date):  # a datetime is one
        return value.toordinal() / 365.25
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).toordinal() / 365.25
    except ValueError:
        return max(_years(str(value)), default=np.nan)


def _binned(values: Floats) -> Floats:
    """(values, features): the place among ten equally frequent ranges of all values, and whether there is a value."""
    there = ~np.isnan(values)
    ends = np.unique(np.quantile(values[there], np.linspace(0, 1, _BINS + 1)[1:-1]))
    place = np.where(there, np.searchsorted(ends, values), len(ends) + 1)
    above = np.arange(1, len(ends) + 1) <= np.where(there, place, 0)[:, None]  # steps, so that neighbours are alike
    features: Floats = np.concatenate([above, ~there[:, None]], axis=1).astype(np.float64)
    return features
