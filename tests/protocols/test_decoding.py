"""Unique decoding: compared with every set of t values, and with every tolerated number, position and kind of lies."""

from __future__ import annotations

import itertools
import math
import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import sharing
from protocols.errors import Tampering
from protocols.keys import Secret
from protocols.sharing import PRIME, SHARE, Interpolation, Rebuilder, misplaced, split
from tests.cells import chosen

RAW = bytes(range(7, 39))
SIZES = [(2, 1), (3, 1), (5, 3), (6, 5), (7, 4), (8, 4), (12, 5), (20, 14), (31, 17), (98, 72)]

Lie = Callable[[int, int], int]  # the wrong share, from the place and the right share


def fits(secret: Secret) -> bool:
    return secret.reveal() == RAW


def at_random(place: int, share: int) -> int:
    return (share + 1 + secrets.randbelow(PRIME - 1)) % PRIME


def together(threshold: int) -> Lie:
    """Lies on one other polynomial of the same degree, so that all of them agree with each other."""
    other = [secrets.randbelow(PRIME) for _ in range(threshold)]
    return lambda place, share: sum(one * place**power for power, one in enumerate(other)) % PRIME


def near(honest: Collection[int], threshold: int) -> Lie:
    """Lies on one other polynomial that also passes through t - 1 honest shares: no other is nearer to the shared one."""
    common = sorted(honest)[: threshold - 1]
    return lambda place, share: (share + math.prod(place - holder - 1 for holder in common)) % PRIME


def told(shares: Mapping[int, bytes], liars: Collection[int], lie: Lie) -> dict[int, bytes]:
    lies = {liar: lie(liar + 1, int.from_bytes(shares[liar], "little")).to_bytes(SHARE, "little") for liar in liars}
    assert all(lies[liar] != shares[liar] for liar in liars)
    return {**shares, **lies}


class Nothing:
    """Replaces the random generator: rebuilding fails if it tries random sets instead of decoding."""

    def sample(self, population: Sequence[int], count: int) -> list[int]:
        raise RuntimeError("sets are tried at random")


@pytest.mark.parametrize(("count", "threshold"), SIZES)
def test_every_number_of_liars_up_to_the_radius_is_named(
    count: int, threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_CHANCE", Nothing())
    holders = sorted(random.sample(range(3 * count), count))
    shares, kept = split(Secret(RAW), threshold, holders), Rebuilder()
    for number in range((count - threshold) // 2 + 1):
        for liars in (holders[:number], holders[count - number :], random.sample(holders, number)):
            for lie in (at_random, together(threshold), near(set(holders) - set(liars), threshold)):
                wrong = told(shares, liars, lie)
                assert kept.rebuild(wrong, threshold, fits) == (Secret(RAW), frozenset(liars))


def test_what_is_no_share_takes_nothing_from_the_radius_of_the_others_but_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 shares at threshold 5: without two that encode no number, ten are left, of which (10 - 5) // 2 = 2 may be wrong."""
    monkeypatch.setattr(sharing, "_CHANCE", Nothing())
    for liars in itertools.combinations(range(2, 12), 2):
        wrong = told(split(Secret(RAW), 5, range(12)), liars, together(5)) | {0: b"", 1: b"\xff" * SHARE}
        assert Rebuilder().rebuild(wrong, 5, fits) == (Secret(RAW), frozenset({0, 1, *liars}))


@pytest.mark.parametrize(
    ("count", "threshold"), chosen([(3, 2), (6, 3), (7, 4), (12, 5), (20, 14), (98, 72)], [(3, 2), (7, 4)])
)
def test_beyond_the_radius_no_wrong_secret_is_accepted(count: int, threshold: int) -> None:
    """This includes so many liars that their own polynomial is the nearest one."""
    shares = split(Secret(RAW), threshold, range(count))
    for number in range((count - threshold) // 2 + 1, count + 1):
        liars = random.sample(range(count), number)
        for lie in (at_random, together(threshold)):
            try:
                found, wrong = Rebuilder().rebuild(told(shares, liars, lie), threshold, fits)
            except Tampering:
                continue
            assert found == Secret(RAW)
            assert number <= count - threshold
            assert wrong == frozenset(liars)


def test_a_majority_that_agrees_on_another_secret_is_found_out_by_the_commitment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven shares at threshold 3. At most four liars can be identified; with five, decoding returns the liars' polynomial.

    With four liars, one of the 35 sets of three shares has no liar; with this seed it is among the sets tried.
    """
    monkeypatch.setattr(sharing, "_CHANCE", random.Random(0))
    shares = split(Secret(RAW), 3, range(7))
    four, five = told(shares, (0, 1, 2, 4), together(3)), told(shares, (0, 1, 3, 5, 6), together(3))
    assert Rebuilder().rebuild(four, 3, fits) == (Secret(RAW), frozenset({0, 1, 2, 4}))
    values = {holder + 1: int.from_bytes(share, "little") for holder, share in five.items()}
    assert misplaced(Interpolation(sorted(values)), 3, values) == frozenset({3, 5})  # decoding blames the honest shares
    with pytest.raises(Tampering, match="no 3 of 7"):
        Rebuilder().rebuild(five, 3, fits)


def test_no_more_than_two_secrets_are_judged_within_the_radius() -> None:
    shares = split(Secret(RAW), 4, range(12))
    for liars, expected in (((0, 1, 2, 3), 2), ((3,), 2), ((4, 5, 6, 11), 1)):
        tried: list[Secret] = []

        def noted(secret: Secret, tried: list[Secret] = tried) -> bool:
            tried.append(secret)
            return fits(secret)

        Rebuilder().rebuild(told(shares, liars, at_random), 4, noted)
        assert len(tried) == expected


def on_one(values: Mapping[int, int], believed: Sequence[int]) -> frozenset[int]:
    """The places whose values are not on the polynomial through the believed places, by Lagrange's formula in fractions."""
    off = set()
    for point in values.keys() - set(believed):
        total = 0
        for one in believed:
            weight = Fraction(1)
            for other in set(believed) - {one}:
                weight *= Fraction(point - other, one - other)
            total += values[one] * weight.numerator * pow(weight.denominator, -1, PRIME)
        if (total - values[point]) % PRIME:
            off.add(point)
    return frozenset(off)


@given(st.data())
def test_it_is_the_nearest_polynomial_of_all_if_that_is_near_enough(data: st.DataObject) -> None:
    """A comparison with the polynomials through every t values. Few different values occur, so many lie on one polynomial."""
    places = sorted(data.draw(st.sets(st.integers(1, 9) | st.integers(1, 2**33), min_size=1, max_size=7)))
    threshold = data.draw(st.integers(1, len(places)))
    numbers = st.sampled_from([0, 0, 0, 1, PRIME - 1]) | st.integers(0, PRIME - 1)
    values = {place: data.draw(numbers) for place in places}
    nearest = min((on_one(values, chosen) for chosen in itertools.combinations(places, threshold)), key=len)
    expected = nearest if len(nearest) <= (len(places) - threshold) // 2 else None
    assert misplaced(Interpolation(places), threshold, values) == expected


def test_a_recurrence_longer_than_the_radius_says_nothing_even_if_its_roots_are_places() -> None:
    """Values 0 and 1 at places 1 and 2, threshold 1: the recurrence has the root 1, a place, but either value may be wrong."""
    assert misplaced(Interpolation((1, 2)), 1, {1: 0, 2: 1}) is None
