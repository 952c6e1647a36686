"""Vectors of words: real numbers encoded as integers modulo 2^bits, and masks added to them.

`FixedPoint` encodes in fixed point and two's complement, with room for the sum over all clients. The scale is the largest power
of two with which n clients at the bound cannot wrap around, so that a decoded sum is off only by rounding: at most
1 / (2 scale) for every client in the sum (1 / scale if it rounds at random), and the last bit of a float64.

`add_masks` adds masks to a vector of words, or subtracts them. A mask is the AES-256-CTR keystream of a full 256-bit secret,
from counter zero, read as little-endian words. Each secret is derived for one mask, so no counter is used twice under a key.

Cost of m masks on d words: m d words of keystream and m additions, each made on a piece that stays in the processor's cache, so
that the addition takes little time beside the cipher. Memory beside the vector, for each thread: at most three pieces, and
AES's state for 256 keys. Cipher and addition both release the interpreter's lock, so threads use as many cores.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from protocols.errors import ParameterError, RangeError
from protocols.keys import Mask, Secret

Words = NDArray[Any]  # uint32 or uint64
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_AT_ONCE = 1 << 15  # coordinates encoded at a time: their temporaries stay in the processor's cache
_EXACT = 2**52  # float64 holds every integer up to twice this
_WORDS = tuple(np.dtype(order + kind) for kind in ("u4", "u8") for order in "=<")  # the machine's, and a message's
_LARGEST_EXPONENT = 1023  # of a float64
_PIECE = 1 << 17  # bytes: two of them fit a second-level cache
_BLOCK = 16  # bytes of AES
_KEY = 32  # bytes of AES-256
_WORTH_THREADS = 1 << 22  # bytes of keystream
_OPEN = 256  # streams at once: each takes about a kilobyte, and a server may subtract as many masks as there are pairs


@dataclass(frozen=True)
class FixedPoint:
    """For coordinates up to `bound` in magnitude, and at most `clients` clients in one sum."""

    bits: int
    bound: float
    clients: int

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise ParameterError(f"bits is {self.bits}: a word has 32 or 64")
        if not 0 < self.bound < math.inf:
            raise ParameterError(f"the bound is {self.bound:g}: the largest coordinate is positive and finite")
        if self.clients < 1:
            raise ParameterError(f"clients is {self.clients}: a sum needs at least one")
        if self.scale * self.bound < 1:
            raise RangeError(
                f"{self.clients} clients leave no room for coordinates up to {self.bound:g} in words of {self.bits} bits: "
                "use words of 64 bits, or fewer clients"
            )
        if self.clients * self.largest / Fraction(self.scale) > Fraction(sys.float_info.max):
            raise RangeError(
                f"a sum of {self.clients} coordinates up to {self.bound:g} is beyond the largest float: lower the bound"
            )

    @cached_property
    def scale(self) -> float:
        """The largest power of two with clients (floor(bound scale) + 1) < 2^(bits - 1) and bound scale <= 2^52; 0 if none.

        Computed in exact arithmetic: a logarithm with an error in its last bit would let a sum wrap around.
        """
        most = (2 ** (self.bits - 1) - 1) // self.clients - 1  # the largest allowed floor(bound scale)
        if most < 1:
            return 0.0
        above = min(most + 1, _EXACT).bit_length() - math.frexp(self.bound)[1] + 1  # 2^above bound >= most + 1
        exponent = min(above, _LARGEST_EXPONENT)
        while math.floor(scaled := Fraction(self.bound) * Fraction(2) ** exponent) > most or scaled > _EXACT:
            exponent -= 1
        return math.ldexp(1.0, exponent)

    @property
    def largest(self) -> int:
        """The largest possible magnitude of an encoded coordinate."""
        return math.floor(self.bound * self.scale) + 1

    @property
    def error(self) -> float:
        """The largest error of a coordinate from rounding to the nearest."""
        return 0.5 / self.scale

    def encode(self, values: Floats, uniform: Callable[[int], Floats] | None = None) -> Words:
        """(d,) words: rounded to the nearest, ties to even, or with `uniform` up or down at random, unbiased.

        uniform(count): `count` independent numbers in [0, 1).
        """
        values = np.asarray(values, np.float64)  # float32 could round the bound up and admit too large values
        if values.ndim != 1:
            raise ParameterError(f"values of {values.ndim} axes cannot be encoded: flatten them to one")
        words = np.empty(len(values), f"u{self.bits // 8}")
        for start in range(0, len(values), _AT_ONCE):
            piece = values[start : start + _AT_ONCE]
            within = np.abs(piece) <= self.bound  # false for NaN
            if not within.all():
                place = int(np.flatnonzero(~within)[0])
                raise RangeError(
                    f"coordinate {start + place} is {piece[place]!s}, above the largest that can be sent, {self.bound!s}"
                )
            scaled = piece * self.scale
            if uniform is None:
                integers = np.rint(scaled)
            else:
                down = np.floor(scaled)
                integers = down + (uniform(len(scaled)) < scaled - down)
            words[start : start + _AT_ONCE] = to_words(integers.astype(np.int64), self.bits)
        return words

    def decode(self, total: Words) -> Floats:
        """(d,) the sum that these words encode."""
        return centred(total) / self.scale


def to_words(integers: Integers, bits: int) -> Words:
    """Two's complement modulo 2^bits; integers that do not fit are refused."""
    if bits not in (32, 64) or integers.dtype.kind != "i":
        raise ParameterError(f"{integers.dtype} cannot become words of {bits} bits: signed integers become 32 or 64")
    if bits == 64:
        return integers.astype(np.int64).view(np.uint64)
    if len(integers) and not -(2**31) <= integers.min() <= integers.max() < 2**31:
        over = int(np.flatnonzero((integers < -(2**31)) | (integers >= 2**31))[0])
        raise RangeError(f"integer {over} is {integers[over]}, which does not fit 32 bits: use words of 64 bits")
    return integers.astype(np.int32).view(np.uint32)


def centred(words: Words) -> Integers:
    """The integers nearest zero that equal these words modulo 2^bits."""
    if words.dtype not in _WORDS:
        raise ParameterError(f"words are uint32 or uint64, not {words.dtype}")
    return words.view(words.dtype.str.replace("u", "i")).astype(np.int64)


def add_masks(accumulator: Words, masks: Sequence[Mask], *, threads: int | None = None) -> None:
    """accumulator += sum of sign * PRG(secret), in place, modulo 2^32 or 2^64, by the accumulator's words.

    threads: with None, the number of cores if there is enough work.
    """
    _check(accumulator, masks, threads)
    size = accumulator.nbytes
    if threads is None:
        threads = cores() if size * len(masks) >= _WORTH_THREADS else 1
    share = -(-size // threads // _PIECE) * _PIECE if threads > 1 else size
    starts = range(0, size, max(share, _PIECE))
    words = accumulator.itemsize
    parts = [(start, accumulator[start // words : (start + share) // words]) for start in starts]
    if len(parts) <= 1:
        _add_in_shares(accumulator, masks, threads)
        return
    with ThreadPoolExecutor(len(parts)) as pool:
        for done in [pool.submit(_add, part, masks, start) for start, part in parts]:
            done.result()


def _add_in_shares(accumulator: Words, masks: Sequence[Mask], threads: int) -> None:
    """For a vector too short to split, each thread adds up some of the masks. Sums modulo 2^bits do not depend on order."""
    shares = [masks[first::threads] for first in range(1, min(threads, len(masks)))]
    sums = [np.zeros_like(accumulator) for _ in shares]
    with ThreadPoolExecutor(len(shares)) if shares else nullcontext() as pool:
        going = [pool.submit(_add, one, share, 0) for one, share in zip(sums, shares, strict=True)] if pool else []
        _add(accumulator, masks[::threads], 0)
        for done in going:
            done.result()
    for one in sums:
        np.add(accumulator, one, out=accumulator)


def _check(accumulator: Words, masks: Sequence[Mask], threads: int | None) -> None:
    """ParameterError before any word is changed."""
    if accumulator.dtype not in _WORDS or accumulator.ndim != 1:
        raise ParameterError(
            f"masks are added to vectors of uint32 or uint64, not to {accumulator.dtype} of {accumulator.ndim} axes"
        )
    if not accumulator.flags.writeable:
        raise ParameterError("masks are added in place, and this vector is read-only: give a copy")
    if any(sign not in (1, -1) for _, sign in masks):
        raise ParameterError("the sign of a mask is +1 (added) or -1 (removed)")
    if any(len(secret.reveal()) != _KEY for secret, _ in masks):
        raise ParameterError(f"a mask's secret must have {_KEY} bytes, and one secret here has another length")
    if threads is not None and threads < 1:
        raise ParameterError(f"threads is {threads}: choose at least one")


def _add(part: Words, masks: Sequence[Mask], start: int) -> None:
    """`add_masks` for the words from byte `start` on, a multiple of a block."""
    piece = min(_PIECE, part.nbytes)
    zeros, room = bytes(piece), bytearray(piece)
    for first in range(0, len(masks), _OPEN):
        _add_some(part, masks[first : first + _OPEN], start, zeros, room)


def _add_some(part: Words, masks: Sequence[Mask], start: int, zeros: bytes, room: bytearray) -> None:
    """Pieces are the outer loop and masks the inner one, so that a piece stays in the cache until it is done."""
    streams = [(_keystream(secret, start), np.add if sign > 0 else np.subtract) for secret, sign in masks]
    stream = np.frombuffer(room, f"<u{part.itemsize}")  # explicit, since a machine may have the other byte order
    length = len(stream)
    for begin in range(0, len(part), max(length, 1)):
        here = part[begin : begin + length]
        source, target = memoryview(zeros)[: here.nbytes], stream[: len(here)]
        for keystream, combine in streams:
            keystream.update_into(source, room)
            combine(here, target, out=here)


def _keystream(secret: Secret, start: int) -> Any:
    return Cipher(algorithms.AES256(secret.reveal()), _counter(start // _BLOCK)).encryptor()


@lru_cache(maxsize=256)
def _counter(block: int) -> modes.CTR:
    return modes.CTR(block.to_bytes(_BLOCK, "big"))


def cores() -> int:
    """The number of cores that this process may use, where the system reports it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
