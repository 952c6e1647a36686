"""Classes of examples that have no single label."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from secure_fed.learning.data import label_skew

ANIMALS, CARS = ("the old cat chased a dog", "the dog chased a cat"), ("the car has an engine", "an engine of the car")


def test_a_class_is_a_set_of_types_whatever_their_order() -> None:
    sets = [["person", "place"], [], ("place", "person", "person"), {"place"}, set()]
    assert label_skew.label_sets(sets) == [1, 0, 1, 2, 0]


def test_the_source_divides_equal_sets() -> None:
    sets = [{"person"}, {"person"}, {"place"}, {"person"}]
    assert label_skew.label_sets(sets, ["b", "a", "a", "b"]) == [2, 0, 1, 2]


def test_numbers_do_not_depend_on_the_order_of_examples() -> None:
    sets = [["a"], ["b"], ["a", "b"], []]
    forward, backward = label_skew.label_sets(sets), label_skew.label_sets(sets[::-1])
    assert forward == backward[::-1]
    assert sorted(forward) == [0, 1, 2, 3]


def test_sources_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sources and 1 sets"):
        label_skew.label_sets([["a"]], ["x", "y"])


@pytest.mark.parametrize("seed", range(5))
def test_texts_of_two_vocabularies_fall_into_clusters_of_one(seed: int) -> None:
    """k-means++ starts from four different texts, and no text joins a cluster with which it shares no word."""
    texts = [ANIMALS[i % 2] if i % 3 else CARS[i % 2] for i in range(60)]
    found = label_skew.clusters(texts, 4, seed)
    assert len(set(zip(found, texts, strict=True))) == len(set(found)) == 4


def test_clusters_are_those_of_exhaustive_search() -> None:
    """Two pairs of similar texts: of all divisions into two clusters, the one found has the texts nearest to their centres."""
    texts = ["red red apple", "red apple", "blue car", "blue car car"]
    points = label_skew._weighed(texts).toarray()
    divisions = list(itertools.product((0, 1), repeat=4))
    near = [
        sum(np.linalg.norm(points[np.array(division) == side].sum(axis=0)) for side in (0, 1)) for division in divisions
    ]
    best = [list(division) for division, total in zip(divisions, near, strict=True) if np.isclose(total, max(near))]
    assert sorted(best) == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert label_skew.clusters(texts, 2, seed=0) in best


def test_every_step_of_k_means_brings_the_texts_nearer_to_their_centres() -> None:
    rng = np.random.default_rng(0)
    words = [f"w{index}" for index in range(40)]
    texts = [" ".join(rng.choice(words, 6, p=rng.dirichlet(np.full(40, 0.1)))) for _ in range(80)]
    found = np.array(label_skew.clusters(texts, 5))
    points = label_skew._weighed(texts).toarray()
    centres = np.array([points[found == index].sum(axis=0) for index in range(5)])
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    assert np.array_equal((points @ centres.T).argmax(axis=1), found)  # a fixed point of Lloyd's algorithm


def test_weights_are_term_frequency_by_inverse_document_frequency() -> None:
    texts = ["one one two", "two three", "four"]
    columns = {word: next(iter(label_skew._weighed([word, "zz"]).indices[:1])) for word in ("one", "two", "three")}
    row = np.zeros(label_skew._COLUMNS)
    row[columns["one"]] = (1 + np.log(2)) * np.log(4 / 2)
    row[columns["two"]] = np.log(4 / 3)
    np.testing.assert_allclose(label_skew._weighed(texts).toarray()[0], row / np.linalg.norm(row), atol=1e-12)


def test_clusters_repeat_and_are_numbered_without_gaps() -> None:
    texts = [f"{'abcdefgh'[i % 8]}word{i % 8} shared" for i in range(50)]
    assert label_skew.clusters(texts, 30, seed=3) == label_skew.clusters(texts, 30, seed=3)
    assert Counter(label_skew.clusters(texts, 30, seed=3)).keys() == set(range(8))  # eight different texts


@pytest.mark.parametrize(("texts", "expected"), [([], []), (["x"], [0]), (["", " ", "?"], [0, 0, 0])])
def test_few_or_empty_texts(texts: list[str], expected: list[int]) -> None:
    assert label_skew.clusters(texts) == expected


def test_no_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 0"):
        label_skew.clusters(["a"], 0)
