"""Polynomials over the integers modulo p = 2^256 + 297, the smallest prime above 2^256: their values, and interpolation.

Interpolation is Lagrange's in its barycentric form. With w_i = 1 / prod_{j != i} (x_i - x_j), a polynomial f of degree below t
is, at any x that is none of x_1 ... x_t,

    f(x) = l(x) sum_i w_i f(x_i) / (x - x_i),    l(x) = prod_i (x - x_i)

so the w_i take O(t^2) small products once, and every point O(t) and one inversion modulo p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

PRIME = 2**256 + 297
_LAZY = 512  # bits by which a value may exceed the field before reduction
_WORD = 62  # bits of a machine word that a product of differences may fill


class Interpolation:
    """Interpolation through these places: different integers from 1 to 2^64 - 1."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = tuple(places)
        self._distances = [product % PRIME for product in _distances(places)]

    @cached_property
    def barycentric(self) -> list[int]:
        """w_i"""
        return inverses(self._distances)

    @cached_property
    def at_zero(self) -> list[int]:
        return self.at(0)

    def at(self, point: int) -> list[int]:
        """The weights that give the value at `point`, which is none of the places, from the values at the places."""
        differences = [point - place for place in self.places]
        whole = 1
        for difference in differences:
            whole = whole * difference % PRIME
        below = zip(self._distances, differences, strict=True)
        return [whole * inverse % PRIME for inverse in inverses([one * other % PRIME for one, other in below])]


def evaluated(coefficients: Sequence[int], point: int) -> int:
    """A polynomial's value by Horner's rule, the highest coefficient first."""
    value = 0
    for coefficient in coefficients:
        value = (value * point + coefficient) % PRIME
    return value


def evaluated_together(polynomials: Sequence[Sequence[int]], points: Sequence[int]) -> list[list[int]]:
    """The values of polynomials of one degree, coefficients highest first, at points from 1 on: by polynomial, by point.

    Horner's rule for all polynomials in one integer, in bit fields wide enough for `lazy` steps without reduction: before these
    steps a field is below p, and after them below p (lazy + 1) point^lazy.
    """
    bits = max(points).bit_length()
    lazy = max(1, _LAZY // bits)
    width = PRIME.bit_length() + lazy * bits + lazy.bit_length()
    packed = [_packed(each, width) for each in zip(*polynomials, strict=True)]
    blocks = [packed[start : start + lazy] for start in range(0, len(packed), lazy)]
    values = [_horner(blocks, point, width, len(polynomials)) for point in points]
    return [list(each) for each in zip(*values, strict=True)]


def _horner(blocks: Sequence[Sequence[int]], point: int, width: int, count: int) -> list[int]:
    numbers = [0] * count
    for block in blocks:
        value = _packed(numbers, width)
        for coefficients in block:
            value = value * point + coefficients
        numbers = [(value >> place * width & (1 << width) - 1) % PRIME for place in range(count)]
    return numbers


def _packed(numbers: Sequence[int], width: int) -> int:
    return sum(number << place * width for place, number in enumerate(numbers))


def _distances(places: Sequence[int]) -> list[int]:
    """prod_{j != i} (x_i - x_j), for each i. As many differences as fit are multiplied in a machine word."""
    least, bits = min(places), (max(places) - min(places)).bit_length()
    count, group = len(places), max(1, _WORD // max(bits, 1))
    table = np.ones((count, -(-count // group) * group), dtype=np.int64 if bits <= _WORD else object)
    row = np.array([place - least for place in places], dtype=table.dtype)
    np.subtract(row[:, None], row, out=table[:, :count])
    np.fill_diagonal(table, 1)
    return [math.prod(factors) for factors in np.multiply.reduce(table.reshape(count, group, -1), axis=1).tolist()]


def inverses(numbers: Sequence[int]) -> list[int]:
    """The inverses modulo p of numbers that are not multiples of p. Montgomery's trick: one inverse of the product, unwound."""
    products = [1]
    for number in numbers:
        products.append(products[-1] * number % PRIME)
    inverse, found = pow(products[-1], -1, PRIME), []
    for number, product in zip(reversed(numbers), reversed(products[:-1]), strict=True):
        found.append(inverse * product % PRIME)
        inverse = inverse * number % PRIME
    return found[::-1]
