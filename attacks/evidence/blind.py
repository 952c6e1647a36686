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
from contextlib import suppress
from datetime import date, datetime

import numpy as np
from numpy.typing import NDArray

from attacks.evidence.baseline import Baseline, Words, baseline, told_apart

Floats = NDArray[np.float64]
MORE_SHUFFLES = 79  # for length and for dates
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
    features: Floats = np.concatenate([above, ~there[:, None]], axis=1).astype(np.float64)
    return features
