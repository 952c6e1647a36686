"""Secret sharing: compared with Lagrange's formula in fractions for every subset; secrecy of too few shares; liars named.

Unique decoding is compared with every set of t values, and with every tolerated number, position and kind of lies.
"""

from __future__ import annotations

import itertools
import math
import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import sharing
from protocols.errors import Aborted, ParameterError, Tampering
from protocols.keys import Secret
from protocols.sharing import PRIME, SHARE, Interpolation, Rebuilder, misplaced, split
from tests.cells import chosen, every
from tests.protocols.slow import interpolated

RAW = bytes(range(7, 39))


def naive(shares: Mapping[int, bytes]) -> int:
    """f(0) modulo p."""
    return int.from_bytes(interpolated(shares), "little")


def is_secret(raw: bytes) -> Callable[[Secret], bool]:
    return lambda secret: secret.reveal() == raw


def shifted(share: bytes, by: int) -> bytes:
    return ((int.from_bytes(share, "little") + by) % PRIME).to_bytes(SHARE, "little")


def test_the_modulus_is_the_least_number_above_two_to_the_256_that_passes_for_a_prime() -> None:
    """By Fermat's test, which few composite numbers pass to many bases."""
    assert PRIME == 2**256 + 297
    for above in range(1, 298, 2):
        number = 2**256 + above
        assert all(pow(base, number - 1, number) == 1 for base in range(2, 60)) == (number == PRIME)


@every("raw", [RAW, bytes(32), b"\xff" * 32])
def test_any_threshold_of_shares_gives_the_secret(raw: bytes) -> None:
    holders = (0, 1, 4, 9, 2**32 - 2, 77)
    for threshold in range(1, len(holders) + 1):
        shares = split(Secret(raw), threshold, holders)
        assert shares.keys() == set(holders)
        assert {len(share) for share in shares.values()} == {SHARE}
        for count in range(threshold, len(holders) + 1):
            for few in itertools.combinations(holders, count):
                some = {holder: shares[holder] for holder in few}
                assert naive(some) == int.from_bytes(raw, "little")
                assert Rebuilder().rebuild(some, threshold, is_secret(raw)) == (Secret(raw), frozenset())


def test_the_polynomial_has_the_degree_that_the_threshold_says() -> None:
    """One share fewer gives another secret, and no two polynomials have the same coefficients."""
    shares = split(Secret(RAW), 4, range(6))
    for few in itertools.combinations(range(6), 3):
        assert naive({holder: shares[holder] for holder in few}) != int.from_bytes(RAW, "little")
    firsts = {split(Secret(RAW), 2, range(2))[0] for _ in range(200)}
    assert len(firsts) == 200


def test_fewer_shares_than_the_threshold_are_equally_likely_for_every_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the integers modulo 7, with every coefficient: any t - 1 shares occur once with each secret."""
    monkeypatch.setattr(sharing, "PRIME", 7)
    for holders in itertools.combinations(range(6), 2):
        seen: Counter[tuple[int, ...]] = Counter()
        for secret, *coefficients in itertools.product(range(7), repeat=3):
            drawn = iter(coefficients)
            monkeypatch.setattr(sharing.secrets, "randbelow", lambda below, drawn=drawn: next(drawn))
            shares = split(Secret(bytes([secret]) + bytes(31)), 3, range(6))
            seen[secret, *(shares[holder][0] for holder in holders)] += 1
        assert set(seen.values()) == {1}  # one polynomial for every secret and every two shares
        assert len(seen) == 7**3


@every("threshold", [1, 2, 8, 130])
def test_coefficients_are_drawn_from_the_whole_field_by_the_operating_system(threshold: int) -> None:
    """With the largest coefficients, so that the two polynomials of `split_each` would run into each other."""
    asked: list[int] = []

    def largest(below: int) -> int:
        asked.append(below)
        return below - 1

    holders = (0, 1, 5, 1022, 2**16, 2**32 - 2, *range(10, 10 + threshold))
    with patch.object(sharing.secrets, "randbelow", largest):
        dealt = sharing.split_each([Secret(RAW), Secret(b"\xff" * 32)], threshold, holders)
    assert asked == [PRIME] * 2 * (threshold - 1)
    for raw, shares in zip((RAW, b"\xff" * 32), dealt, strict=True):
        for holder, share in shares.items():
            rest = sum(-pow(holder + 1, power, PRIME) for power in range(1, threshold))
            assert int.from_bytes(share, "little") == (int.from_bytes(raw, "little") + rest) % PRIME


TWO = split(Secret(RAW), 2, range(3))


@every(
    ("error", "ask"),
    [
        # Holder -1 would get f(0), the secret itself.
        *(
            (ParameterError, lambda threshold=threshold, holders=holders: split(Secret(RAW), threshold, holders))
            for threshold, holders in ((0, (1, 2)), (3, (1, 2)), (-1, (1, 2)), (1, ()), (2, (1, 1)), (2, (-1, 1)))
        ),
        *((ParameterError, lambda n=n: split(Secret(bytes(n)), 2, (1, 2))) for n in (0, 16, 31, 33)),
        *((ParameterError, lambda t=t: Rebuilder().rebuild(TWO, t, is_secret(RAW))) for t in (0, -1)),
        (ParameterError, lambda: Rebuilder().rebuild(TWO | {-1: bytes(SHARE)}, 2, is_secret(RAW))),
        *(
            (Aborted, lambda n=n: Rebuilder().rebuild({i: TWO[i] for i in range(n)}, 3, is_secret(RAW)))
            for n in range(3)
        ),
    ],
)
def test_what_cannot_be_shared_or_rebuilt_is_refused(error: type[Exception], ask: Callable[[], object]) -> None:
    with pytest.raises(error):
        ask()


@every("bit", [*range(0, 256, 5), 256, 257, 263])
def test_every_bit_of_a_share_counts(bit: int) -> None:
    shares = split(Secret(RAW), 2, range(4))
    for liar in range(4):
        flipped = int.from_bytes(shares[liar], "little") ^ 1 << bit
        wrong = shares | {liar: flipped.to_bytes(SHARE, "little")}
        assert Rebuilder().rebuild(wrong, 2, is_secret(RAW)) == (Secret(RAW), frozenset({liar}))


@pytest.mark.parametrize("liar", [0, 4])
def test_a_share_has_one_encoding(liar: int) -> None:
    """A share of another length, or larger by p, is wrong even if it encodes the same number."""
    shares = split(Secret(RAW), 3, range(5))
    number = int.from_bytes(shares[liar], "little")
    for other in (shares[liar] + b"\0", (number + PRIME).to_bytes(34, "little")[:33], b"", shares[liar][:-1]):
        found, wrong = Rebuilder().rebuild(shares | {liar: other}, 3, is_secret(RAW))
        assert (found.reveal(), wrong) == (RAW, frozenset({liar}))


def test_shares_that_nothing_fits_are_somebodys_lie() -> None:
    shares = split(Secret(RAW), 3, range(5))
    for liars in ((0, 1, 2), (2, 3, 4), range(5)):
        wrong = shares | {liar: shifted(shares[liar], secrets.randbits(200)) for liar in liars}
        with pytest.raises(Tampering, match="no 3 of 5 shares"):
            Rebuilder().rebuild(wrong, 3, is_secret(RAW))
    with pytest.raises(Tampering, match="no 3 of 3"):
        Rebuilder().rebuild({**dict(itertools.islice(shares.items(), 2)), 4: bytes(SHARE)}, 3, is_secret(RAW))


def test_a_seeded_generator_neither_steers_the_attempts_nor_is_moved() -> None:
    """Otherwise colluding clients could predict the sets tried, and the caller's random numbers would depend on this call."""
    shares = {holder: secrets.token_bytes(32) + b"\0" for holder in range(10)}  # so that every set gives another secret
    state, tried = random.getstate(), []
    try:
        for _ in range(2):
            random.seed(0)
            seeded = random.getstate()
            with pytest.raises(Tampering):
                Rebuilder().rebuild(shares, 5, lambda secret: bool(tried.append(secret.reveal())))
            assert random.getstate() == seeded
    finally:
        random.setstate(state)
    half = len(tried) // 2
    assert tried[0] == tried[half]  # the first attempt is always the same
    assert tried[1:half] != tried[half + 1 :]


def attempts(shares: Mapping[int, bytes], threshold: int) -> int:
    """The number of secrets that are tried before rebuilding fails."""
    tried: list[Secret] = []
    with pytest.raises(Tampering):
        Rebuilder().rebuild(shares, threshold, lambda secret: bool(tried.append(secret)))
    return len(tried)


def test_attempts_are_bounded() -> None:
    assert attempts({holder: secrets.token_bytes(32) + b"\0" for holder in range(10)}, 5) == 512


def test_attempts_that_cannot_succeed_are_not_made() -> None:
    """If all shares agree, every set gives the same secret; with many holders and liars, hardly any set has no liar."""
    assert attempts(split(Secret(RAW), 5, range(10)), 5) == 1
    assert attempts(split(Secret(RAW), 5, range(5)), 5) == 1
    assert attempts({holder: secrets.token_bytes(32) + b"\0" for holder in range(98)}, 72) == 1
    shares = split(Secret(RAW), 72, range(98))
    assert attempts(shares | {97: shifted(shares[97], 1)}, 72) == 1
    assert attempts(shares | {0: shifted(shares[0], 1)}, 72) == 2


def test_a_number_that_no_secret_is_does_not_reach_the_judge() -> None:
    """A polynomial can have the 297 values from 2^256 to p - 1 at zero, and 32 bytes cannot encode them."""
    judged: list[Secret] = []
    shares = {holder: (2**256 + 5).to_bytes(SHARE, "little") for holder in range(3)}
    with pytest.raises(Tampering):
        Rebuilder().rebuild(shares, 3, lambda secret: not judged.append(secret))
    assert judged == []


def test_one_rebuilder_serves_sets_of_holders_and_thresholds_in_any_order() -> None:
    """Its state for one set of holders is not used for another: compared with fresh rebuilders, over overlapping sets."""
    chance, kept = random.Random(5), Rebuilder()
    for _ in range(40):
        holders = sorted(chance.sample(range(8), chance.choice((4, 5, 5, 6))))
        threshold, raw = chance.choice((2, 3)), chance.randbytes(32)
        shares = split(Secret(raw), threshold, holders)
        liars = set(chance.sample(holders, chance.choice((0, 0, 1, 1, 2)))) if len(holders) - threshold > 1 else set()
        wrong = shares | {liar: shifted(shares[liar], chance.getrandbits(200)) for liar in liars}
        expected = (Secret(raw), frozenset(liars))
        assert kept.rebuild(wrong, threshold, is_secret(raw)) == expected
        assert Rebuilder().rebuild(wrong, threshold, is_secret(raw)) == expected


def framed(shares: Mapping[int, bytes], liars: tuple[int, int], basis: tuple[int, ...]) -> dict[int, bytes]:
    """Shares with two lies that leave the secret of `basis` unchanged, so that trusting the basis means blaming all others."""
    ones = {holder: shifted(bytes(SHARE), int(holder == liars[0])) for holder in basis}
    others = {holder: shifted(bytes(SHARE), int(holder == liars[1])) for holder in basis}
    lies = {liars[0]: naive(others), liars[1]: -naive(ones)}
    return {**shares, **{liar: shifted(shares[liar], lie) for liar, lie in lies.items()}}


@every(("count", "blamed"), [(8, {1, 2}), (5, {4})])
def test_liars_who_agree_on_a_lie_that_fits_cannot_blame_the_others(count: int, blamed: set[int]) -> None:
    """With five holders and one redundant share the liars cannot be identified, but the secret is right."""
    lies = framed(split(Secret(RAW), 4, range(count)), (1, 2), (0, 1, 2, 3))
    assert naive({holder: lies[holder] for holder in range(4)}) == int.from_bytes(RAW, "little")
    assert Rebuilder().rebuild(lies, 4, is_secret(RAW)) == (Secret(RAW), frozenset(blamed))


def test_the_audit_is_at_a_point_that_nobody_can_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    draw = sharing.secrets.randbelow

    def noted(below: int) -> int:
        asked.append(below)
        return draw(below)

    shares = split(Secret(RAW), 2, range(4))
    monkeypatch.setattr(sharing.secrets, "randbelow", noted)
    Rebuilder().rebuild(shares, 2, is_secret(RAW))
    assert asked == [PRIME - 2**64]


def test_a_seed_and_a_mask_key_are_shared_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coefficients of the first polynomial are drawn before those of the second, as by two calls of `split`."""
    secrets, holders = [Secret(bytes([one]) * 32) for one in (7, 200)], (0, 4, 5, 1000, 70_000)
    for threshold in (1, 3, 5):
        monkeypatch.setattr(sharing.secrets, "randbelow", random.Random(3).randrange)
        apart = [sharing.split(secret, threshold, holders) for secret in secrets]
        monkeypatch.setattr(sharing.secrets, "randbelow", random.Random(3).randrange)
        assert sharing.split_each(secrets, threshold, holders) == apart


SIZES = [(2, 1), (3, 1), (5, 3), (6, 5), (7, 4), (8, 4), (12, 5), (20, 14), (31, 17), (98, 72)]

Lie = Callable[[int, int], int]  # the wrong share, from the place and the right share


def at_random(place: int, share: int) -> int:
    return (share + 1 + secrets.randbelow(PRIME - 1)) % PRIME


def together(threshold: int) -> Lie:
    """Lies on one other polynomial of the same degree, so that all of them agree with each other."""
    other = [secrets.randbelow(PRIME) for _ in range(threshold)]
    return lambda place, share: sum(one * place**power for power, one in enumerate(other)) % PRIME


def cancelling(place: int, share: int) -> int:
    """Three of these lies at places one after the other sum to zero; the audit weighs them at random."""
    return (share + (1, -2, 1)[place % 3]) % PRIME


def another(threshold: int) -> Lie:
    """Lies on another polynomial with the same secret."""
    shares = split(Secret(RAW), threshold, range(300))
    return lambda place, share: int.from_bytes(shares[place - 1], "little")


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


@pytest.mark.parametrize(("count", "threshold"), chosen(SIZES, SIZES[:8]))
def test_every_number_of_liars_up_to_the_radius_is_named(
    count: int, threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_CHANCE", Nothing())
    holders = sorted(random.sample(range(3 * count), count))
    shares, kept = split(Secret(RAW), threshold, holders), Rebuilder()
    radius = (count - threshold) // 2
    for number in {*range(0, radius, 4 if count > 50 else 1), radius}:
        for liars in (holders[:number], holders[count - number :], random.sample(holders, number)):
            others = near(set(holders) - set(liars), threshold), *((another(threshold),) if threshold > 1 else ())
            for lie in (at_random, cancelling, together(threshold), *others):
                wrong = told(shares, liars, lie)
                assert kept.rebuild(wrong, threshold, is_secret(RAW)) == (Secret(RAW), frozenset(liars))


def test_what_is_no_share_takes_nothing_from_the_radius_of_the_others_but_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 shares at threshold 5: without two that encode no number, ten are left, of which (10 - 5) // 2 = 2 may be wrong."""
    monkeypatch.setattr(sharing, "_CHANCE", Nothing())
    for liars in itertools.combinations(range(2, 12), 2):
        wrong = told(split(Secret(RAW), 5, range(12)), liars, together(5)) | {0: b"", 1: b"\xff" * SHARE}
        assert Rebuilder().rebuild(wrong, 5, is_secret(RAW)) == (Secret(RAW), frozenset({0, 1, *liars}))


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
                found, wrong = Rebuilder().rebuild(told(shares, liars, lie), threshold, is_secret(RAW))
            except Tampering:
                continue
            assert found == Secret(RAW)
            assert number <= count - threshold
            assert wrong == frozenset(liars)


def test_a_majority_that_agrees_on_another_secret_is_found_out_by_the_commitment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of seven shares at threshold 3, four lies can be identified; with five, decoding returns the polynomial of the lies."""
    monkeypatch.setattr(sharing, "_CHANCE", random.Random(0))
    shares = split(Secret(RAW), 3, range(7))
    four, five = told(shares, (0, 1, 2, 4), together(3)), told(shares, (0, 1, 3, 5, 6), together(3))
    assert Rebuilder().rebuild(four, 3, is_secret(RAW)) == (Secret(RAW), frozenset({0, 1, 2, 4}))
    values = {holder + 1: int.from_bytes(share, "little") for holder, share in five.items()}
    assert misplaced(Interpolation(sorted(values)), 3, values) == frozenset({3, 5})  # decoding blames the honest shares
    with pytest.raises(Tampering, match="no 3 of 7"):
        Rebuilder().rebuild(five, 3, is_secret(RAW))


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


@settings(max_examples=40)
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
