"""The codec: exact headroom, unbiased rounding, errors that name the value, and round trips."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocols import masking
from protocols.errors import ParameterError, RangeError
from protocols.masking import FixedPoint, centred, to_words
from tests.cells import every

CLIENTS = (1, 2, 3, 5, 10, 100, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 65536, 10**6, 2**22, 2**23 - 1)
BOUNDS = (1.0, 0.5, 3.0, 0.1, 8.0, math.pi, math.nextafter(1, 2), math.nextafter(1, 0), 1e-6, 12345.678, 2.0**-80)
CASES = [
    (bits, bound, clients)
    for bits, bound, clients in itertools.product((32, 64), BOUNDS, CLIENTS)
    if bits == 64 or clients < 2**22
]


def up(count: int) -> NDArray[np.float64]:
    """Draws that round up every value that is not on the grid."""
    return np.zeros(count)


def down(count: int) -> NDArray[np.float64]:
    """Draws of the largest number below 1, which round down if any draw does."""
    return np.full(count, math.nextafter(1, 0))


def exponents(codec: FixedPoint) -> list[int]:
    """All k from -60 to 139 for which 2^k is a valid scale, by the definition, in fractions."""
    limit, bound = 2 ** (codec.bits - 1) - 1, Fraction(codec.bound)
    fits = []
    for k in range(-60, 140):
        scaled = bound * Fraction(2) ** k
        if codec.clients * (math.floor(scaled) + 1) <= limit and scaled <= 2**52:
            fits.append(k)
    return fits


@every(("bits", "bound", "clients"), CASES)
def test_the_scale_is_the_largest_power_of_two_that_leaves_room(bits: int, bound: float, clients: int) -> None:
    codec = FixedPoint(bits, bound, clients)
    assert codec.scale == 2.0 ** max(exponents(codec))
    assert clients * codec.largest <= 2 ** (bits - 1) - 1
    assert codec.error == 0.5 / codec.scale


@every(("bits", "bound", "clients"), CASES)
def test_all_clients_at_the_bound_do_not_wrap_around(bits: int, bound: float, clients: int) -> None:
    """With any rounding, the sum of the words modulo 2^bits encodes the sum of the integers."""
    codec = FixedPoint(bits, bound, clients)
    ends = np.array([bound, -bound, math.nextafter(bound, 0), -math.nextafter(bound, 0)])
    for uniform in (None, up, down):
        words = codec.encode(ends, uniform)
        whole = [clients * int(one) for one in centred(words)]
        assert max(map(abs, whole)) <= 2 ** (bits - 1) - 1
        total = words * words.dtype.type(clients)  # modulo 2^bits
        assert centred(total).tolist() == whole
        assert np.sign(codec.decode(total)).tolist() == [1, -1, 1, -1]
        assert max(map(abs, centred(words).tolist())) <= codec.largest


def test_one_client_more_is_too_many_for_a_grid_twice_as_fine() -> None:
    """The limit is tight: at twice the scale, the sum of all clients at the bound would wrap around."""
    for bits, clients in ((32, 1000), (32, 64), (64, 4096), (64, 2**20)):
        codec = FixedPoint(bits, 1.0, clients)
        assert clients * int(2 * codec.scale) > 2 ** (bits - 1) - 1


@every(("bits", "clients"), [(32, 3), (32, 10), (64, 2048), (64, 5000)])
def test_sums_of_clients_at_either_end_are_exact(bits: int, clients: int) -> None:
    codec = FixedPoint(bits, 1.0, clients)
    for positive in {0, 1, clients // 2, clients - 1, clients}:
        total = np.zeros(1, np.uint32 if bits == 32 else np.uint64)
        for client in range(clients):
            total += codec.encode(np.array([1.0 if client < positive else -1.0]))
        assert codec.decode(total).tolist() == [2.0 * positive - clients]


@pytest.mark.parametrize("bits", [32, 64])
def test_a_bound_that_is_extreme_has_a_scale_or_is_refused(bits: int) -> None:
    for bound in (1e300, 1.7e308, 1e-300, 2.0**-1022):
        codec = FixedPoint(bits, bound, 7)
        assert math.isfinite(codec.scale)
        assert codec.scale * bound >= 1
        found = codec.decode(codec.encode(np.array([bound, -bound])))
        assert found.tolist() == pytest.approx([bound, -bound], rel=1e-6)
    with pytest.raises(RangeError, match="no room"):
        FixedPoint(bits, 5e-324, 7)


@every(
    ("bits", "bound", "clients", "match"),
    [
        (16, 1.0, 2, "bits is 16"),
        (32, 0.0, 2, "bound is 0"),
        (32, -1.0, 2, "bound is -1"),
        (32, math.inf, 2, "bound is inf"),
        (32, math.nan, 2, "bound is nan"),
        (32, 1.0, 0, "clients is 0"),
        (32, 1.0, -3, "clients is -3"),
        (32, 1.0, 2**30, r"no room .* use words of 64 bits"),
        (32, 1.0, 2**31, "no room"),
        (32, 1.0, 2**40, "no room"),
        (64, 1.0, 2**62, r"no room .* fewer clients"),
        (64, 1.0, 2**70, "no room"),
    ],
)
def test_what_cannot_be_is_refused(bits: int, bound: float, clients: int, match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        FixedPoint(bits, bound, clients)


def test_the_most_clients_that_32_bits_carry() -> None:
    codec = FixedPoint(32, 1.0, 2**30 - 1)  # an integer of 1 or 2 each, and 2 (2^30 - 1) < 2^31
    assert (codec.scale, codec.largest) == (1.0, 2)


@every("value", [1.0 + 2**-52, -1.0 - 2**-52, math.inf, -math.inf, math.nan, 1e300])
@every("place", [0, 3, 6])
@every("uniform", [None, up])
def test_what_is_out_of_range_is_named_and_not_sent(value: float, place: int, uniform: Any) -> None:
    values = np.zeros(7)
    values[place] = value
    values[6] = value  # the error names the first
    with pytest.raises(RangeError) as caught:
        FixedPoint(32, 1.0, 5).encode(values, uniform)
    assert str(caught.value) == f"coordinate {place} is {value}, above the largest that can be sent, 1.0"


def test_a_float32_above_the_bound_is_above_it() -> None:
    """0.1 in float32 is more than 0.1. A comparison in float32 would round the bound up as well, and accept the value."""
    with pytest.raises(RangeError, match=r"0.1"):
        FixedPoint(32, 0.1, 1).encode(np.array([0.1], np.float32))  # type: ignore[arg-type]


def test_nearest_goes_to_the_even_one_on_a_tie() -> None:
    codec = FixedPoint(32, 4.0, 3)
    ticks = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, 0.51, -0.51])
    assert centred(codec.encode(ticks / codec.scale)).tolist() == [0, 2, 2, 0, -2, -2, 0, 1, -1]


def test_stochastic_rounding_is_right_on_average() -> None:
    """Over an even grid of draws the mean of the rounded values is the value itself; with rounding to the nearest it is not."""
    codec = FixedPoint(32, 4.0, 3)
    even = (np.arange(1024) + 0.5) / 1024
    for ticks in (0.25, -0.25, 7.75, -1000.125, 0.0, 3.0, -3.0, 1 / 1024, 1023 / 1024, -1 / 1024):
        values = np.full(1024, ticks / codec.scale)
        found = centred(codec.encode(values, lambda count: even))
        assert found.mean() == ticks
        assert set(found.tolist()) <= {math.floor(ticks), math.ceil(ticks)}
    assert centred(codec.encode(np.full(1024, 0.25 / codec.scale))).mean() == 0


def test_stochastic_rounding_draws_once_for_every_coordinate() -> None:
    asked: list[int] = []
    generator = np.random.default_rng(1)

    def uniform(count: int) -> NDArray[np.float64]:
        asked.append(count)
        return generator.random(count)

    codec = FixedPoint(32, 1.0, 1000)
    values = np.full(200_000, 0.3 / codec.scale)
    found = centred(codec.encode(values, uniform))
    assert sum(asked) == 200_000
    assert abs(found.mean() - 0.3) < 6 * (0.21 / 200_000) ** 0.5
    neighbours = found[:-1] * found[1:]
    assert abs(neighbours.mean() - 0.09) < 6 * (0.09 / 200_000) ** 0.5  # independent: no draw serves two coordinates


@given(
    st.sampled_from((32, 64)),
    st.floats(1e-9, 1e9),
    st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_sums_come_back(bits: int, bound: float, parts: list[list[float]], seed: int, stochastic: bool) -> None:
    """A decoded sum is exact up to every client's rounding and the last bit of a float64."""
    codec = FixedPoint(bits, bound, len(parts))
    generator = np.random.default_rng(seed)
    vectors = [np.clip(np.array(part) * bound, -bound, bound) for part in parts]
    total = np.zeros(3, np.uint32 if bits == 32 else np.uint64)
    for one in vectors:
        total += codec.encode(one, generator.random if stochastic else None)
    for place, found in enumerate(codec.decode(total).tolist()):
        expected = sum(Fraction(float(one[place])) for one in vectors)
        rounding = len(parts) * Fraction(codec.error) * (2 if stochastic else 1)
        assert abs(Fraction(found) - expected) <= rounding + abs(expected) / 2**52


@given(st.sampled_from((32, 64)), st.floats(-1, 1), st.integers(1, 5000))
def test_what_is_on_the_grid_is_carried_exactly(bits: int, value: float, clients: int) -> None:
    codec = FixedPoint(bits, 1.0, clients)
    on_grid = math.floor(value * codec.scale) / codec.scale
    for uniform in (None, up, down):
        assert codec.decode(codec.encode(np.array([on_grid]), uniform)).tolist() == [on_grid]


def test_values_of_several_axes_are_refused() -> None:
    for shape in ((), (2, 2)):
        with pytest.raises(ParameterError, match=f"{len(shape)} axes"):
            FixedPoint(32, 1.0, 2).encode(np.zeros(shape))


def test_words_are_the_word_size() -> None:
    assert FixedPoint(32, 1.0, 2).encode(np.zeros(3)).dtype == np.uint32
    assert FixedPoint(64, 1.0, 2).encode(np.zeros(3)).dtype == np.uint64
    assert FixedPoint(32, 1.0, 2).encode(np.zeros(0)).shape == (0,)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_integers_of_64_bits_come_back(integers: list[int]) -> None:
    words = to_words(np.array(integers, np.int64), 64)
    assert words.tolist() == [one % 2**64 for one in integers]
    assert centred(words).tolist() == integers


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_integers_of_32_bits_come_back(integers: list[int]) -> None:
    words = to_words(np.array(integers, np.int64), 32)
    assert words.tolist() == [one % 2**32 for one in integers]
    assert centred(words).tolist() == integers
    assert centred(words).dtype == np.int64


@given(st.integers(-(2**63), -(2**31) - 1) | st.integers(2**31, 2**63 - 1))
def test_an_integer_that_does_not_fit_is_refused(integer: int) -> None:
    with pytest.raises(RangeError, match=f"integer 1 is {integer},"):
        to_words(np.array([5, integer, integer]), 32)


@every("integer", [2**31, -(2**31) - 1, 2**63 - 1, -(2**63)])
def test_the_first_that_do_not_fit(integer: int) -> None:
    with pytest.raises(RangeError, match="does not fit 32 bits"):
        to_words(np.array([integer]), 32)


@every(("dtype", "bits"), [(np.float64, 32), (np.uint64, 64), (np.int64, 16), (np.bool_, 32)])
def test_what_is_no_signed_integer_becomes_no_word(dtype: Any, bits: int) -> None:
    with pytest.raises(ParameterError, match="signed integers"):
        to_words(np.zeros(3, dtype), bits)


@every("dtype", [np.float32, np.float64, np.int32, np.int64, np.uint16, ">u4"])
def test_what_is_no_word_is_not_centred(dtype: Any) -> None:
    with pytest.raises(ParameterError, match="words are uint32 or uint64"):
        centred(np.zeros(3, dtype))


@pytest.mark.parametrize("dtype", [">u4", ">u8"])
def test_words_of_a_message_are_read_in_their_own_order(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine whose own byte order is not the little-endian order of messages."""
    monkeypatch.setattr(masking, "_WORDS", (np.dtype(dtype),))
    words = np.array([1, 2 ** (8 * np.dtype(dtype).itemsize) - 3], dtype)
    assert centred(words).tolist() == [1, -3]


def test_integers_narrower_than_64_bits_are_integers() -> None:
    assert to_words(np.array([-1, 5], np.int32), 64).tolist() == [2**64 - 1, 5]
    assert to_words(np.array([-1, 5], np.int8), 32).tolist() == [2**32 - 1, 5]
