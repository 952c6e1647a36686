"""Members and others that differ by words, length or dates alone, or in nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attacks.evidence.baseline import blind, dated, lengths, when

WORDS = [
    "the",
    "pain",
    "in",
    "her",
    "left",
    "knee",
    "went",
    "after",
    "some",
    "days",
    "of",
    "rest",
    "and",
    "mild",
    "exercise",
]


@dataclass(frozen=True)
class One:
    examples: tuple[dict[str, Any], ...]


def made(count: int, rng: np.random.Generator) -> list[str]:
    """Texts of random words and lengths, each with a date."""
    return [
        " ".join(
            [*rng.choice(WORDS, size=rng.integers(5, 30)), f"{rng.integers(2015, 2025)}-0{rng.integers(1, 10)}-11"]
        )
        for _ in range(count)
    ]


def tried(texts: Sequence[str], dates: Sequence[object] | None = None, members: int | None = None) -> dict[str, Any]:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    units = [One(({"input_ids": [vocabulary[word] for word in text.split() if word in vocabulary]},)) for text in texts]
    truth: NDArray[np.bool_] = np.arange(len(texts)) < (len(texts) // 2 if members is None else members)
    return blind(units, texts, truth, dates)


def void(found: dict[str, Any]) -> set[str]:
    return {name for name, one in found.items() if not isinstance(one, str) and not one.at_chance}


@pytest.mark.nightly
def test_a_split_by_date_or_length_is_seen_by_that_baseline_alone() -> None:
    rng = np.random.default_rng(3)
    texts = made(120, rng)
    assert void(tried(texts)) == set()
    assert void(tried(sorted(texts, key=lambda text: text[-10:]))) == {"dates"}
    by_length = tried(sorted(texts, key=lambda text: len(text.split())))
    assert "length" in void(by_length)
    assert by_length["length"].ranking.auc > 0.95


@pytest.mark.nightly
def test_dates_of_a_column_stand_in_for_those_of_texts() -> None:
    rng = np.random.default_rng(4)
    texts = [text[:-11] for text in made(80, rng)]
    assert tried(texts)["dates"] == "no text has a date"
    assert void(tried(texts, [date(2020, 1, 1 + row % 28) for row in range(80)])) == set()
    days = [f"20{10 + row // 8}-05-{1 + row % 8:02}" for row in range(80)]
    assert "dates" in void(tried(texts, days))
    assert "dates" in void(tried(texts, [datetime.fromisoformat(day) for day in days]))
    assert "dates" in void(tried(texts, list(range(80))))  # seconds, or another number that grows
    gone: list[object] = [None] * 40 + ["2020-01-01"] * 40
    assert "dates" in void(tried(texts, gone))  # that there is none tells as well
    assert tried(texts, [""] * 80)["dates"] == "no text has a date"


def test_dates_are_read_as_people_write_them() -> None:
    texts = [
        "in 1999",
        "of 2021-07-04",
        "on July 4, 2021",
        "4 Jul 2021",
        "july 2021",
        "in 2003, and 2001",
        "at 20210704",
        "5",
    ]
    assert dated(texts) == pytest.approx([1999, 2021.5, 2021.5, 2021.5, 2021.5, 2003, np.nan, np.nan], nan_ok=True)


def test_dates_of_a_column_have_one_scale_or_none() -> None:
    middle = [date(2021, 7, 2), "2021-07-02", "20210702", "2 Jul 2021", "July 2021", "2021-07", " 2021-07-02 10:00 UTC"]
    assert [when(one) for one in middle] == pytest.approx([2021.5] * len(middle), abs=0.01)
    assert [when(one) for one in (2021, "2021", "1612345678")] == [2021, 2021, 1612345678]
    assert all(np.isnan(when(one)) for one in (None, "", math.nan))
    for unread in ("01.02.21", "01/02/2021", "2021/02/01", "soon", True):
        with pytest.raises(ValueError, match="could not convert"):
            when(unread)


def test_lengths_are_steps_whatever_their_unit() -> None:
    short, long = lengths(["a b", "a b c d e f"] * 20)[:2]
    assert (long >= short).all()
    assert (long > short).any()
    assert not lengths(["same text"] * 20).any()
