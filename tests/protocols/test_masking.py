"""The codec has exact headroom and unbiased rounding; masks equal the cipher's keystream, wherever a piece begins."""

from __future__ import annotations

import itertools
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocols import masking
from protocols.errors import ParameterError, RangeError
from protocols.keys import Secret
from protocols.masking import FixedPoint, add_masks, centred, to_words
from tests.cells import every

CLIENTS = (1, 2, 3, 10, 1000, 1023, 1024, 1025, 65536, 2**22, 2**23 - 1)
BOUNDS = (1.0, 0.5, 0.1, math.pi, math.nextafter(1, 2), math.nextafter(1, 0), 12345.678, 2.0**-80)
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


@every(("bits", "bound", "clients"), [*CASES, (32, 1.0, 2**30 - 1)])  # the last: the most clients that 32 bits carry
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


@pytest.mark.parametrize("bits", [32, 64])
def test_a_bound_that_is_extreme_has_a_scale_or_is_refused(bits: int) -> None:
    for bound in (1e300, 2e307, 1e-300, 2.0**-1022):
        codec = FixedPoint(bits, bound, 7)
        assert math.isfinite(7 * (bound + codec.error))
        assert math.isfinite(codec.scale)
        assert codec.scale * bound >= 1
        found = codec.decode(codec.encode(np.array([bound, -bound])))
        assert found.tolist() == pytest.approx([bound, -bound], rel=1e-6)
    with pytest.raises(RangeError):
        FixedPoint(bits, 5e-324, 7)
    for clients in (1, 7):
        with pytest.raises(RangeError, match="beyond the largest float"):
            FixedPoint(bits, sys.float_info.max, clients)


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


@pytest.mark.parametrize("dtype", [">u4", ">u8"])
def test_words_of_a_message_are_read_in_their_own_order(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine whose own byte order is not the little-endian order of messages."""
    monkeypatch.setattr(masking, "_WORDS", (np.dtype(dtype),))
    words = np.array([1, 2 ** (8 * np.dtype(dtype).itemsize) - 3], dtype)
    assert centred(words).tolist() == [1, -3]


@every("bits", [32, 64])
@given(data=st.data())
def test_integers_come_back_and_others_are_refused(bits: int, data: st.DataObject) -> None:
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    integers = data.draw(st.lists(st.integers(least, most), max_size=20))
    words = to_words(np.array(integers, np.int64), bits)
    assert (words.tolist(), words.dtype) == ([one % 2**bits for one in integers], f"u{bits // 8}")
    assert (centred(words).tolist(), centred(words).dtype) == (integers, np.int64)


@every("integer", [2**31, -(2**31) - 1, 2**63 - 1, -(2**63)])
def test_the_first_integers_that_do_not_fit(integer: int) -> None:
    with pytest.raises(RangeError, match=f"integer 1 is {integer},"):
        to_words(np.array([5, integer, integer]), 32)


def test_integers_narrower_than_64_bits_are_integers() -> None:
    assert to_words(np.array([-1, 5], np.int32), 64).tolist() == [2**64 - 1, 5]
    assert to_words(np.array([-1, 5], np.int8), 32).tolist() == [2**32 - 1, 5]


@every("value", [1.0 + 2**-52, -1.0 - 2**-52, math.inf, -math.inf, math.nan, 1e300])
@every("place", [0, 3, 6])
@every("uniform", [None, up])
def test_what_is_out_of_range_is_named_and_not_sent(value: float, place: int, uniform: Any) -> None:
    values = np.zeros(7)
    values[[place, 6]] = value
    with pytest.raises(RangeError, match=f"coordinate {place} is"):
        FixedPoint(32, 1.0, 5).encode(values, uniform)


@every(
    "ask",
    [
        lambda: FixedPoint(16, 1.0, 2),
        *(lambda bound=bound: FixedPoint(32, bound, 2) for bound in (0.0, -1.0, math.inf, math.nan)),
        *(lambda clients=clients: FixedPoint(32, 1.0, clients) for clients in (0, -3, 2**30, 2**31, 2**40)),
        *(lambda clients=clients: FixedPoint(64, 1.0, clients) for clients in (2**62, 2**70)),
        *(lambda shape=shape: FixedPoint(32, 1.0, 2).encode(np.zeros(shape)) for shape in ((), (2, 2))),
        # 0.1 in float32 is more than 0.1. A comparison in float32 would round the bound up as well, and accept the value.
        lambda: FixedPoint(32, 0.1, 1).encode(np.array([0.1], np.float32)),  # type: ignore[arg-type]
        *(lambda kind=kind: to_words(np.zeros(3, kind[0]), kind[1]) for kind in (("f8", 32), ("u8", 64), ("i8", 16))),
        lambda: to_words(np.zeros(3, np.bool_), 32),
        *(lambda dtype=dtype: centred(np.zeros(3, dtype)) for dtype in ("f4", "f8", "i4", "i8", "u2", ">u4")),
    ],
)
def test_what_cannot_be_encoded_is_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(ParameterError):
        ask()


KEY = bytes(range(32))
PIECE = 64  # bytes of a piece in most tests here, so that short vectors have many borders
every_word = pytest.mark.parametrize("dtype", [np.uint32, np.uint64], ids=["32", "64"])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_PIECE", PIECE)


def keystream(key: bytes, size: int, start: int = 0) -> bytes:
    """Bytes of the keystream, block by block: AES-256 of a big-endian counter of 128 bits that starts at zero."""
    cipher = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    blocks = range(start // 16, -(-(start + size) // 16))
    return b"".join(cipher.update(block.to_bytes(16, "big")) for block in blocks)[start % 16 :][:size]


def naive(vector: Sequence[int], masks: Sequence[tuple[Secret, int]], width: int) -> list[int]:
    """The vector with its masks added, word by word in Python's integers."""
    out = list(vector)
    for secret, sign in masks:
        stream = keystream(secret.reveal(), width * len(out))
        for place in range(len(out)):
            out[place] += sign * int.from_bytes(stream[width * place : width * (place + 1)], "little")
    return [word % 2 ** (8 * width) for word in out]


def vector(length: int, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(os.urandom(length * np.dtype(dtype).itemsize), dtype).copy()


def masks(count: int) -> list[tuple[Secret, int]]:
    return [(Secret.new(), random.choice((1, -1))) for _ in range(count)]


def test_the_stream_is_that_of_nist() -> None:
    """SP 800-38A, F.5.5: `keystream`, the oracle of these tests, encrypts the counter block as NIST lists it."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    block = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
    assert keystream(key, 16, 16 * block).hex() == "0bdf7df1591716335e9a8b15c860c502"


@every_word
@pytest.mark.parametrize("threads", [None, 1, 2, 3, 7])
@pytest.mark.usefixtures("small_pieces")
def test_every_word_is_what_the_slow_way_gives(
    dtype: Any, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more masks are added than streams are open at once."""
    monkeypatch.setattr(masking, "_OPEN", 3)
    width = np.dtype(dtype).itemsize
    border = PIECE // width
    for length in (0, 1, 2, 3, border - 1, border, border + 1, 2 * border, 5 * border + 3, 16 * border - 1, 333):
        for count in (0, 1, 2, 5):
            before, chosen = vector(length, dtype), masks(count)
            found = before.copy()
            add_masks(found, chosen, threads=threads)
            assert found.dtype == dtype
            assert found.tolist() == naive(before.tolist(), chosen, width)


@every_word
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_the_borders_of_real_pieces(dtype: Any, past: int) -> None:
    width = np.dtype(dtype).itemsize
    length = 2 * masking._PIECE // width + past
    for threads in (1, 2, 3):
        found = np.zeros(length, dtype)
        add_masks(found, [(Secret(KEY), 1)], threads=threads)
        assert found.tobytes() == keystream(KEY, length * width)


def test_the_counter_carries_beyond_32_bits() -> None:
    start = 16 * (2**32 - 1)
    part = np.zeros(16, np.uint32)
    masking._add(part, [(Secret(KEY), 1)], start)
    assert part.tobytes() == keystream(KEY, 64, start)


def test_what_goes_wrong_in_a_thread_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("of the thread")

    monkeypatch.setattr(masking, "_add", fails)
    with pytest.raises(OSError, match="of the thread"):
        add_masks(np.zeros(2**18, np.uint32), masks(1), threads=2)


@every_word
@pytest.mark.parametrize("offset", [48, 3], ids=["aligned", "unaligned"])
def test_views_of_a_larger_buffer_are_masked_in_place_and_nothing_beside_them(dtype: Any, offset: int) -> None:
    frame = bytearray(offset + 4000 + 8)
    view = np.frombuffer(
        frame, np.dtype(dtype).newbyteorder("<"), offset=offset, count=4000 // np.dtype(dtype).itemsize
    )
    add_masks(view, [(Secret(KEY), 1)])
    assert bytes(frame) == bytes(offset) + keystream(KEY, 4000) + bytes(8)
    strided = np.zeros(200, dtype)
    add_masks(strided[::2], [(Secret(KEY), 1)])
    assert strided[::2].tobytes() == keystream(KEY, 100 * strided.itemsize)
    assert not strided[1::2].any()


@every(
    "ask",
    [
        *(lambda threads=threads: add_masks(np.zeros(4, "u4"), masks(1), threads=threads) for threads in (0, -1)),
        *(lambda one=one: add_masks(np.zeros(4, "u4"), [(Secret(bytes(one)), 1)]) for one in (0, 16, 24, 31, 33, 64)),
        *(lambda dtype=dtype: add_masks(np.zeros(4, dtype), masks(1)) for dtype in ("i4", "u2", "f8", ">u4")),
        *(lambda shape=shape: add_masks(np.zeros(shape, "u4"), masks(1)) for shape in ((2, 2), ())),
        lambda: add_masks(np.frombuffer(bytes(16), "u4"), masks(1)),
    ],
)
def test_what_cannot_be_masked_is_refused(ask: Callable[[], None]) -> None:
    with pytest.raises(ParameterError):
        ask()


@every("sign", [0, 2, -2])
def test_a_wrong_sign_is_refused_before_anything_is_added(sign: int) -> None:
    words = np.zeros(4, np.uint32)
    with pytest.raises(ParameterError):
        add_masks(words, [(Secret(KEY), 1), (Secret(KEY), sign)])
    assert not words.any()


def test_not_all_streams_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may remove as many masks as there are pairs. Open ciphers are counted, since tracemalloc misses their memory."""
    alive: list[int] = []
    most, real = 0, masking._keystream

    class Counted:
        def __init__(self, secret: Secret, start: int) -> None:
            nonlocal most
            self.update_into = real(secret, start).update_into
            alive.append(1)
            most = max(most, len(alive))

        def __del__(self) -> None:
            alive.pop()

    monkeypatch.setattr(masking, "_keystream", Counted)
    words, chosen = np.zeros(5, np.uint32), masks(3 * masking._OPEN + 1)
    add_masks(words, chosen, threads=1)
    assert words.tolist() == naive([0] * 5, chosen, 4)
    assert masking._OPEN <= most <= 2 * masking._OPEN
