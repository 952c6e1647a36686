"""Masks equal the cipher's keystream word by word, wherever a piece or a thread begins, and no part of them repeats."""

from __future__ import annotations

import itertools
import os
import random
import threading
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from protocols import masking
from protocols.errors import ParameterError
from protocols.keys import Secret, derive
from protocols.masking import add_masks
from tests.cells import every

SESSION = bytes(range(32))
KEY = bytes(range(32))
PIECE = 64  # bytes of a piece in most tests here, so that short vectors have many borders
WORDS = [np.uint32, np.uint64]
every_word = pytest.mark.parametrize("dtype", WORDS, ids=lambda dtype: dtype.__name__)


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
def test_every_word_is_what_the_slow_way_gives(dtype: Any, threads: int | None) -> None:
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


@every_word
@pytest.mark.usefixtures("small_pieces")
def test_a_range_may_begin_at_any_block(dtype: Any) -> None:
    """A thread's first piece may begin where no piece of a single thread would begin."""
    width = np.dtype(dtype).itemsize
    whole = np.frombuffer(keystream(KEY, 1600), dtype)
    for start in range(0, 400, 16):
        for length in (1, 7, PIECE // width + 1, 100):
            part = np.zeros(length, dtype)
            masking._add(part, [(Secret(KEY), 1)], start)
            assert part.tolist() == whole[start // width :][:length].tolist()


def test_the_counter_carries_beyond_32_bits() -> None:
    start = 16 * (2**32 - 1)
    part = np.zeros(16, np.uint32)
    masking._add(part, [(Secret(KEY), 1)], start)
    assert part.tobytes() == keystream(KEY, 64, start)


@every_word
@pytest.mark.usefixtures("small_pieces")
def test_threads_share_the_vector_out_between_them(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of threads the ranges cover every byte once, and each begins at a multiple of a piece."""
    width = np.dtype(dtype).itemsize
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()

    def noted(part: NDArray[Any], _: object, start: int) -> None:
        with lock:
            seen.append((start, part.nbytes))

    monkeypatch.setattr(masking, "_add", noted)
    for threads in (1, 2, 3, 8, 50):
        for length in (1, 40, 99, 1000):
            seen.clear()
            add_masks(np.zeros(length, dtype), masks(1), threads=threads)
            ranges = sorted(seen)
            assert 1 <= len(ranges) <= threads
            assert ranges[0][0] == 0
            assert all(start + size == after for (start, size), (after, _) in itertools.pairwise(ranges))
            assert sum(size for _, size in ranges) == length * width
            assert all(start % PIECE == 0 for start, _ in ranges)


@pytest.mark.parametrize(("words", "expected"), [(2**18, 1), (2**20 - 1, 1), (2**20, 2), (2**21, 2)])
def test_threads_are_used_where_there_is_work(words: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 4 MiB of keystream on, one thread for each of two cores."""
    monkeypatch.setattr(masking, "cores", lambda: 2)
    ranges: list[int] = []
    monkeypatch.setattr(masking, "_add", lambda part, masks, start: ranges.append(start))
    add_masks(np.zeros(words // 4, np.uint32), masks(4))
    assert len(ranges) == expected


@every_word
@pytest.mark.parametrize(("count", "threads"), [(2, 2), (3, 2), (7, 3), (5, 8)])
def test_of_a_short_vector_every_thread_adds_up_some_of_the_masks(
    dtype: Any, count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[list[Secret]] = []
    add = masking._add

    def noted(part: NDArray[Any], some: Sequence[tuple[Secret, int]], start: int) -> None:
        shares.append([secret for secret, _ in some])
        add(part, some, start)

    monkeypatch.setattr(masking, "_add", noted)
    before, given = vector(50, dtype), masks(count)
    found = before.copy()
    add_masks(found, given, threads=threads)
    assert found.tolist() == naive(before.tolist(), given, found.itemsize)
    assert len(shares) == min(count, threads)
    assert sorted(one.reveal() for share in shares for one in share) == sorted(one.reveal() for one, _ in given)


def test_what_goes_wrong_in_a_thread_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("of the thread")

    monkeypatch.setattr(masking, "_add", fails)
    with pytest.raises(OSError, match="of the thread"):
        add_masks(np.zeros(2**18, np.uint32), masks(1), threads=2)


@every_word
def test_added_and_taken_off_it_is_as_it_was(dtype: Any) -> None:
    before = vector(100_003, dtype)
    found = before.copy()
    chosen = masks(6)
    add_masks(found, chosen, threads=2)
    assert np.mean(found == before) < 0.001
    random.shuffle(chosen)
    add_masks(found, [(secret, -sign) for secret, sign in chosen], threads=1)
    assert found.tobytes() == before.tobytes()
    add_masks(found, [(Secret(KEY), 1), (Secret(KEY), -1)])
    assert found.tobytes() == before.tobytes()


@every_word
def test_views_of_a_larger_buffer_are_masked_in_place_and_nothing_beside_them(dtype: Any) -> None:
    frame = bytearray(48 + 4000 + 8)
    view = np.frombuffer(frame, dtype, offset=48, count=4000 // np.dtype(dtype).itemsize)
    add_masks(view, [(Secret(KEY), 1)])
    assert bytes(frame) == bytes(48) + keystream(KEY, 4000) + bytes(8)
    strided = np.zeros(200, dtype)
    add_masks(strided[::2], [(Secret(KEY), 1)])
    assert strided[::2].tobytes() == keystream(KEY, 100 * strided.itemsize)
    assert not strided[1::2].any()


@pytest.mark.usefixtures("small_pieces")
def test_more_masks_than_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_OPEN", 3)
    for count in (2, 3, 4, 6, 7):
        before, chosen = vector(101, np.uint32), masks(count)
        for threads in (1, 2):
            found = before.copy()
            add_masks(found, chosen, threads=threads)
            assert found.tolist() == naive(before.tolist(), chosen, 4)


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_too_few(threads: int) -> None:
    with pytest.raises(ParameterError, match=f"threads is {threads}"):
        add_masks(np.zeros(4, np.uint32), masks(1), threads=threads)


def test_a_vector_that_cannot_be_written_is_refused() -> None:
    words = np.frombuffer(bytes(16), np.uint32)
    with pytest.raises(ParameterError, match="read-only"):
        add_masks(words, masks(1))


def alike(one: bytes, other: bytes) -> float:
    """The distance of the share of equal bits from one half, in standard deviations for independent streams."""
    equal = 8 * len(one) - (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count()
    return abs(equal - 4 * len(one)) / (2 * len(one)) ** 0.5


def test_streams_of_other_keys_sessions_and_pairs_have_nothing_in_common() -> None:
    """Two streams share no word, at any offset, and agree in about half of their bits; each bit of a key changes the stream."""
    agreed = Secret(KEY)
    secrets = [
        *(
            derive(agreed, session, "mask", *pair)
            for session in (SESSION, KEY[::-1])
            for pair in ((1, 2), (1, 3), (2, 3))
        ),
        *(Secret((int.from_bytes(KEY, "little") ^ 1 << bit).to_bytes(32, "little")) for bit in range(0, 256, 15)),
        Secret(KEY),
    ]
    streams = []
    for secret in secrets:
        stream = np.zeros(4096, np.uint64)
        add_masks(stream, [(secret, 1)])
        streams.append(stream)
    assert len(np.unique(np.concatenate(streams))) == 4096 * len(secrets)
    raw = [stream.tobytes() for stream in streams]
    assert max(alike(one, other) for one, other in itertools.combinations(raw, 2)) < 6
    assert alike(raw[0], raw[0][:100] + raw[1][100:]) < 6 < alike(raw[0], raw[0][:20000] + raw[1][20000:])


def test_all_256_bits_of_a_key_count() -> None:
    """Masks keyed with only a part of the secret would repeat among these."""
    firsts = set()
    for bit in range(256):
        stream = np.zeros(2, np.uint64)
        add_masks(stream, [(Secret((1 << bit).to_bytes(32, "little")), 1)])
        firsts.add(stream.tobytes())
    assert len(firsts) == 256


@every("length", [0, 16, 24, 31, 33, 64])
def test_a_secret_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ParameterError, match="secret must have 32 bytes"):
        add_masks(np.zeros(4, np.uint32), [(Secret(bytes(length)), 1)])


def test_a_masked_vector_is_uniform() -> None:
    """Chi-squared of the masked bytes, with 255 degrees of freedom, is within three standard deviations; unmasked it is above.

    The keys are fixed, so every run gives the same result.
    """

    def chi_squared(words: NDArray[Any]) -> float:
        counts = np.bincount(words.view(np.uint8), minlength=256)
        return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())

    words = np.arange(50_000, dtype=np.uint32)
    assert chi_squared(words) > 255 + 3 * 510**0.5
    add_masks(words, [(Secret(KEY), 1), (Secret(KEY[::-1]), -1)])
    assert abs(chi_squared(words) - 255) < 3 * 510**0.5


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_is_bounded_however_long_the_vector(threads: int) -> None:
    words = np.zeros(8_000_000, np.uint32)  # 32 MB, and masks of 320 MB
    chosen = masks(10)
    tracemalloc.start()
    try:
        add_masks(words, chosen, threads=threads)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < threads * 3 * masking._PIECE + 200_000


@every(
    "accumulator",
    [
        np.zeros(4, np.int32),
        np.zeros(4, np.uint16),
        np.zeros(4),
        np.zeros(4, ">u4"),
        np.zeros((2, 2), np.uint32),
        np.zeros((), np.uint64),
    ],
)
def test_only_vectors_of_words_are_masked(accumulator: NDArray[Any]) -> None:
    with pytest.raises(ParameterError, match="uint32 or uint64"):
        add_masks(accumulator, masks(1))


@pytest.mark.parametrize("sign", [0, 2, -2])
def test_only_signs_are_signs(sign: int) -> None:
    words = np.zeros(4, np.uint32)
    with pytest.raises(ParameterError, match="added"):
        add_masks(words, [(Secret(KEY), 1), (Secret(KEY), sign)])
    assert not words.any()  # refused before anything is added


@every_word
def test_an_unaligned_vector_is_masked_in_place(dtype: Any) -> None:
    width = np.dtype(dtype).itemsize
    frame = bytearray(b"\xa5" * (3 + 100 * width + 1))
    view = np.frombuffer(frame, np.dtype(dtype).newbyteorder("<"), offset=3, count=100)
    before = view.tolist()
    add_masks(view, [(Secret(KEY), 1)])
    assert view.tolist() == naive(before, [(Secret(KEY), 1)], width)
    assert (frame[:3], frame[-1:]) == (b"\xa5" * 3, b"\xa5")


@every_word
@pytest.mark.usefixtures("small_pieces")
def test_the_stream_is_little_endian_whatever_the_vector_is(dtype: Any) -> None:
    """On a vector of the other byte order, as another machine has, the same numbers are added."""
    before, chosen = vector(77, dtype), masks(3)
    turned = before.astype(before.dtype.newbyteorder(">"))
    masking._add(turned, chosen, 0)
    assert turned.tolist() == naive(before.tolist(), chosen, before.itemsize)


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
