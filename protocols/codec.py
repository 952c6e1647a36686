"""Numbers as integers modulo 2^bits: fixed point, two's complement, with room for the sum over all clients.

The scale is the largest power of two with which n clients at the bound cannot wrap around, so that a decoded sum is off only by
rounding: at most 1 / (2 scale) for every client in the sum (1 / scale if it rounds at random), and the last bit of a float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.errors import ParameterError, RangeError

Words = NDArray[Any]  # uint32 or uint64
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_AT_ONCE = 1 << 15  # coordinates processed at a time: their temporaries stay in the processor's cache
_EXACT = 2**52  # float64 holds every integer up to twice this
_WORDS = tuple(np.dtype(order + kind) for kind in ("u4", "u8") for order in "=<")  # the machine's, and a message's
_LARGEST_EXPONENT = 1023  # of a float64


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
            words[start : start + _AT_ONCE] = to_words(self._rounded(piece * self.scale, uniform), self.bits)
        return words

    def _rounded(self, scaled: Floats, uniform: Callable[[int], Floats] | None) -> Integers:
        if uniform is None:
            return np.rint(scaled).astype(np.int64)
        down = np.floor(scaled)
        return (down + (uniform(len(scaled)) < scaled - down)).astype(np.int64)

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
