"""The choice of neighbours and threshold, compared with exact counting and with simulated random draws.

The ring: its distribution, its equality on every machine, its neighbours, and the guarantee of `holds_together`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from protocols.errors import ParameterError
from protocols.graph import ChosenGraph, Graph, below, choices, complete, ring
from protocols.keys import registry_digest
from protocols.parameters import Parameters, Policy
from protocols.thresholds import ABORT, Choice, at_least, choose, colluding, counted_shares, losses
from tests.cells import chosen, every
from tests.protocols.slow import stream_words

SIZES = (10, 99, 100, 250)
LARGE = (1000, 5000)
SHARES = [(corrupt, dropout) for corrupt in (0.0, 0.1, 0.2) for dropout in (0.0, 0.05, 0.1, 0.2)]


def exact(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """P[H >= least] of the hypergeometric H, in exact arithmetic."""
    ways = sum(
        math.comb(marked, x) * math.comb(population - marked, drawn - x) for x in range(max(least, 0), drawn + 1)
    )
    return Fraction(ways, math.comb(population, drawn))


@every(
    ("population", "marked", "drawn"),
    [(1, 0, 1), (9, 9, 4), (10, 3, 8), (50, 20, 7), (799, 200, 140), (4999, 1000, 60)],
)
def test_tails_are_those_of_exact_counting(population: int, marked: int, drawn: int) -> None:
    tails = at_least(population, marked, drawn)
    assert tails.shape == (drawn + 2,)
    for least in range(drawn + 2):
        expected = exact(population, marked, drawn, least)
        assert tails[least] == pytest.approx(float(expected), rel=1e-8, abs=0)


def of_a_ring(choice: Choice, *, corrupt: int, missing: int) -> tuple[Fraction, Fraction]:
    """`failure` and `abort` of a ring by their definitions, in exact arithmetic."""
    n, k, left = choice.clients, choice.neighbours, choice.survivors
    failure = exact(left - 1, corrupt, min(k, left - 1), choice.corrupt + 1) + exact(
        left, corrupt, k // 2, choice.window + 1
    )
    abort = exact(n - 1, missing, k, k - choice.threshold + 1) + exact(n, missing, k // 2, k // 2 - choice.window)
    return n * failure, min(Fraction(1), n * abort)


def of_choices(choice: Choice, *, corrupt: int, missing: int) -> tuple[Fraction, Fraction]:
    """`failure` and `abort` where clients choose: a follows from `choice.partners`, and the terms for all s are added up."""
    n, k, m, left = choice.clients, choice.neighbours, choice.neighbours // 2, choice.survivors
    most = next(c for c in range(m + 1) if n * exact(n - 1, corrupt, m, c + 1) <= Fraction(1, 2**42))
    failure = n * exact(n - 1, corrupt, k, choice.corrupt + 1) + n * exact(n - 1, corrupt, m, most + 1)
    honest, a, cut = n - corrupt, choice.partners - most, 0.0
    assert a >= 1
    for s in range(a + 1, honest - a):
        r = max(a + 1, left - corrupt - s)
        if s + r <= honest and n - 1 - max(r, s) >= m:
            pairs = math.lgamma(honest + 1) - sum(math.lgamma(x + 1) for x in (s, r, honest - s - r))
            ways = [math.log(math.comb(n - 1 - x, m)) - math.log(math.comb(n - 1, m)) for x in (r, s)]
            cut += math.exp(min(0.0, pairs + s * ways[0] + r * ways[1]))
    abort = exact(n - 1, missing, k, k - choice.threshold + 1) + exact(n - 1, missing, m, m - choice.partners + 1)
    return failure + Fraction(cut), min(Fraction(1), n * abort)


@every("active", [False, True])
@every(("corrupt", "dropout"), SHARES)
@pytest.mark.parametrize("sizes", chosen([SIZES, LARGE], [SIZES], whole=True))
def test_every_choice_keeps_its_promises(sizes: tuple[int, ...], corrupt: float, dropout: float, active: bool) -> None:
    for clients in sizes:
        require_kept(clients, corrupt, dropout, active)


def require_kept(clients: int, corrupt: float, dropout: float, active: bool) -> None:
    choice = choose(clients, corrupt=corrupt, dropout=dropout, active=active)
    bad, missing = -(-round(100 * corrupt) * clients // 100), round(100 * dropout) * clients // 100
    h, c, t = choice.neighbours, choice.corrupt, choice.threshold
    assert choice.survivors == clients - missing
    assert c < t <= h
    assert 2 * t > h + c or not active
    if h == clients - 1:
        assert (c, choice.window, choice.failure, choice.abort) == (bad, 0, 0.0, 0.0)
        assert t <= choice.survivors - 1
        return
    assert h % 2 == 0
    assert clients >= 100
    assert h <= (clients - 1) / 2
    assert choice.window < h // 2
    promised = of_choices if active else of_a_ring
    failure, abort = promised(choice, corrupt=bad, missing=missing)
    assert choice.failure == pytest.approx(float(failure), rel=1e-6, abs=1e-30)
    assert choice.abort == pytest.approx(float(abort), rel=1e-8, abs=0)
    assert failure <= Fraction(1, 2**40)
    assert abort <= ABORT


@pytest.mark.parametrize("active", [False, True])
def test_a_clients_policy_accepts_every_choice(active: bool) -> None:
    for clients in (2, 10, 100, 250):
        for corrupt, dropout in SHARES:
            choice = choose(clients, corrupt=corrupt, dropout=dropout, active=active)
            invited = tuple(range(clients))
            keys = {client: client.to_bytes(32, "little") for client in invited}
            given = {name: getattr(choice, name) for name in ("neighbours", "threshold", "survivors", "partners")}
            demands = {name: getattr(choice, name) for name in ("corrupt", "window", "colluding", *given)}
            given["registry"] = registry_digest(keys, invited) if active else bytes(32)
            parameters = Parameters("run", 0, bytes(32), 1, 32, invited, active=active, **given)
            Policy(**demands, active=active, identities=keys, clients=clients).check(parameters)


def test_no_smaller_ring_would_do() -> None:
    for active in (False, True):
        found = choose(1000, corrupt=0.1, dropout=0.1, active=active)
        for k in range(2, found.neighbours, 2):
            try:
                smaller = choose(1000, corrupt=0.1, dropout=0.1, active=active, neighbours=k)
            except ParameterError:
                continue
            assert smaller.abort > ABORT


def test_the_choice_for_a_thousand_is_this_one() -> None:
    """Golden values, so that a change of the rules is noticed."""
    passive = choose(1000, corrupt=0.1, dropout=0.1, active=False)
    assert (passive.neighbours, passive.threshold, passive.corrupt, passive.window) == (96, 40, 39, 27)
    active = choose(1000, corrupt=0.1, dropout=0.1, active=True)
    assert (active.neighbours, active.threshold, active.corrupt, active.partners) == (96, 67, 37, 28)


def lost(choice: Choice, gone: int, source: np.random.Generator) -> bool:
    """Whether a round aborts where clients choose and `gone` clients are missing, from whichever stage on."""
    n, m = choice.clients, choice.neighbours // 2
    alive = np.arange(n) < n - gone  # choices are uniform, so the missing may as well be the last ones
    for member in range(n - gone):
        others = source.choice(n - 1, choice.neighbours, replace=False)
        stays = alive[others + (others >= member)]
        if stays.sum() < choice.threshold or stays[:m].sum() < choice.partners:
            return True
    return n - gone < choice.survivors


def test_where_clients_choose_rounds_abort_as_seldom_as_promised() -> None:
    choice = choose(60, corrupt=0.05, dropout=0.2, active=True, neighbours=20, security=20)
    source, trials = np.random.default_rng(4), 200
    share = sum(lost(choice, 60 - choice.survivors, source) for _ in range(trials)) / trials
    assert 0 < share <= choice.abort + 3 * math.sqrt(choice.abort / trials)
    assert lost(choice, 60 - choice.survivors + 1, source)


def test_given_neighbours_and_threshold_are_kept_to() -> None:
    choice = choose(1000, corrupt=0.1, dropout=0.1, active=True, neighbours=120, threshold=85)
    assert (choice.neighbours, choice.threshold) == (120, 85)
    small = choose(1000, corrupt=0.1, dropout=0.1, active=True, neighbours=50)
    assert small.neighbours == 50
    assert small.failure <= 2**-40
    assert small.abort > ABORT  # reported, and accepted since the caller fixed the neighbours
    assert choose(50, corrupt=0.1, dropout=0.1, active=False, threshold=34).threshold == 34
    for all_others in (49, 50, 1000):
        assert choose(50, corrupt=0.1, dropout=0.1, active=False, neighbours=all_others).neighbours == 49
    assert choose(1000, corrupt=0.1, dropout=0.1, active=True, threshold=120).threshold == 120


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (1, {}, "1 clients"),
    (10, {"corrupt": 1.0}, "corrupt"),
    *((10, {"dropout": value}, "dropout") for value in (-0.1, math.nan)),
    (10, {"security": 0}, "security"),
    *((clients, {"neighbours": value}, "neighbours") for clients, value in ((10, 0), (100, 7))),
    (10, {"corrupt": 0.5, "dropout": 0.4}, "lower corrupt or dropout"),
    (100, {"corrupt": 0.3, "dropout": 0.4}, r"dropout to at most 0\.34, or lower corrupt to at most 0\.18"),
    (100, {"corrupt": 0.0, "dropout": 0.6}, r"dropout to at most 0\.49$"),
    *((10, {"threshold": value}, "from 6 to 8") for value in (4, 9)),
    *((1000, {"neighbours": 100, "threshold": value}, "from 70 to 100") for value in (68, 101)),
    (1000, {"neighbours": 8}, "corrupt"),
]


@every(("clients", "changes", "says"), REFUSED)
def test_what_cannot_be_is_refused(clients: int, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        choose(clients, **{"corrupt": 0.1, "dropout": 0.1, "active": True, **changes})


@every("clients", [3, 4, 10, 25, 100])
def test_the_remedies_are_remedies(clients: int) -> None:
    """A share that the error recommends is accepted, and a share larger by two clients is refused."""
    refused = 0
    for corrupt in (0.0, 0.1, 0.3, 0.5):
        for dropout in (0.1, 0.4, 0.6, 0.7):
            try:
                choose(clients, corrupt=corrupt, dropout=dropout, active=True)
            except ParameterError as error:
                text = str(error)
            else:
                continue
            for name in ("dropout", "corrupt"):
                if f"lower {name} to at most " not in text:
                    continue
                refused += 1
                share = float(text.split(f"lower {name} to at most ")[1].split(",")[0])
                given: dict[str, Any] = {"corrupt": corrupt, "dropout": dropout, "active": True}
                choose(clients, **(given | {name: share}))
                too_much = (share * clients + 2.01) / clients  # rounding to three digits may have cost one client
                with pytest.raises(ParameterError):
                    choose(clients, **(given | {name: too_much}))
    assert refused


def test_shares_are_the_decimals_they_are_written_as() -> None:
    """The binary fraction nearest 0.29 is slightly smaller, and 100 times it would round down to 28 clients."""
    choice = choose(100, corrupt=0.29, dropout=0.29, active=False, neighbours=99)
    assert (choice.corrupt, choice.survivors) == (29, 71)


@every("clients", [2, 3, 4, 5, 8, 9, 10, 11, 30])
def test_colluders_are_counted_upwards_and_losses_as_far_as_a_sum_can_survive(clients: int) -> None:
    """Of three or more at least one for any share above 0, never fewer than the share, and the next one would be too many."""
    for share in (0.001, 0.1, 0.3, 0.49):
        found = colluding(clients, share)
        assert found == (-(-round(1000 * share) * clients // 1000) if clients > 2 else 0)
        assert counted_shares(clients, share, 0.0) == clients - found
        for active in (False, True):
            most = losses(clients, corrupt=share, active=active)
            for missing in range(clients):
                settings: dict[str, Any] = {"corrupt": share, "dropout": (missing + 0.5) / clients, "active": active}
                if missing <= most:
                    assert choose(clients, **settings).survivors == clients - missing
                else:
                    with pytest.raises(ParameterError):
                        choose(clients, **settings)
    assert colluding(clients, 0.0) == 0


# Graphs.

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
    for _ in range(1_200):
        seed = rng.randbytes(32)
        pair = choices(seed, clients, 6, 2)
        assert choices(seed, clients, 6, 4)[:2] == pair
        seen[pair] += 1
    assert set(seen) == {(one, other) for one in clients for other in clients if one != other and 6 not in (one, other)}
    assert sum((count - 100) ** 2 / 100 for count in seen.values()) < 35  # chi-square of 11, p < 1e-3


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
