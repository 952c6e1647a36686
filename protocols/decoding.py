"""Unique decoding of Reed-Solomon codes, to find wrong shares.

With w_i the weights of interpolation (`polynomials`) through m places, sum_i w_i f(x_i) x_i^j = 0 whenever f has a degree below
t and j < m - t. So for values f(x_i) + e_i, where e_i is nonzero only for i in E, the m - t syndromes

    S_j = sum_i w_i (f(x_i) + e_i) x_i^j = sum_{i in E} (w_i e_i) x_i^j

depend only on the errors. They obey the linear recurrence with the roots x_i, i in E, and if |E| <= (m - t) / 2 they obey no
other recurrence as short: the algorithm of Berlekamp and Massey finds it, and its roots are the places of the errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protocols.polynomials import PRIME, Interpolation, evaluated


def misplaced(whole: Interpolation, threshold: int, values: Mapping[int, int]) -> frozenset[int] | None:
    """The fewest places without which the values lie on one polynomial of degree below `threshold`, if there are few enough.

    `whole` is through all m places that have values. Few enough means (m - threshold) // 2: at most one polynomial passes
    through all but this many of the values. None if there is no such polynomial. If more values were made wrong on purpose, the
    polynomial can differ from the shared one: the caller must verify its result. O(m (m - threshold)) products modulo p.
    """
    recurrence = _shortest_recurrence(_syndromes(whole, len(whole.places) - threshold, values))
    errors = len(recurrence) - 1
    wrong = frozenset(place for place in whole.places if evaluated(recurrence, place) == 0)
    return wrong if len(wrong) == errors and 2 * errors <= len(whole.places) - threshold else None


def _syndromes(whole: Interpolation, count: int, values: Mapping[int, int]) -> list[int]:
    """S_0 ... S_{count - 1}."""
    terms = [weight * values[place] % PRIME for weight, place in zip(whole.barycentric, whole.places, strict=True)]
    found = []
    for _ in range(count):
        found.append(sum(terms) % PRIME)
        terms = [term * place % PRIME for term, place in zip(terms, whole.places, strict=True)]
    return found


def _shortest_recurrence(sequence: Sequence[int]) -> list[int]:
    """1, c_1 ... c_L with s_j + c_1 s_{j-1} + ... + c_L s_{j-L} = 0 for L <= j < n, and the least possible L.

    After Berlekamp and Massey. As the coefficients of a polynomial, the highest first, it has the roots of the recurrence.
    """
    found = [1]
    before, discrepancy, since = [1], 1, 1  # from the last time that it grew longer, and how long ago that was
    for index in range(len(sequence)):
        off = sum(one * sequence[index - back] for back, one in enumerate(found)) % PRIME
        if off == 0:
            since += 1
            continue
        corrected = _less(found, off * pow(discrepancy, -1, PRIME) % PRIME, [0] * since + before)
        if len(corrected) > len(found):
            before, discrepancy, since = found, off, 1
        else:
            since += 1
        found = corrected
    return found


def _less(one: Sequence[int], factor: int, other: Sequence[int]) -> list[int]:
    """one - factor * other, the shorter one padded with zeros."""
    size = max(len(one), len(other))
    left = [*one, *[0] * (size - len(one))]
    for index, number in enumerate(other):
        left[index] = (left[index] - factor * number) % PRIME
    return left
