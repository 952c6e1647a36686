"""The similarity of a continuation to the true text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NEAR = 0.75  # from this similarity on, a continuation is nearly verbatim


def similarity(one: Sequence[int], other: Sequence[int]) -> float:
    """1 - d / n: inserting, deleting or replacing d tokens turns one into the other, and the longer has n tokens.

    Ippolito et al. 2023 call a continuation approximately memorised by a BLEU above .75. Edits are counted here instead: they
    need no choice of n-grams, and a similarity of 1 is verbatim.
    """
    longer = max(len(one), len(other))
    return 1 - _edits(np.asarray(one), np.asarray(other)) / longer if longer else 1.0


def _edits(one: np.ndarray, other: np.ndarray) -> int:
    """The Levenshtein distance, computed row by row."""
    places = np.arange(len(other) + 1)
    row = places.copy()
    for count, token in enumerate(one, start=1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (other != token))
        best = np.r_[count, changed]
        row = np.minimum.accumulate(best - places) + places  # insertions, from left to right
    return int(row[-1])
