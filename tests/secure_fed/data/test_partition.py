import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fed.errors import ConfigError, DataError
from secure_fed.learning.data.label_skew import Indices, dirichlet, log_shares
from secure_fed.learning.data.partition import iid, jensen_shannon, natural, partition

seeds = st.integers(0, 2**32 - 1)
alphas = st.sampled_from([1e-300, 1e-3, 0.01, 0.1, 1.0, 1000.0, 1e300])


@st.composite
def divisible(draw: st.DrawFn) -> tuple[list[int], int]:
    """Labels, and a number of clients that is at most the number of labels."""
    labels = draw(st.lists(st.integers(0, 6), min_size=1, max_size=80))
    return labels, draw(st.integers(1, len(labels)))


def assert_exactly_once(parts: Sequence[Indices], count: int) -> None:
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert all(len(part) for part in parts)
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


def lists(parts: Sequence[Indices]) -> list[list[int]]:
    return [part.tolist() for part in parts]


@given(divisible(), alphas, seeds)
def test_dirichlet_gives_each_example_once_and_each_client_one(
    data: tuple[list[int], int], alpha: float, seed: int
) -> None:
    labels, clients = data
    parts = dirichlet(labels, clients, alpha, np.random.default_rng(seed))
    assert len(parts) == clients
    assert_exactly_once(parts, len(labels))
    assert lists(parts) == lists(dirichlet(labels, clients, alpha, np.random.default_rng(seed)))


@given(divisible(), seeds)
def test_iid_gives_equal_parts(data: tuple[list[int], int], seed: int) -> None:
    labels, clients = data
    parts = iid(len(labels), clients, np.random.default_rng(seed))
    assert len(parts) == clients
    assert_exactly_once(parts, len(labels))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert lists(parts) == lists(iid(len(labels), clients, np.random.default_rng(seed)))


@given(st.lists(st.text("aB 7\né中😀", max_size=3), min_size=1, max_size=60))
def test_natural_gives_each_key_its_examples(keys: list[str]) -> None:
    names, parts = natural(keys)
    assert list(names) == sorted(set(keys))
    assert_exactly_once(parts, len(keys))
    for name, part in zip(names, parts, strict=True):
        assert {keys[i] for i in part} == {name}


@pytest.mark.parametrize("alpha", [0.01, 1.0, 1000.0])
def test_a_thousand_clients_share_twenty_thousand_examples(alpha: float) -> None:
    labels = np.random.default_rng(0).integers(0, 20, 20_000).tolist()
    parts = dirichlet(labels, 1000, alpha, np.random.default_rng(1))
    assert len(parts) == 1000
    assert_exactly_once(parts, 20_000)


@pytest.mark.parametrize("alpha", [0.05, 1.0, 50.0])
def test_shares_are_dirichlet_draws_around_the_class_shares(alpha: float) -> None:
    prior = np.array([0.5, 0.3, 0.15, 0.05])
    shares = np.exp(log_shares(prior, 40_000, alpha, np.random.default_rng(0)))
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    np.testing.assert_allclose(shares.mean(axis=0), prior, atol=0.01)
    np.testing.assert_allclose(shares.var(axis=0), prior * (1 - prior) / (alpha + 1), rtol=0.08)


def test_client_shares_average_to_the_class_shares_and_sizes_stay_level() -> None:
    labels = np.repeat([0, 1, 2], [12_000, 6_000, 2_000])
    parts = dirichlet(labels.tolist(), 200, 1.0, np.random.default_rng(0))
    shares = np.array([np.bincount(labels[part], minlength=3) / len(part) for part in parts])
    np.testing.assert_allclose(shares.mean(axis=0), [0.6, 0.3, 0.1], atol=0.05)
    assert np.median([len(part) for part in parts]) == pytest.approx(100, rel=0.2)


def test_small_alpha_is_skewed_and_large_alpha_nearly_iid() -> None:
    labels = np.random.default_rng(0).integers(0, 8, 20_000).tolist()
    rng = np.random.default_rng(1)
    skew = {a: jensen_shannon(labels, dirichlet(labels, 20, a, rng), 8) for a in (0.01, 1.0, 10.0, 1000.0)}
    level = jensen_shannon(labels, iid(len(labels), 20, rng), 8)
    assert skew[0.01] > skew[1.0] > skew[10.0] > skew[1000.0]
    assert skew[0.01] > 0.8
    assert skew[1000.0] < level + 0.01 < 0.02


def test_a_label_absent_from_the_data_and_a_lone_client_do_no_harm() -> None:
    parts = dirichlet([5, 5, 9], 1, 0.1, np.random.default_rng(0))
    assert lists(parts) == [[0, 1, 2]]


def brute_force_jensen_shannon(p: Sequence[float], q: Sequence[float]) -> float:
    mixture = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return sum(
        x * math.log2(x / m) / 2 for r in (p, q) for x, m in zip(r, mixture, strict=True) if x
    )  # fmt: skip


@given(divisible(), seeds)
@settings(max_examples=50)
def test_jensen_shannon_is_the_mean_over_pairs(data: tuple[list[int], int], seed: int) -> None:
    labels, clients = data
    parts = iid(len(labels), clients, np.random.default_rng(seed))
    counts = [Counter(labels[i] for i in part) for part in parts]
    shares = [[count[c] / count.total() for c in range(7)] for count in counts]
    pairs = [brute_force_jensen_shannon(p, q) for p, q in itertools.combinations(shares, 2)]
    expected = sum(pairs) / len(pairs) if pairs else 0.0
    assert jensen_shannon(labels, parts, 7) == pytest.approx(expected, abs=1e-9)


def test_jensen_shannon_ends_of_the_range() -> None:
    equal = [np.array([0, 1]), np.array([2, 3])]
    assert jensen_shannon([0, 1, 0, 1], equal, 2) == 0
    assert jensen_shannon([0, 0, 1, 1], equal, 2) == 1
    assert jensen_shannon([0, 1], [np.array([0, 1])], 2) == 0


def test_partition_names_the_clients() -> None:
    rng = np.random.default_rng(0)
    divided = partition("iid", [0] * 11, clients=11, rng=rng)
    assert (divided.names[0], divided.names[-1]) == ("client-00", "client-10")
    natural_parts = partition("natural", [0, 0, 1], clients=None, keys=("b", "a", "b"), rng=rng)
    assert (natural_parts.names, lists(natural_parts.parts)) == (("a", "b"), [[1], [0, 2]])


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_fewer_examples_than_clients(kind: str) -> None:
    with pytest.raises(DataError, match=r"3 training examples .* 4 clients .*federation\.clients .*at most 3"):
        partition(kind, [0, 1, 0], clients=4, rng=np.random.default_rng(0))


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_alpha_must_be_a_positive_number(alpha: float) -> None:
    with pytest.raises(ConfigError, match=rf"data\.alpha is {alpha}"):
        dirichlet([0, 1], 2, alpha, np.random.default_rng(0))


def test_a_partition_that_cannot_be() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"data\.partition is 'random'.*iid, dirichlet, .*natural"):
        partition("random", [0], clients=1, rng=rng)
    with pytest.raises(DataError, match=r"'natural'.*data\.client"):
        partition("natural", [0, 1], clients=None, rng=rng)
    with pytest.raises(DataError, match=r"the data name 2 clients and federation\.clients is 3.* to 2"):
        partition("natural", [0, 1], clients=3, keys=("a", "b"), rng=rng)
    with pytest.raises(ConfigError, match=r"federation\.clients is 0"):
        partition("iid", [0, 1], clients=0, rng=rng)
