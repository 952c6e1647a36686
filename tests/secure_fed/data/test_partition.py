"""Which client holds which example: every partition and skew by its defining property, and classes of unlabelled examples."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta as beta_law
from scipy.stats import kstest

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, DataError, UsageError
from secure_fed.learning import tasks
from secure_fed.learning.data import label_skew, sources
from secure_fed.learning.data.label_skew import (
    Indices,
    by_language,
    by_matrix,
    by_share,
    dirichlet,
    label_dirichlet,
    log_shares,
    matrix_of,
    pathological,
)
from secure_fed.learning.data.partition import Partition, divide, iid, jensen_shannon, natural, partition
from tests.cells import every
from tests.golden import refused

seeds = st.integers(0, 2**32 - 1)
PAPERS = ("0.9 0.1; 0.1 0.9", "0.7 0.3; 0.2 0.8; 0.2 0.8")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def require_a_partition(parts: Sequence[Indices], count: int) -> None:
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert all(len(part) and part.tolist() == sorted(part.tolist()) for part in parts)


def same(parts: Sequence[Indices], others: Sequence[Indices]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(parts, others, strict=True))


@st.composite
def divisible(draw: st.DrawFn) -> tuple[list[int], int]:
    """Labels, and a number of clients that is at most the number of labels."""
    labels = draw(st.lists(st.integers(0, 6), min_size=1, max_size=80))
    return labels, draw(st.integers(1, len(labels)))


DIVISIONS: dict[str, Callable[[list[int], int, float, int], Sequence[Indices]]] = {
    "dirichlet": lambda labels, clients, alpha, seed: dirichlet(labels, clients, alpha, rng(seed)),
    "label_dirichlet": lambda labels, clients, alpha, seed: label_dirichlet(labels, clients, alpha, rng(seed)),
    "iid": lambda labels, clients, alpha, seed: iid(len(labels), clients, rng(seed)),
}


@given(
    st.sampled_from([*DIVISIONS]), divisible(), st.sampled_from([1e-300, 1e-3, 0.01, 0.1, 1.0, 1000.0, 1e300]), seeds
)
def test_each_example_is_given_once_and_each_client_gets_one_by_the_seed_alone(
    kind: str, data: tuple[list[int], int], alpha: float, seed: int
) -> None:
    parts = DIVISIONS[kind](*data, alpha, seed)
    assert len(parts) == data[1]
    require_a_partition(parts, len(data[0]))
    assert same(parts, DIVISIONS[kind](*data, alpha, seed))
    if kind == "iid":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.text("aB 7\né中😀", max_size=3), min_size=1, max_size=60))
def test_natural_gives_each_key_its_examples(keys: list[str]) -> None:
    names, parts = natural(keys)
    assert list(names) == sorted(set(keys))
    require_a_partition(parts, len(keys))
    for name, part in zip(names, parts, strict=True):
        assert {keys[i] for i in part} == {name}


@every("alpha", [0.05, 1.0, 50.0])
def test_shares_are_dirichlet_draws_around_the_class_shares(alpha: float) -> None:
    prior = np.array([0.5, 0.3, 0.15, 0.05])
    shares = np.exp(log_shares(prior, 40_000, alpha, rng(0)))
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    np.testing.assert_allclose(shares.mean(axis=0), prior, atol=0.01)
    np.testing.assert_allclose(shares.var(axis=0), prior * (1 - prior) / (alpha + 1), rtol=0.08)


def brute_force_jensen_shannon(p: Sequence[float], q: Sequence[float]) -> float:
    mixture = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return sum(
        x * math.log2(x / m) / 2 for r in (p, q) for x, m in zip(r, mixture, strict=True) if x
    )  # fmt: skip


@given(divisible(), seeds)
@settings(max_examples=50)
def test_jensen_shannon_is_the_mean_over_pairs(data: tuple[list[int], int], seed: int) -> None:
    labels, clients = data
    parts = iid(len(labels), clients, rng(seed))
    counts = [Counter(labels[i] for i in part) for part in parts]
    shares = [[count[c] / count.total() for c in range(7)] for count in counts]
    pairs = [brute_force_jensen_shannon(p, q) for p, q in itertools.combinations(shares, 2)]
    expected = sum(pairs) / len(pairs) if pairs else 0.0
    assert jensen_shannon(labels, parts, 7) == pytest.approx(expected, abs=1e-9)


def test_partition_names_the_clients_and_divergence_is_between_0_and_1() -> None:
    divided = partition("iid", [0] * 11, clients=11, rng=rng())
    assert (divided.names[0], divided.names[-1]) == ("client-00", "client-10")
    natural_parts = partition("natural", [0, 0, 1], clients=None, keys=("b", "a", "b"), rng=rng())
    assert (natural_parts.names, [part.tolist() for part in natural_parts.parts]) == (("a", "b"), [[1], [0, 2]])
    equal = [np.array([0, 1]), np.array([2, 3])]
    assert jensen_shannon([0, 1, 0, 1], equal, 2) == 0
    assert jensen_shannon([0, 0, 1, 1], equal, 2) == 1
    assert jensen_shannon([0, 1], [np.array([0, 1])], 2) == 0


@every("kind", ["iid", "dirichlet", "label_dirichlet", "language", "pathological"])
def test_fewer_examples_than_clients(kind: str) -> None:
    with refused(DataError):
        partition(kind, [0, 1, 0], clients=4, rng=rng(), languages=["a"] * 3)


def test_a_partition_that_cannot_be() -> None:
    with refused(DataError):
        partition("natural", [0, 1], clients=None, rng=rng())
    with refused(DataError):
        partition("natural", [0, 1], clients=3, keys=("a", "b"), rng=rng())
    with refused(ConfigError):
        by_language([0, 0], ["a", "b"], 1, 1.0, rng())
    with refused(DataError):
        by_language([0] * 5, ["a"] * 4 + ["b"], 4, 1.0, rng())
    with refused(ConfigError):
        by_matrix([0, 1, 2], matrix_of(PAPERS[0]), rng())
    with refused(ConfigError):
        partition("matrix", [0, 1, 1, 1, 0], clients=5, rng=rng(), matrix=matrix_of(PAPERS[0]))


def test_a_language_column_that_is_not_there_is_asked_for_by_its_own_name(tmp_path: Path) -> None:
    with refused(DataError):
        divided(tmp_path, ROWS, partition="language", language="tongue")


# Skews of labels and languages.


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_a_clients_share_of_a_label_is_a_beta_variable(beta: float) -> None:
    """300 labels of 2,000 examples over 5 clients: 300 independent draws of Beta(beta, 4 beta), not of another law."""
    labels = np.repeat(np.arange(300), 2_000)
    parts = label_dirichlet(labels.tolist(), 5, beta, rng())
    shares = np.bincount(labels[parts[0]], minlength=300) / 2_000
    assert kstest(shares, beta_law(beta, 4 * beta).cdf).pvalue > 1e-4  # the seed is fixed, so this never varies
    assert kstest(shares, beta_law(beta / 5, 4 * beta / 5).cdf).pvalue < 1e-4  # not Dir(beta m), m_k = 1 / clients


def test_label_dirichlet_has_no_class_prior() -> None:
    """A rare label spreads over clients like a common one. FeDeRA's split concentrates it more, as alpha m_c is small."""
    labels = np.repeat([0, 1], [9_500, 500]).tolist()

    def largest_share(kind: str) -> list[float]:
        found = []
        for seed in range(40):
            divided = partition(kind, labels, clients=10, rng=rng(seed), alpha=1.0)
            rare = np.array([np.bincount(np.asarray(labels)[part], minlength=2)[1] for part in divided.parts])
            found.append(float(rare.max() / rare.sum()))
        return found

    assert np.mean(largest_share("label_dirichlet")) == pytest.approx(sum(1 / k for k in range(1, 11)) / 10, abs=0.05)
    assert np.mean(largest_share("dirichlet")) > 0.4


def test_the_ends_of_beta() -> None:
    labels = np.repeat(np.arange(8), 500)
    level = label_dirichlet(labels.tolist(), 5, 1e9, rng())
    assert jensen_shannon(labels.tolist(), level, 8) < 0.01
    skewed = label_dirichlet(labels.tolist(), 5, 1e-9, rng())
    owners = [sum(bool((labels[part] == label).sum() > 1) for part in skewed) for label in range(8)]
    assert owners == [1] * 8


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), min_size=1, max_size=60), st.integers(1, 20), seeds
)
def test_every_client_has_one_language(rows: list[tuple[int, str]], clients: int, seed: int) -> None:
    labels, languages = [label for label, _ in rows], [language for _, language in rows]
    spoken = Counter(languages)
    if not len(spoken) <= clients <= len(spoken) * min(spoken.values()):
        return
    parts = by_language(labels, languages, clients, 0.5, rng(seed))
    assert len(parts) == clients
    require_a_partition(parts, len(rows))
    groups = Counter(frozenset(languages[index] for index in part) for part in parts)
    assert all(len(group) == 1 for group in groups)
    assert max(groups.values()) - min(groups.values()) <= 1


def test_within_a_language_labels_are_dealt_as_without_languages() -> None:
    labels = np.tile(np.repeat(np.arange(60), 500), 2)
    languages = ["de"] * 30_000 + ["fr"] * 30_000
    parts = by_language(labels.tolist(), languages, 8, 1.0, rng())
    german = [part for part in parts if languages[part[0]] == "de"]
    assert len(german) == 4
    shares = np.bincount(labels[german[0]], minlength=60) / 500
    assert kstest(shares, beta_law(1.0, 3.0).cdf).pvalue > 1e-4


@st.composite
def shardable(draw: st.DrawFn) -> tuple[list[int], int, int]:
    labels = draw(st.lists(st.integers(0, 5), min_size=4, max_size=80))
    counts = Counter(labels)
    each = draw(st.integers(1, len(counts)))
    clients = draw(st.integers(-(-len(counts) // each), 20))
    return labels, clients, each


@given(shardable(), seeds)
@settings(max_examples=200)
def test_every_client_has_exactly_so_many_labels(data: tuple[list[int], int, int], seed: int) -> None:
    labels, clients, each = data
    if sum(min(count, clients) for count in Counter(labels).values()) < clients * each:
        with refused(DataError, worded=False):
            pathological(labels, clients, each, rng(seed))
        return
    parts = pathological(labels, clients, each, rng(seed))
    assert len(parts) == clients
    require_a_partition(parts, len(labels))
    assert {len({labels[index] for index in part}) for part in parts} == {each}


@pytest.mark.parametrize("each", [1, 2])
def test_pathological_clients_have_about_as_many_examples(each: int) -> None:
    labels = np.random.default_rng(5).choice(20, 11_300).tolist()
    sizes = [len(part) for part in pathological(labels, 100, each, rng())]
    assert max(sizes) < 1.5 * min(sizes)


@every(("clients", "each", "kind"), [(3, 6, ConfigError), (2, 2, ConfigError), (60, 2, DataError)])
def test_shards_that_cannot_be(clients: int, each: int, kind: type[UsageError]) -> None:
    with refused(kind):
        pathological(np.repeat(np.arange(5), 20).tolist(), clients, each, rng())


@pytest.mark.parametrize("text", PAPERS)
def test_a_matrix_says_how_many_of_each_label_a_client_has(text: str) -> None:
    shares = matrix_of(text)
    labels = np.repeat(np.arange(len(shares)), 1_000)
    parts = by_matrix(labels.tolist(), shares, rng())
    require_a_partition(parts, len(labels))
    found = [[int((labels[part] == label).sum()) for part in parts] for label in range(len(shares))]
    assert found == [[round(1_000 * share) for share in row] for row in shares]
    require_a_partition(by_matrix([0, 0], [[0.999, 0.001]], rng()), 2)  # rounding leaves no client empty


def test_which_examples_a_matrix_takes_is_random() -> None:
    labels, shares = [0] * 100 + [1] * 100, matrix_of(PAPERS[0])
    assert by_matrix(labels, shares, rng(0))[0].tolist() != by_matrix(labels, shares, rng(1))[0].tolist()
    assert by_matrix(labels, shares, rng(0))[0].tolist() == by_matrix(labels, shares, rng(0))[0].tolist()


@given(st.integers(0, 300), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_largest_remainders(count: int, weights: list[int]) -> None:
    sizes = by_share(count, np.array(weights, dtype=float)).tolist()
    assert sum(sizes) == count
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - Fraction(count * weight, sum(weights))) < 1 + Fraction(1, 10**9)


@every(
    "text", ["0.9 0.1; 0.1", "0.9 0.1; 0.1 0.8", "1.5 -0.5", "nan 1", "a b", "0.5, 0.5", "0.5 0.5;", " ", "1 0; 1 0"]
)
def test_a_matrix_that_is_none(text: str) -> None:
    with refused(ConfigError):
        matrix_of(text)


# Divisions that a configuration sets.


def divided(folder: Path, rows: Sequence[str], **data: object) -> tuple[Partition, sources.Source]:
    path = folder / "rows.csv"
    path.write_text("text,label,lang,who\n" + "".join(f"{row}\n" for row in rows))
    unit = data.pop("unit", "none")
    privacy = {} if unit == "none" else {"unit": unit, "epsilon": 8.0, "person_column": "who"}
    clients = {"clients": data.pop("clients")} if "clients" in data else {}
    config = RunConfig.from_dict(
        {"data": {"train": str(path), "test": str(path), **data}, "privacy": privacy, "federation": clients}
    )
    source = sources.load(config.data, tasks.build(config.data), seed=0, person=config.privacy.person_column)
    return divide(config, source), source


ROWS = [f"note {i},{'xyz'[i % 3]},{['de', 'fr'][i // 60]},p{i // 2}" for i in range(120)]
ASKED: list[tuple[str, dict[str, object]]] = [
    ("iid", {"clients": 6}),
    ("label_dirichlet", {"clients": 6, "alpha": 0.5}),
    ("language", {"clients": 6, "alpha": 0.5, "language": "lang"}),
    ("matrix", {"matrix": PAPERS[1]}),
    ("pathological", {"clients": 6, "labels_per_client": 1}),
]


@pytest.mark.parametrize("unit", ["none", "person"])
@pytest.mark.parametrize(("kind", "asked"), ASKED)
def test_a_configuration_is_divided_as_it_asks(tmp_path: Path, kind: str, asked: dict[str, object], unit: str) -> None:
    found, source = divided(tmp_path, ROWS, partition=kind, unit=unit, **asked)
    require_a_partition([np.sort(part) for part in found.parts], 120)
    assert len(found.names) == asked.get("clients", 2)
    if kind == "language":
        assert all(len({int(index) // 60 for index in part}) == 1 for part in found.parts)
    if kind == "pathological" and unit == "none":
        assert all(len({source.train.label[index] for index in part}) == 1 for part in found.parts)
    if unit == "person":
        homes = [{int(index) // 2 for index in part} for part in found.parts]
        assert sum(map(len, homes)) == 60  # no person's two examples are at two clients


def test_persons_stay_together_where_files_are_divided_anew(tmp_path: Path) -> None:
    """A list of files gives each file a client. A division that ignores the files must still keep a person's rows together."""
    paths = []
    for name in ("a", "b"):
        rows = "".join(f"note {i},{'xyz'[i % 3]},p{name}{i // 2}\n" for i in range(30))
        paths.append(tmp_path / f"{name}.csv")
        paths[-1].write_text("text,label,who\n" + rows)
    settings = {
        "data": {"train": tuple(map(str, paths)), "test": str(paths[0]), "partition": "iid"},
        "federation": {"clients": 5},
        "privacy": {"unit": "person", "epsilon": 8.0, "person_column": "who"},
    }
    config = RunConfig.from_dict(settings)
    source = sources.load(config.data, tasks.build(config.data), seed=0, person="who")
    assert source.train.person is not None
    persons = [{source.train.person[int(index)] for index in part} for part in divide(config, source).parts]
    assert sum(map(len, persons)) == 30


@every(
    ("data", "setting"),
    [
        ({"language": "lang"}, "data.language"),
        ({"labels_per_client": 1}, "data.labels_per_client"),
        ({"matrix": "1; 1"}, "data.matrix"),
        ({"partition": "pathological", "alpha": 1.0}, "data.alpha"),
        ({"partition": "language"}, "data.language"),
        ({"partition": "matrix"}, "data.matrix"),
        ({"partition": "pathological", "labels_per_client": 0}, "data.labels_per_client"),
    ],
)
def test_settings_of_one_split_with_another(data: dict[str, object], setting: str) -> None:
    with refused(ConfigError, setting):
        RunConfig.from_dict({"data": data})


ANIMALS, CARS = ("the old cat chased a dog", "the dog chased a cat"), ("the car has an engine", "an engine of the car")


def test_a_class_is_a_set_of_types_whatever_their_order() -> None:
    sets = [["person", "place"], [], ("place", "person", "person"), {"place"}, set()]
    assert label_skew.label_sets(sets) == [1, 0, 1, 2, 0]
    assert label_skew.label_sets(sets[::-1]) == [0, 2, 1, 0, 1]
    assert label_skew.label_sets([{"a"}, {"a"}, {"b"}, {"a"}], ["y", "x", "x", "y"]) == [2, 0, 1, 2], "sources divide"


@every("seed", range(5))
def test_texts_of_two_vocabularies_fall_into_clusters_of_one(seed: int) -> None:
    """k-means++ starts from four different texts, and no text joins a cluster with which it shares no word."""
    texts = [ANIMALS[i % 2] if i % 3 else CARS[i % 2] for i in range(60)]
    found = label_skew.clusters(texts, 4, seed)
    assert len(set(zip(found, texts, strict=True))) == len(set(found)) == 4


def test_every_step_of_k_means_brings_the_texts_nearer_to_their_centres() -> None:
    rng = np.random.default_rng(0)
    words = [f"w{index}" for index in range(40)]
    texts = [" ".join(rng.choice(words, 6, p=rng.dirichlet(np.full(40, 0.1)))) for _ in range(80)]
    found = np.array(label_skew.clusters(texts, 5))
    points = label_skew._weighed(texts).toarray()
    centres = np.array([points[found == index].sum(axis=0) for index in range(5)])
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    assert np.array_equal((points @ centres.T).argmax(axis=1), found)  # a fixed point of Lloyd's algorithm


def test_clusters_repeat_are_numbered_without_gaps_and_few_texts_are_few() -> None:
    texts = [f"{'abcdefgh'[i % 8]}word{i % 8} shared" for i in range(50)]
    assert label_skew.clusters(texts, 30, seed=3) == label_skew.clusters(texts, 30, seed=3)
    assert Counter(label_skew.clusters(texts, 30, seed=3)).keys() == set(range(8))  # eight different texts
    for few, expected in (([], []), (["x"], [0]), (["", " ", "?"], [0, 0, 0])):
        assert label_skew.clusters(few) == expected
