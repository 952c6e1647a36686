"""The label and language skews of the papers, each tested for its defining property, and classes of unlabelled examples."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta as beta_law
from scipy.stats import kstest

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import label_skew, sources
from secure_fed.learning.data.label_skew import (
    Indices,
    by_language,
    by_matrix,
    by_share,
    label_dirichlet,
    matrix_of,
    pathological,
)
from secure_fed.learning.data.partition import Partition, divide, iid, jensen_shannon, partition
from secure_fed.rounds.cohort import cohort_sampler
from tests.cells import every

seeds = st.integers(0, 2**32 - 1)
labels_lists = st.lists(st.integers(0, 6), min_size=1, max_size=80)
PAPERS = ("0.9 0.1; 0.1 0.9", "0.7 0.3; 0.2 0.8; 0.2 0.8")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def require_a_partition(parts: Sequence[Indices], count: int) -> None:
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert all(len(part) and part.tolist() == sorted(part.tolist()) for part in parts)


@given(labels_lists, st.integers(1, 80), st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 1e300]), seeds)
def test_label_dirichlet_gives_each_example_once(labels: list[int], clients: int, beta: float, seed: int) -> None:
    clients = min(clients, len(labels))
    parts = label_dirichlet(labels, clients, beta, rng(seed))
    assert len(parts) == clients
    require_a_partition(parts, len(labels))
    again = label_dirichlet(labels, clients, beta, rng(seed))
    assert [part.tolist() for part in parts] == [part.tolist() for part in again]


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


def test_which_clients_speak_a_language_is_random() -> None:
    languages = ["de"] * 10 + ["fr"] * 10
    first = {languages[by_language([0] * 20, languages, 4, 1.0, rng(seed))[0][0]] for seed in range(30)}
    assert first == {"de", "fr"}


def test_languages_that_do_not_go_round() -> None:
    with pytest.raises(ConfigError, match=r"federation\.clients is 1, fewer than the 2 languages .* at least 2"):
        by_language([0, 0], ["a", "b"], 1, 1.0, rng())
    with pytest.raises(DataError, match=r"'b' has 1 training examples for 2 clients; .*at most 2"):
        by_language([0] * 5, ["a"] * 4 + ["b"], 4, 1.0, rng())


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
        with pytest.raises(DataError, match=r"too few|cannot be divided"):
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


def test_any_two_labels_can_meet_at_a_client() -> None:
    labels = np.repeat(np.arange(5), 40)
    met = {
        frozenset(labels[part].tolist())
        for seed in range(30)
        for part in pathological(labels.tolist(), 10, 2, rng(seed))
    }
    assert len(met) == 10


@pytest.mark.parametrize(
    ("clients", "each", "reason"),
    [
        (3, 6, r"labels_per_client is 6 and the data have 5 labels.*at most 5"),
        (2, 2, r"2 clients with 2 labels each cannot hold all 5 labels; .*at least 3"),
        (60, 2, r"60 clients with 2 labels each; lower"),
    ],
)
def test_shards_that_cannot_be(clients: int, each: int, reason: str) -> None:
    with pytest.raises((ConfigError, DataError), match=reason):
        pathological(np.repeat(np.arange(5), 20).tolist(), clients, each, rng())


@pytest.mark.parametrize("text", PAPERS)
def test_a_matrix_says_how_many_of_each_label_a_client_has(text: str) -> None:
    shares = matrix_of(text)
    labels = np.repeat(np.arange(len(shares)), 1_000)
    parts = by_matrix(labels.tolist(), shares, rng())
    require_a_partition(parts, len(labels))
    found = [[int((labels[part] == label).sum()) for part in parts] for label in range(len(shares))]
    assert found == [[round(1_000 * share) for share in row] for row in shares]


def test_which_examples_a_matrix_takes_is_random() -> None:
    labels, shares = [0] * 100 + [1] * 100, matrix_of(PAPERS[0])
    assert by_matrix(labels, shares, rng(0))[0].tolist() != by_matrix(labels, shares, rng(1))[0].tolist()
    assert by_matrix(labels, shares, rng(0))[0].tolist() == by_matrix(labels, shares, rng(0))[0].tolist()


def test_rounding_leaves_no_client_empty() -> None:
    require_a_partition(by_matrix([0, 0], [[0.999, 0.001]], rng()), 2)


@given(st.integers(0, 300), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_largest_remainders(count: int, weights: list[int]) -> None:
    sizes = by_share(count, np.array(weights, dtype=float)).tolist()
    assert sum(sizes) == count
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - Fraction(count * weight, sum(weights))) < 1 + Fraction(1, 10**9)


@every(
    ("text", "reason"),
    [
        ("0.9 0.1; 0.1", r"row 2 of data\.matrix has 1 numbers and the first 2"),
        ("0.9 0.1; 0.1 0.8", r"row 2 .*add up to 1"),
        ("1.5 -0.5", r"row 1 .*shares"),
        ("nan 1", r"row 1 .*shares"),
        ("a b", r"data\.matrix is 'a b'; write a row of numbers"),
        ("0.5, 0.5", r"data\.matrix is '0\.5, 0\.5'; write"),
        ("0.5 0.5;", r"row 2 of data\.matrix has 0 numbers"),
        (" ", r"row 1 of data\.matrix has 0 numbers"),
        ("1 0; 1 0", r"column 2 .*all zeros"),
    ],
)
def test_a_matrix_that_is_none(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        matrix_of(text)


def test_a_matrix_for_other_labels_or_clients() -> None:
    with pytest.raises(ConfigError, match=r"data\.matrix has 2 rows and the data 3 labels"):
        by_matrix([0, 1, 2], matrix_of(PAPERS[0]), rng())
    with pytest.raises(ConfigError, match=r"federation\.clients is 5 and data\.matrix has 2 columns"):
        partition("matrix", [0, 1, 1, 1, 0], clients=5, rng=rng(), matrix=matrix_of(PAPERS[0]))


@pytest.mark.parametrize("clients", [3, 5, 10, 20, 50])
def test_silos_of_equal_share(clients: int) -> None:
    sizes = [len(part) for part in iid(1_003, clients, rng())]
    assert (sum(sizes), max(sizes) - min(sizes)) == (1_003, int(1_003 % clients > 0))


@pytest.mark.parametrize("kind", ["label_dirichlet", "language", "pathological"])
def test_fewer_examples_than_clients(kind: str) -> None:
    with pytest.raises(DataError, match=r"4 clients|too few for 4"):
        partition(kind, [0, 1, 0], clients=4, rng=rng(), languages=["a"] * 3)


# Divisions that a configuration sets.


def divided(folder: Path, rows: Sequence[str], **data: object) -> tuple[Partition, sources.Source]:
    path = folder / "rows.csv"
    path.write_text("text,label,lang,who\n" + "".join(f"{row}\n" for row in rows))
    unit = data.pop("unit", "none")
    privacy = {} if unit == "none" else {"unit": unit, "epsilon": 8.0, "group_column": "who"}
    clients = {"clients": data.pop("clients")} if "clients" in data else {}
    config = RunConfig.from_dict(
        {"data": {"train": str(path), "test": str(path), **data}, "privacy": privacy, "federation": clients}
    )
    source = sources.load(config.data, tasks.build(config.data), seed=0, group=config.privacy.group_column)
    return divide(config, source), source


ROWS = [f"note {i},{'xyz'[i % 3]},{['de', 'fr'][i // 60]},p{i // 2}" for i in range(120)]
ASKED: list[tuple[str, dict[str, object]]] = [
    ("iid", {"clients": 6}),
    ("label_dirichlet", {"clients": 6, "alpha": 0.5}),
    ("language", {"clients": 6, "alpha": 0.5, "language": "lang"}),
    ("matrix", {"matrix": PAPERS[1]}),
    ("pathological", {"clients": 6, "labels_per_client": 1}),
]


@pytest.mark.parametrize("unit", ["none", "group"])
@pytest.mark.parametrize(("kind", "asked"), ASKED)
def test_a_configuration_is_divided_as_it_asks(tmp_path: Path, kind: str, asked: dict[str, object], unit: str) -> None:
    found, source = divided(tmp_path, ROWS, partition=kind, unit=unit, **asked)
    require_a_partition([np.sort(part) for part in found.parts], 120)
    assert len(found.names) == asked.get("clients", 2)
    if kind == "language":
        assert all(len({int(index) // 60 for index in part}) == 1 for part in found.parts)
    if kind == "pathological" and unit == "none":
        assert all(len({source.train.label[index] for index in part}) == 1 for part in found.parts)
    if unit == "group":
        homes = [{int(index) // 2 for index in part} for part in found.parts]
        assert sum(map(len, homes)) == 60  # no person's two examples are at two clients


def test_persons_stay_together_where_files_are_divided_anew(tmp_path: Path) -> None:
    """A list of files gives each file a client. A division that ignores the files must still keep a person's rows together."""
    for name in ("a", "b"):
        rows = "".join(f"note {i},{'xyz'[i % 3]},p{name}{i // 2}\n" for i in range(30))
        (tmp_path / f"{name}.csv").write_text("text,label,who\n" + rows)
    paths = tuple(str(tmp_path / f"{name}.csv") for name in ("a", "b"))
    config = RunConfig.from_dict(
        {
            "data": {"train": paths, "test": paths[0], "partition": "iid"},
            "federation": {"clients": 5},
            "privacy": {"unit": "group", "epsilon": 8.0, "group_column": "who"},
        }
    )
    source = sources.load(config.data, tasks.build(config.data), seed=0, group="who")
    parts = divide(config, source).parts
    assert source.train.group is not None
    assert sum(len({source.train.group[int(index)] for index in part}) for part in parts) == 30


def test_a_language_column_that_is_not_there_is_asked_for_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.language"):
        divided(tmp_path, ROWS, partition="language", language="tongue")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"language": "lang"}, r"data\.language = 'lang' has no effect here: it needs data\.partition = 'language'"),
        ({"labels_per_client": 1}, r"data\.labels_per_client = 1 has no effect"),
        ({"matrix": "1; 1"}, r"data\.matrix = '1; 1' has no effect"),
        ({"partition": "pathological", "alpha": 1.0}, r"data\.alpha = 1\.0 has no effect"),
        ({"partition": "language"}, r"'language', but data\.language names no column"),
        ({"partition": "matrix"}, r"'matrix', but data\.matrix gives"),
        ({"partition": "pathological", "labels_per_client": 0}, r"at least 1"),
    ],
)
def test_settings_of_one_split_with_another(data: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RunConfig.from_dict({"data": data})


def test_skew_shows_in_the_divergence() -> None:
    labels = np.repeat(np.arange(4), 500).tolist()
    apart = {
        kind: jensen_shannon(labels, partition(kind, labels, clients=8, rng=rng(), labels_per_client=1).parts, 4)
        for kind in ("iid", "pathological")
    }
    assert apart["iid"] < 0.02
    assert math.isclose(apart["pathological"], 24 / 28)  # of 28 pairs of clients, 4 share a label


def test_ten_of_a_thousand_devices_in_every_round() -> None:
    """FedTT's cross-device setting: all devices are equally likely, and none is drawn twice in a round."""
    config = RunConfig.from_dict({"federation": {"clients": 1_000, "cohort": 10}})
    sampler = cohort_sampler(config, 1_000)
    coins = rng()
    cohorts = [sampler.draw(coins.random) for _ in range(3_000)]
    assert {len(set(cohort)) for cohort in cohorts} == {10}
    drawn = np.bincount(np.concatenate(cohorts), minlength=1_000)
    # Each count is Binomial(3000, 0.01), with mean 30. The chance that any of the 1,000 leaves [1, 120] is below 1e-9.
    assert drawn.min() >= 1
    assert drawn.max() <= 120


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
