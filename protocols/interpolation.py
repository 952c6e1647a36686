"""Polynomials modulo p through given places, by Lagrange's formula in its barycentric form.

With w_i = 1 / prod_{j != i} (x_i - x_j), a polynomial f of degree below t is, at any x that is none of x_1 ... x_t,

    f(x) = l(x) sum_i w_i f(x_i) / (x - x_i),    l(x) = prod_i (x - x_i)

so the w_i take O(t^2) small products once, and every point O(t) and one inversion modulo p.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property

PRIME = 2**256 + 297


class Interpolation:
    """Through these places: different integers from 1 to 2^64 - 1."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = tuple(places)
        self.barycentric = inverses([math.prod(one - other for other in places if other != one) for one in places])

    @cached_property
    def at_zero(self) -> list[int]:
        return self.at(0)

    def at(self, point: int) -> list[int]:
        """The weights with which values at the places add up to the value at `point`, which is none of them."""
        differences = [point - place for place in self.places]
        whole = 1
        for difference in differences:
            whole = whole * difference % PRIME
        terms = zip(self.barycentric, inverses(differences), strict=True)
        return [whole * (weight * inverse % PRIME) % PRIME for weight, inverse in terms]


class Audit:
    """Whether n values are all of the polynomial through those at the t places of `basis`, in O(n) for every n values.

    The polynomial of degree below n through all of them is that of the basis if and only if they are. The two are compared at
    one random point: equal ones always pass; different ones, of values that were not chosen by somebody who knows the point,
    with a probability below n / 2^255, for they meet in fewer than n points.
    """

    def __init__(self, basis: Interpolation, places: Sequence[int]) -> None:
        self.basis = basis
        self.whole = Interpolation(places)
        point = 2**64 + secrets.randbelow(PRIME - 2**64)
        weights = dict(zip(self.whole.places, self.whole.at(point), strict=True))
        for place, weight in zip(basis.places, basis.at(point), strict=True):
            weights[place] -= weight
        self._weights = weights

    def passes(self, values: Mapping[int, int]) -> bool:
        return sum(weight * values[place] for place, weight in self._weights.items()) % PRIME == 0


def evaluated(coefficients: Sequence[int], point: int) -> int:
    """A polynomial's value by Horner's rule, the highest coefficient first."""
    value = 0
    for coefficient in coefficients:
        value = (value * point + coefficient) % PRIME
    return value


def inverses(numbers: Sequence[int]) -> list[int]:
    """Modulo p, of numbers that are no multiples of it. Montgomery's trick: one inverse of the product, unwound."""
    products = [1]
    for number in numbers:
        products.append(products[-1] * number % PRIME)
    inverse, found = pow(products[-1], -1, PRIME), []
    for number, product in zip(reversed(numbers), reversed(products[:-1]), strict=True):
        found.append(inverse * product % PRIME)
        inverse = inverse * number % PRIME
    return found[::-1]
