"""Classes for examples that have no single label, so that label-skewed partitions can divide them too.

FeDeRA (appendix A.2) skews entity recognition by the entities of a sentence and question answering by k-means over the texts.
Both functions return one class number for each example, from 0 without gaps.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

_COLUMNS = 4096
_STEPS = 50
_WORD = re.compile(r"\w+")


def label_sets(sets: Sequence[Collection[str]], sources: Sequence[str] | None = None) -> list[int]:
    """A class for every present combination of a set of entity types and a source: `sets[i]` is example i's set.

    Order and repetition in a set are ignored, and classes are numbered by source and then by types, so the numbers depend only
    on the present combinations. The empty set is a class. Rare sets are separate classes: the Dirichlet prior weights a class
    by its share, so a rare class neither crowds out another nor leaves a client empty.
    """
    if sources is not None and len(sources) != len(sets):
        raise ValueError(f"there are {len(sources)} sources and {len(sets)} sets of types; give one source a set")
    origins = [""] * len(sets) if sources is None else sources
    found = [(origin, tuple(sorted(set(types)))) for origin, types in zip(origins, sets, strict=True)]
    number = {one: index for index, one in enumerate(sorted(set(found)))}
    return [number[one] for one in found]


def clusters(texts: Sequence[str], count: int = 30, seed: int = 0) -> list[int]:
    """The k-means cluster of each text, at most `count` clusters, fewer if there are fewer different texts.

    A text is a vector of its words' frequencies, hashed to 4,096 columns, weighted by inverse document frequency, and scaled to
    length one; similarity is then the cosine. Centres start as in k-means++: each next centre is a text drawn with a
    probability proportional to its squared distance from the centres so far. The steps end when no text changes its cluster,
    or after 50 steps. The same arguments give the same clusters.
    """
    if count < 1:
        raise ValueError(f"count is {count}; there must be at least 1 cluster")
    if not len(texts):
        return []
    points = _weighed(texts)
    centres = _spread(points, count, np.random.default_rng(seed))
    nearest = np.full(len(texts), -1)
    for _ in range(_STEPS):
        before, nearest = nearest, np.asarray((points @ centres.T).argmax(axis=1))
        if np.array_equal(before, nearest):
            break
        centres = _means(points, nearest, centres)
    return [int(index) for index in np.unique(nearest, return_inverse=True)[1]]


def _weighed(texts: Sequence[str]) -> csr_array:
    """(texts, columns), every row of length one, or zero for a text without words."""
    column: dict[str, int] = {}
    found: list[int] = []
    ends = [0]
    for text in texts:
        for word in _WORD.findall(text.lower()):
            if word not in column:
                column[word] = crc32(word.encode("utf-8", "replace")) % _COLUMNS
            found.append(column[word])
        ends.append(len(found))
    counts = csr_array((np.ones(len(found)), np.array(found, dtype=np.int32), ends), shape=(len(texts), _COLUMNS))
    counts.sum_duplicates()
    documents = np.bincount(counts.indices, minlength=_COLUMNS)
    values = (1 + np.log(counts.data)) * np.log((1 + len(texts)) / (1 + documents))[counts.indices]
    rows = np.repeat(np.arange(len(texts)), np.diff(counts.indptr))
    lengths = np.sqrt(np.bincount(rows, weights=values**2, minlength=len(texts)))
    values = values / np.where(lengths > 0, lengths, 1)[rows]
    return csr_array((values, counts.indices, counts.indptr), shape=counts.shape)


def _spread(points: csr_array, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """The initial centres, (at most `count`, columns), all different."""
    squares = np.asarray((points * points).sum(axis=1), dtype=np.float64)
    first = int(rng.integers(points.shape[0]))
    chosen = [points[[first]].toarray()[0]]
    distance = _squared(points, squares, chosen[0])
    while len(chosen) < count and distance.max() > 1e-9:  # below is rounding: every text equals a centre
        drawn = int(rng.choice(len(distance), p=distance / distance.sum()))
        chosen.append(points[[drawn]].toarray()[0])
        distance = np.minimum(distance, _squared(points, squares, chosen[-1]))
    return np.array(chosen)


def _squared(points: csr_array, squares: NDArray[np.float64], centre: NDArray[np.float64]) -> NDArray[np.float64]:
    """|x - c|^2 of every point x, (points,)."""
    distance: NDArray[np.float64] = squares - 2 * (points @ centre) + centre @ centre
    return np.where(distance > 1e-9, distance, 0.0)


def _means(points: csr_array, nearest: NDArray[np.int64], centres: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every cluster's mean direction; a cluster without points keeps its centre."""
    members = csr_array((np.ones(len(nearest)), (nearest, np.arange(len(nearest)))), shape=(len(centres), len(nearest)))
    sums = (members @ points).toarray()
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(lengths > 0, sums / np.where(lengths > 0, lengths, 1), centres)
