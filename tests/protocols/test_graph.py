"""The ring: its distribution, its equality on every machine, its neighbours, and the guarantee of `holds_together`."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from protocols.errors import ParameterError
from protocols.graph import Graph, below, complete, ring
from tests.cells import every

SEED = bytes(range(32))
GOLDEN = (0, 6, 5, 3, 9, 4, 10, 2, 8, 7, 11, 1)
GOLDEN_NEIGHBOURS = (1, 5, 6, 11)


def seed(number: int) -> bytes:
    return number.to_bytes(32, "big")


def naive_order(members: Collection[int], key: bytes) -> list[int]:
    """The shuffle of Fisher and Yates, word by word from one long keystream."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(64 * len(members) + 64))
    words = iter(int.from_bytes(stream[at : at + 4], "little") for at in range(0, len(stream), 4))
    order = sorted(members)
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
    assert list(ring(members, 2, SEED).order) == naive_order(members, SEED)


def test_the_order_does_not_depend_on_how_members_are_given() -> None:
    members = [3, 1, 4, 15, 9, 2, 6]
    orders = {ring(given, 2, SEED).order for given in itertools.islice(itertools.permutations(members), 50)}
    assert len(orders) == 1
    assert ring(frozenset(members), 2, SEED).order in orders


def test_every_order_is_equally_likely() -> None:
    """Chi-square over 24 orders, with 23 degrees of freedom: above 60 with probability 4e-5, and the seeds are fixed."""
    count = 9600
    seen = Counter(ring(range(4), 2, seed(number)).order for number in range(count))
    assert len(seen) == 24
    assert sum((times - count / 24) ** 2 / (count / 24) for times in seen.values()) < 60


@pytest.mark.parametrize(
    ("limit", "passed_over"), [(3, [2**32 - 1]), (2**31 + 1, [2**31 + 1, 2**32 - 1]), (5000, [2**32 - 1])]
)
def test_words_that_would_favour_small_numbers_are_passed_over(limit: int, passed_over: list[int]) -> None:
    last = (2**32 // limit) * limit - 1
    assert below(limit, iter([*passed_over, last, 0])) == limit - 1
    assert below(limit, iter([*passed_over, 0])) == 0


def test_a_power_of_two_passes_nothing_over() -> None:
    assert below(8, iter([2**32 - 1])) == 7


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


def test_unusable_rings_are_refused() -> None:
    for k in (-2, 0, 1, 3):
        with pytest.raises(ParameterError, match=f"neighbours is {k}"):
            ring(range(9), k, SEED)
    for length in (0, 31, 33):
        with pytest.raises(ParameterError, match=f"has {length} bytes"):
            ring(range(9), 2, bytes(length))
    with pytest.raises(ParameterError, match="twice"):
        ring([1, 2, 3, 3, 4], 2, SEED)
    with pytest.raises(ParameterError, match="not one of the"):
        ring(range(9), 2, SEED).neighbours(9)


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


def test_a_greedy_adversary_does_not_cut_it() -> None:
    """Around the ring from a random place on, the adversary corrupts every alive member that `window` still allows."""
    source = random.Random(6)
    held = 0
    for _ in range(400):
        count = source.randrange(12, 60)
        k = 2 * source.randrange(2, (count - 1) // 2)
        half = k // 2
        window = source.randrange(1, half)
        graph = ring(range(count), k, source.randbytes(32))
        gone = set(source.sample(range(count), source.randrange(0, 1 + (half - window) // 2)))
        alive = set(range(count)) - gone
        if not graph.holds_together(alive, window):
            continue
        held += 1
        start, corrupt = source.randrange(count), set[int]()
        for step in range(count):
            place = (start + step) % count
            parts = [{(first + at) % count for at in range(half)} for first in range(place - half + 1, place + 1)]
            if graph.order[place] in alive and all(len(part & corrupt) < window for part in parts):
                corrupt.add(place)
        honest = alive - {graph.order[place] for place in corrupt}
        assert len(honest) >= 2
        assert connected(graph, honest)
    assert held > 100


def test_a_ring_is_cut_where_two_windows_are_empty() -> None:
    graph = ring(range(20), 4, SEED)
    gone = {graph.order[place] for place in (0, 1, 10, 11)}
    alive = set(range(20)) - gone
    assert not graph.holds_together(alive, 0)
    assert not connected(graph, alive)
    assert graph.holds_together(alive | {graph.order[0], graph.order[10]}, 0)
    assert not graph.holds_together(alive | {graph.order[0], graph.order[10]}, 1)


def test_the_window_around_the_end_of_the_row_counts() -> None:
    graph = ring(range(20), 6, SEED)
    gone = {graph.order[place] for place in (19, 0, 1)}
    assert not graph.holds_together(set(range(20)) - gone, 0)


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


def test_a_large_ring_is_judged() -> None:
    graph = ring(range(5000), 100, SEED)
    assert graph.holds_together(range(5000), 49)
    assert not graph.holds_together(range(5000), 50)
    gone = set(graph.order[2000:2021])
    assert graph.holds_together(set(range(5000)) - gone, 28)
    assert not graph.holds_together(set(range(5000)) - gone, 29)
