"""The model-free baseline: at chance under fair coins, and above chance if members differ from others.

Blind baselines: members and others that differ by words, length or dates alone, or in nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from attacks.evidence.baseline import Baseline, baseline, blind, dated, lengths, when
from tests.golden import refused

VOCABULARY = 500
EVERYDAY = 1.0 / np.arange(1, VOCABULARY + 1)
EVERYDAY /= EVERYDAY.sum()
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Unit:
    examples: Sequence[Any]


def judged(of: Sequence[Unit], members: Bools, seed: int = 0) -> Baseline:
    found = baseline(of, members, seed)
    assert isinstance(found, Baseline)
    return found


def text(rng: np.random.Generator, law: NDArray[np.float64] = EVERYDAY, length: int = 40) -> list[int]:
    words: list[int] = rng.choice(VOCABULARY, size=length, p=law).tolist()
    return words


def units(n: int, rng: np.random.Generator, write: Callable[[int], list[int]], **more: Any) -> list[Unit]:
    return [Unit([{"input_ids": write(i), **more}]) for i in range(n)]


def fair(n: int, rng: np.random.Generator) -> Bools:
    return rng.random(n) < 0.5


def test_fair_coins_are_at_chance() -> None:
    """Except for one time in forty, whatever the words are."""
    rng, runs = np.random.default_rng(0), 3
    found = [judged(units(60, rng, lambda _: text(rng)), fair(60, rng), seed) for seed in range(runs)]
    assert sum(not one.at_chance for one in found) <= stats.binom.isf(1e-3, runs, 1 / 40)
    # Who is scored by a regression that was trained on it, too, is told with certainty, and shufflings are as well.
    assert np.mean([one.ranking.auc for one in found]) == pytest.approx(0.5, abs=0.15)


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["time", "topic", "preprocessing", "class"])
def test_a_split_that_is_not_by_coins_is_caught(by: str) -> None:
    """By words of the last third, which did not occur before; by words of a topic; by a cut at 30 words; by the class."""
    rng, n = np.random.default_rng(0), 200
    truth = np.arange(n) < n / 2 if by == "time" else fair(n, rng)
    laws = {True: EVERYDAY, False: 0.8 * EVERYDAY + 0.2 * rng.permutation(EVERYDAY)}
    labels = np.where(rng.random(n) < 0.8, truth, ~truth).astype(int)

    def unit(i: int) -> Unit:
        words = text(rng, laws[bool(truth[i]) or by != "topic"], 30 if truth[i] and by == "preprocessing" else 40)
        if by == "time":
            words = [word if i < n / 2 or rng.random() < 0.85 else 400 + word % 100 for word in words]
        return Unit([{"input_ids": words, "labels": int(labels[i]) if by == "class" else 0}])

    of = [unit(i) for i in range(n)]
    assert not judged(of, truth).at_chance
    assert judged(of, fair(n, rng)).at_chance  # the same units under fair coins


@pytest.mark.parametrize(
    "label",
    [lambda member, u: np.eye(4, dtype=np.float32)[0] + (u < 0.8 - 0.6 * member), lambda member, u: u + 0.4 * member],
    ids=["several labels", "a number"],
)
def test_a_split_by_labels_that_are_no_classes_is_caught(label: Callable[[bool, float], Any]) -> None:
    rng, n = np.random.default_rng(3), 60
    members = fair(n, rng)
    made = [label(bool(member), float(rng.random())) for member in members]
    told = [Unit([{"input_ids": text(rng), "labels": np.minimum(one, 1) if np.ndim(one) else one}]) for one in made]
    assert not judged(told, members).at_chance


def test_copies_that_share_a_coin_are_caught() -> None:
    """They are no units: what one of them tells, the other has learnt."""
    rng = np.random.default_rng(4)
    of, truth = units(40, rng, lambda _: text(rng)), fair(40, rng)
    assert not judged(of * 2, np.tile(truth, 2)).at_chance


def test_units_of_many_examples_are_bags_of_all_their_words() -> None:
    """And the same arguments give the same baseline."""
    rng = np.random.default_rng(5)
    texts, truth = [[text(rng) for _ in range(3)] for _ in range(40)], fair(40, rng)
    apart = [Unit([{"input_ids": one} for one in own]) for own in texts]
    joined = [Unit([{"input_ids": [word for one in own for word in one]}]) for own in texts]
    assert judged(apart, truth) == judged(joined, truth)


@pytest.mark.nightly
def test_words_may_be_lists_arrays_or_tensors_and_labels_of_every_word_are_left_out() -> None:
    rng = np.random.default_rng(6)
    texts, truth = [text(rng) for _ in range(40)], fair(40, rng)
    kinds: list[Callable[[list[int]], Any]] = [list, np.array, torch.tensor]
    one, *others = (judged([Unit([{"input_ids": kind(own)}]) for own in texts], truth) for kind in kinds)
    assert others == [one, one]
    assert judged([Unit([{"input_ids": own, "labels": own}]) for own in texts], truth) == one


def test_what_has_no_baseline_says_why() -> None:
    """Empty texts have one, which is at chance."""
    truth = np.arange(40) % 2 == 0
    for example in ({"pixels": [1.0]}, [1.0, 2.0], "a text", {"input_ids": ["a", "b"]}):
        assert "no input_ids" in str(baseline([Unit([example])] * 40, truth, 0))
    few = "9 units on one side are too few for a baseline without a model, which takes 10"
    assert baseline([Unit([])] * 40, np.arange(40) < 9, 0) == few
    with refused(ValueError):
        baseline([Unit([])] * 3, truth, 0)
    found = judged([Unit([])] * 40, truth)
    assert (found.ranking.auc, found.at_chance) == (0.5, True)


def test_labels_that_fit_the_words_on_one_side_alone_are_caught() -> None:
    """As often as each other on both sides, as the words are: a model that knows them both would seem to know its members."""
    rng, n = np.random.default_rng(0), 40
    classes, members = rng.integers(2, size=2 * n), np.arange(2 * n) < n
    told = [[400 + classes[i], *text(rng, length=5)] for i in range(2 * n)]
    some = [Unit([{"input_ids": words, "labels": int(classes[i] ^ (i >= n))}]) for i, words in enumerate(told)]
    assert not judged(some, members).at_chance


WORDS = [
    *("the", "pain", "in", "her", "left", "knee", "went", "after"),
    *("some", "days", "of", "rest", "and", "mild", "exercise"),
]


def made(count: int, rng: np.random.Generator) -> list[str]:
    """Texts of random words and lengths, each with a date."""
    dates = [f"{rng.integers(2015, 2025)}-0{rng.integers(1, 10)}-11" for _ in range(count)]
    return [" ".join([*rng.choice(WORDS, size=rng.integers(5, 30)), day]) for day in dates]


def tried(texts: Sequence[str], dates: Sequence[object] | None = None) -> dict[str, Any]:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    units = [Unit([{"input_ids": [vocabulary[word] for word in text.split() if word in vocabulary]}]) for text in texts]
    return blind(units, texts, np.arange(len(texts)) < len(texts) // 2, dates)


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
    ]
    expected = [1999, 2021.5, 2021.5, 2021.5, 2021.5, 2003, np.nan, np.nan]
    assert dated([*texts, "5"]) == pytest.approx(expected, nan_ok=True)


def test_dates_of_a_column_have_one_scale_or_none() -> None:
    middle = [date(2021, 7, 2), "2021-07-02", "20210702", "2 Jul 2021", "July 2021", "2021-07", " 2021-07-02 10:00 UTC"]
    assert [when(one) for one in middle] == pytest.approx([2021.5] * len(middle), abs=0.01)
    assert [when(one) for one in (2021, "2021", "1612345678")] == [2021, 2021, 1612345678]
    assert all(np.isnan(when(one)) for one in (None, "", math.nan))
    for unread in ("01.02.21", "01/02/2021", "2021/02/01", "soon", True):
        with refused(ValueError):
            when(unread)


def test_lengths_are_steps_whatever_their_unit() -> None:
    short, long = lengths(["a b", "a b c d e f"] * 20)[:2]
    assert (long >= short).all()
    assert (long > short).any()
    assert not lengths(["same text"] * 20).any()
