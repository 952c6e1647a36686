"""The statistics of uniformity detect vectors that are not uniform, but not a pseudorandom mask with a small seed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from protocols.keys import Secret
from protocols.masking import add_masks
from tests.protocols.randomness import CHANCE, SURELY, p_value, p_values


def twister(state: np.random.RandomState, seed: int, count: int) -> NDArray[np.uint32]:
    state.seed(seed)
    return state.randint(0, 2**32, count, dtype=np.uint32)


def fitting(masked: NDArray[np.uint32], seeds: Iterable[int]) -> list[int]:
    """The seeds whose masks, subtracted from the first words, leave small numbers."""
    state, start = np.random.RandomState(), masked[:16]
    return [
        seed
        for seed in seeds
        if int(np.abs((start - twister(state, seed, len(start))).view(np.int32).astype(np.int64)).max()) < 2**20
    ]


def test_a_mersenne_twister_of_a_small_seed_is_found_by_trying() -> None:
    """It looks uniform. Trying 2^14 seeds takes a third of a second here, so trying all 2^32 takes about a day of one core."""
    rng = np.random.default_rng(11)
    vector = rng.integers(-1000, 1001, 1 << 18).astype(np.int32).view(np.uint32)
    seed = random.SystemRandom().randrange(2**14)
    masked = vector + twister(np.random.RandomState(), seed, len(vector))
    assert p_value(masked) > CHANCE
    assert fitting(masked, range(2**14)) == [seed]
    stripped = masked - twister(np.random.RandomState(), seed, len(vector))
    assert p_value(stripped) < SURELY
    assert stripped.tolist() == vector.tolist()
    assert fitting(masked_here(), range(2**12)) == []


def masked_here() -> NDArray[np.uint32]:
    """Zeros under a mask of this protocol."""
    words = np.zeros(64, np.uint32)
    add_masks(words, [(Secret.new(), 1)])
    return words


def uniform_words(count: int = 1 << 18) -> NDArray[np.uint32]:
    return np.frombuffer(random.SystemRandom().randbytes(4 * count), np.uint32).copy()


BROKEN: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "bytes": lambda words: np.where(words & 255 == 7, words ^ 1, words),
    "pairs of bytes": lambda words: np.where(words & 15 << 8 == 0, words & 0xFFFFFF00 | words >> 8 & 255, words),
    "bytes at each place of a word": lambda words: np.where(words >> 24 == 9, words ^ (1 << 24), words),
    "bits at each place of a word": lambda words: words | np.where(np.arange(len(words)) % 16, 0, 1 << 13),
    "serial correlation": lambda words: np.concatenate(
        (words[:4096], words[4096:] // 2 + words[4096 - 1024 : -1024] // 2)
    ),
    "high halves": lambda words: words % 4_000_000_000,
    "low halves": lambda words: words & 0xFFFF0000 | np.arange(len(words)) % 1000,
    "high against low halves": lambda words: words & 0xFFFF0000 | words >> 16,
    "repeated blocks": lambda words: np.concatenate((words[: len(words) // 2], words[: len(words) // 2])),
}


@pytest.mark.parametrize("statistic", BROKEN)
def test_each_statistic_notices_what_it_is_for(statistic: str) -> None:
    broken = BROKEN[statistic](uniform_words()).astype(np.uint32)
    assert p_values(broken)[statistic] < SURELY
    assert p_value(broken) < 10 * SURELY


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_the_entropy_of_the_operating_system_passes(kind: type) -> None:
    words: NDArray[Any] = np.frombuffer(os.urandom(1 << 22), kind)
    assert p_value(words) > CHANCE


@pytest.mark.nightly
@pytest.mark.parametrize(("vectors", "below_a_hundredth", "below_a_half"), [(40, 8, 38), (200, 15, 150)])
def test_uniform_words_fail_as_seldom_as_is_said(vectors: int, below_a_hundredth: int, below_a_half: int) -> None:
    """One p-value in a hundred is below 0.01, many more if p-values are too small. Reaching a limit has a chance below 1e-8."""
    found = [p_value(uniform_words(1 << 16)) for _ in range(vectors)]
    assert sum(value < 0.01 for value in found) < below_a_hundredth
    assert sum(value < 0.5 for value in found) < below_a_half
