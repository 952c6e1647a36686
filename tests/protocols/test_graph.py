"""The ring: its distribution, its equality on every machine, its neighbours, and the guarantee of `holds_together`."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection

import pytest

from protocols.errors import ParameterError
from protocols.graph import ChosenGraph, Graph, below, choices, complete, ring
from tests.cells import every
from tests.protocols.slow import stream_words

SEED = bytes(range(32))
GOLDEN = (0, 6, 5, 3, 9, 4, 10, 2, 8, 7, 11, 1)
GOLDEN_NEIGHBOURS = (1, 5, 6, 11)


def naive_order(members: Collection[int], key: bytes) -> list[int]:
    """The shuffle of Fisher and Yates, word by word from one long keystream."""
    words, order = stream_words(key), sorted(members)
    for size in range(len(order), 1, -1):
        while (word := next(words)) >= (2**32 // size) * size:
            pass
        drawn = word % size
        order[size - 1], order[drawn] = order[drawn], order[size - 1]
    return order


def naive_neighbours(order: Collection[int], k: int, member: int) -> list[int]:
    row = list(order)
    places = {other: place for place, other in enumerate(row)}
    apart = {other: abs(places[other] - places[member]) for other in row}
    return sorted(other for other in row if 0 < min(apart[other], len(row) - apart[other]) <= k // 2)


def connected(graph: Graph, members: Collection[int]) -> bool:
    """Whether the members are connected through `neighbours` without passing other clients."""
    left = set(members)
    if not left:
        return False
    reached = [left.pop()]
    while reached:
        found = left.intersection(graph.neighbours(reached.pop()))
        left -= found
        reached.extend(found)
    return not left


def test_the_ring_of_a_seed_is_this_one_on_every_machine() -> None:
    assert ring(range(12), 4, SEED).order == GOLDEN
    assert ring(range(12), 4, SEED).neighbours(0) == GOLDEN_NEIGHBOURS


@every("count", [4, 5, 50, 1025, 5000])
def test_the_order_is_that_of_a_naive_shuffle(count: int) -> None:
    members = [7 * member + 3 for member in range(count)]
    assert list(ring(members[::-1], 2, SEED).order) == naive_order(members, SEED)


def test_every_order_is_equally_likely() -> None:
    """Chi-square over 24 orders, with 23 degrees of freedom: above 60 with probability 4e-5, and the seeds are fixed."""
    count = 2400
    seen = Counter(ring(range(4), 2, number.to_bytes(32, "big")).order for number in range(count))
    assert len(seen) == 24
    assert sum((times - count / 24) ** 2 / (count / 24) for times in seen.values()) < 60


@every(("limit", "passed_over"), [(3, [2**32 - 1]), (2**31 + 1, [2**31 + 1, 2**32 - 1]), (5000, [2**32 - 1]), (8, [])])
def test_words_that_would_favour_small_numbers_are_passed_over(limit: int, passed_over: list[int]) -> None:
    last = (2**32 // limit) * limit - 1
    assert below(limit, iter([*passed_over, last, 0])) == limit - 1


@every(("count", "k"), [(4, 2), (6, 4), (7, 4), (9, 2), (20, 6), (101, 98)])
def test_neighbours_are_the_nearest_places(count: int, k: int) -> None:
    graph = ring(range(count), k, SEED)
    assert not graph.complete
    for member in range(count):
        neighbours = graph.neighbours(member)
        assert list(neighbours) == naive_neighbours(graph.order, k, member)
        assert len(neighbours) == k
        assert all(member in graph.neighbours(other) for other in neighbours)


@pytest.mark.parametrize("k", [5, 6, 7, 100])
def test_as_many_neighbours_as_there_are_others_make_a_complete_graph(k: int) -> None:
    graph = ring([9, 4, 7, 1, 2, 30], k, SEED)
    assert graph == complete([30, 1, 2, 9, 4, 7])
    assert graph.complete
    assert (graph.order, graph.k) == ((1, 2, 4, 7, 9, 30), 5)
    assert graph.neighbours(4) == (1, 2, 7, 9, 30)


@every(
    "ask",
    [
        *(lambda k=k: ring(range(9), k, SEED) for k in (-2, 0, 1, 3)),
        *(lambda length=length: ring(range(9), 2, bytes(length)) for length in (0, 31, 33)),
        lambda: ring([1, 2, 3, 3, 4], 2, SEED),
        lambda: ring(range(9), 2, SEED).neighbours(9),
        lambda: choices(bytes(31), (2, 5, 6, 9, 11), 6, 2),
    ],
)
def test_unusable_graphs_are_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(ParameterError):
        ask()


def corrupt_sets(order: tuple[int, ...], half: int, window: int) -> list[set[int]]:
    """Every set with at most `window` members in any `half` consecutive places."""
    count = len(order)
    windows = [{order[(start + step) % count] for step in range(half)} for start in range(count)]
    subsets = (set(chosen) for size in range(count + 1) for chosen in itertools.combinations(order, size))
    return [chosen for chosen in subsets if all(len(chosen & part) <= window for part in windows)]


def test_no_corrupt_set_cuts_a_ring_that_holds_together() -> None:
    """Exhaustive: eight places, every set of alive members, every corrupt set that the window allows."""
    answers = Counter[bool]()
    for k, window in ((4, 0), (4, 1), (6, 0), (6, 1), (6, 2)):
        graph = ring(range(8), k, SEED)
        corrupt = corrupt_sets(graph.order, k // 2, window)
        for size in range(9):
            for alive in itertools.combinations(range(8), size):
                holds = graph.holds_together(alive, window)
                answers[holds] += 1
                if holds:
                    assert all(connected(graph, set(alive) - gone) for gone in corrupt)
    assert min(answers[True], answers[False]) > 20


def test_it_says_no_exactly_if_a_window_could_be_corrupt_throughout() -> None:
    """A comparison with a naive count, window by window."""
    source = random.Random(5)
    answers = Counter[bool]()
    for _ in range(600):
        count = source.randrange(7, 40)
        k = 2 * source.randrange(1, (count - 1) // 2)
        graph = ring(range(count), k, source.randbytes(32))
        alive = source.sample(range(count), source.randrange(count // 2, count + 1))
        window = source.randrange(0, max(1, k // 3))
        order = graph.order
        windows = [[order[(start + step) % count] for step in range(k // 2)] for start in range(count)]
        expected = all(sum(member in alive for member in part) > window for part in windows)
        assert graph.holds_together(alive, window) == expected
        answers[expected] += 1
    assert min(answers.values()) > 50


def test_strangers_do_not_count_as_alive() -> None:
    graph = ring(range(10), 2, SEED)
    assert graph.holds_together(range(10), 0)
    assert not graph.holds_together([*range(9), 77], 0)


def test_a_complete_graph_always_holds_together() -> None:
    graph = complete(range(6))
    for size in range(1, 7):
        for alive in itertools.combinations(range(6), size):
            assert graph.holds_together(alive, 5)
            assert connected(graph, alive)


def test_choices_are_uniform_and_depend_on_the_seed_alone() -> None:
    """All ordered pairs of other clients are equally frequent, and a longer choice begins with the shorter one."""
    clients, rng = (2, 5, 6, 9, 11), random.Random(5)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(3_000):
        seed = rng.randbytes(32)
        pair = choices(seed, clients, 6, 2)
        assert choices(seed, clients, 6, 4)[:2] == pair
        seen[pair] += 1
    assert set(seen) == {(one, other) for one in clients for other in clients if one != other and 6 not in (one, other)}
    assert sum((count - 250) ** 2 / 250 for count in seen.values()) < 35  # chi-square of 11, p < 1e-3


def test_the_relations_of_a_chosen_graph_are_each_others_inverses() -> None:
    rng = random.Random(6)
    clients = tuple(range(0, 60, 3))
    chosen = {me: choices(rng.randbytes(32), clients, me, 6) for me in clients}
    for members in (clients, clients[::2], clients[4:17]):
        graph = ChosenGraph({member: chosen[member] for member in members}, 3)
        assert graph.order == members
        for me in members:
            assert graph.holders(me) == tuple(sorted(set(chosen[me]) & set(members)))
            assert graph.firsts(me) == tuple(sorted(set(chosen[me][:3]) & set(members)))
            assert set(graph.owners(me)) == {one for one in members if me in chosen[one]}
            assert set(graph.first_of(me)) == {one for one in members if me in chosen[one][:3]}
            assert set(graph.partners(me)) == {*graph.firsts(me), *graph.first_of(me)}
            assert all(me in graph.partners(other) for other in graph.partners(me))
