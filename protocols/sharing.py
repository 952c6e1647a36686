"""Shamir's secret sharing over the integers modulo p = 2^256 + 297, the smallest prime above 2^256.

A secret of 32 bytes is f(0) of a random polynomial f of degree t - 1; holder h gets f(h + 1) in 33 bytes. Any t shares give f
by interpolation, and t - 1 shares are equally likely for every secret. Wrong shares are found by unique decoding.

Interpolation is Lagrange's in its barycentric form. With w_i = 1 / prod_{j != i} (x_i - x_j), a polynomial f of degree below t
is, at any x that is none of x_1 ... x_t,

    f(x) = l(x) sum_i w_i f(x_i) / (x - x_i),    l(x) = prod_i (x - x_i)

so the w_i take O(t^2) small products once, and every point O(t) and one inversion modulo p.

Unique decoding is that of Reed-Solomon codes. With w_i the weights through m places, sum_i w_i f(x_i) x_i^j = 0 whenever f has
a degree below t and j < m - t. So for values f(x_i) + e_i, where e_i is nonzero only for i in E, the m - t syndromes

    S_j = sum_i w_i (f(x_i) + e_i) x_i^j = sum_{i in E} (w_i e_i) x_i^j

depend only on the errors. They obey the linear recurrence with the roots x_i, i in E, and if |E| <= (m - t) / 2 they obey no
other recurrence as short: the algorithm of Berlekamp and Massey finds it, and its roots are the places of the errors.

The time of Python's integer operations depends on the values. Shares are made and combined once each, on the machines of
parties that may know them, so this leaks only to an observer who can time these machines.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, zip_longest

import numpy as np

from protocols.errors import Aborted, ParameterError, Tampering
from protocols.keys import Secret

PRIME = 2**256 + 297
SHARE = 33  # bytes
_SECRET = 32  # bytes
_TRIES = 512
_RAREST = 10**6  # sets of holders per set without a liar
_CHANCE = secrets.SystemRandom()  # `random` itself may be seeded, and liars would know the sets tried
_LAZY = 512  # bits by which a value may exceed the field before reduction
_WORD = 62  # bits of a machine word that a product of differences may fill

Fits = Callable[[Secret], bool]


def split(secret: Secret, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    """A share for each holder; any `threshold` shares give the secret."""
    return split_each((secret,), threshold, holders)[0]


def split_each(secrets_: Sequence[Secret], threshold: int, holders: Sequence[int]) -> list[dict[int, bytes]]:
    """For each secret a share for each holder, by independent polynomials."""
    for secret in secrets_:
        if len(secret.reveal()) != _SECRET:
            raise ParameterError(f"the secret to share has {len(secret.reveal())} bytes: it must have {_SECRET}")
    if not 1 <= threshold <= len(holders):
        raise ParameterError(
            f"the threshold is {threshold} for {len(holders)} holders: choose from 1 to {len(holders)}"
        )
    if len(set(holders)) != len(holders) or min(holders) < 0:
        raise ParameterError("a holder of shares is listed twice, or has a negative number")
    polynomials = [
        [*(secrets.randbelow(PRIME) for _ in range(threshold - 1)), int.from_bytes(secret.reveal(), "little")]
        for secret in secrets_
    ]
    values = evaluated_together(polynomials, [holder + 1 for holder in holders])
    return [
        {holder: value.to_bytes(SHARE, "little") for holder, value in zip(holders, each, strict=True)}
        for each in values
    ]


class Rebuilder:
    """Rebuilds secrets from shares and finds the holders of wrong shares.

    n holders at threshold t take O(n^2) products of small numbers, and O(n) while the holders stay the same and nobody lies.
    (n - t) // 2 liars or fewer take O(n (n - t)) products more, and are always found.
    """

    def __init__(self) -> None:
        self._last: Audit | None = None

    def rebuild(self, shares: Mapping[int, bytes], threshold: int, fits: Fits) -> tuple[Secret, frozenset[int]]:
        """The secret that `fits`, and the holders whose shares are not on its polynomial.

        First it tries the holders with the smallest numbers; if their secret does not fit, then the holders left by unique
        decoding, which tolerates (n - t) // 2 wrong shares among the n that encode numbers. For more liars than that, since
        `fits` can recognise the secret, it tries other sets of holders, at random, a bounded number of times, unless there are
        so many sets that it would hardly meet one without a liar.

        Two polynomials with the secret at 0 meet in at most t - 2 of the n places, so for only one polynomial can (n - t + 1) /
        2 or fewer shares be wrong. If more holders lied, in a coordinated way, the blame can fall on others.
        """
        if threshold < 1 or min(shares, default=0) < 0:
            raise ParameterError(
                f"the threshold is {threshold}, or a holder's number is negative: choose a threshold from 1 and numbers from 0"
            )
        if len(shares) < threshold:
            raise Aborted(f"{len(shares)} shares are left, fewer than the {threshold} that rebuild a secret")
        values = {
            holder + 1: value
            for holder, share in shares.items()
            if len(share) == SHARE and (value := int.from_bytes(share, "little")) < PRIME  # a number's only encoding
        }
        best: tuple[Secret, frozenset[int]] | None = None
        for basis in islice(self._bases(values, threshold), _TRIES):
            number = _combined(basis.at_zero, basis, values)
            if number >= 2 ** (8 * _SECRET):  # cannot have been shared
                continue
            secret = Secret(number.to_bytes(_SECRET, "little"))
            if not fits(secret):
                continue
            off = set[int]()
            if self._last is None or self._last.basis is not basis or not self._last.passes(values):
                others = values.keys() - set(basis.places)
                off = {place for place in others if _combined(basis.at(place), basis, values) != values[place]}
            if best is None or len(shares) - len(values) + len(off) < len(best[1]):
                best = secret, frozenset(shares.keys() - {place - 1 for place in values.keys() - off})
            if 2 * len(off) <= len(values) - threshold + 1:
                break
        if best is None:
            raise Tampering(
                f"no {threshold} of {len(shares)} shares rebuild the secret that was committed to: some of their holders lied"
            )
        return best

    def _bases(self, values: Mapping[int, int], threshold: int) -> Iterator[Interpolation]:
        """The sets of places to try, one attempt after the other."""
        places = sorted(values)
        if len(places) < threshold:
            return
        audit = self._audit(places, threshold)
        yield audit.basis
        wrong = misplaced(audit.whole, threshold, values)
        if wrong == frozenset():
            return  # all agree, so every set gives the same secret as the first
        if wrong is not None and not wrong.isdisjoint(audit.basis.places):
            yield Interpolation([place for place in places if place not in wrong][:threshold])
        # Go on if at least one set in a million is without a liar, with one liar more than unique decoding tolerates.
        # Otherwise all tries together find the secret once in two thousand times at best, and take half a minute for a
        # thousand holders.
        honest = len(places) - (len(places) - threshold) // 2 - 1
        hopeful = math.comb(len(places), threshold) <= _RAREST * math.comb(honest, threshold)
        while hopeful:
            yield Interpolation(sorted(_CHANCE.sample(places, threshold)))

    def _audit(self, places: Sequence[int], threshold: int) -> Audit:
        """The previous audit, or its basis, if it was for the same holders."""
        last, first = self._last, tuple(places[:threshold])
        basis = last.basis if last is not None and last.basis.places == first else Interpolation(first)
        if last is None or last.basis is not basis or last.whole.places != tuple(places):
            last = self._last = Audit(basis, places)
        return last


class Audit:
    """Whether all n values lie on the polynomial through the values at the t places of `basis`, in O(n) for every n values.

    They do if and only if the polynomial of degree below n through all of them is the polynomial of the basis. The two are
    compared at one random point: equal polynomials always pass; different polynomials, from values that were not chosen with
    knowledge of the point, pass with a probability below n / 2^255, since they meet in fewer than n points.
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


def misplaced(whole: Interpolation, threshold: int, values: Mapping[int, int]) -> frozenset[int] | None:
    """The fewest places without which the values lie on one polynomial of degree below `threshold`, if there are few enough.

    `whole` is through all m places that have values. Few enough means (m - threshold) // 2: at most one polynomial passes
    through all but this many of the values. None if there is no such polynomial. If more values were made wrong on purpose, the
    polynomial can differ from the shared one: the caller must verify its result. O(m (m - threshold)) products modulo p.
    """
    terms = [weight * values[place] % PRIME for weight, place in zip(whole.barycentric, whole.places, strict=True)]
    syndromes = []
    for _ in range(len(whole.places) - threshold):
        syndromes.append(sum(terms) % PRIME)
        terms = [term * place % PRIME for term, place in zip(terms, whole.places, strict=True)]
    recurrence = _shortest_recurrence(syndromes)
    errors = len(recurrence) - 1
    wrong = frozenset(place for place in whole.places if evaluated(recurrence, place) == 0)
    return wrong if len(wrong) == errors and 2 * errors <= len(whole.places) - threshold else None


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
        factor, shifted = off * pow(discrepancy, -1, PRIME) % PRIME, [0] * since + before
        corrected = [(one - factor * other) % PRIME for one, other in zip_longest(found, shifted, fillvalue=0)]
        if len(corrected) > len(found):
            before, discrepancy, since = found, off, 1
        else:
            since += 1
        found = corrected
    return found


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


def _combined(weights: Sequence[int], basis: Interpolation, values: Mapping[int, int]) -> int:
    return sum(weight * values[place] for weight, place in zip(weights, basis.places, strict=True)) % PRIME


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
    values = []
    for point in points:
        numbers = [0] * len(polynomials)
        for block in blocks:
            value = _packed(numbers, width)
            for coefficients in block:
                value = value * point + coefficients
            numbers = [(value >> place * width & (1 << width) - 1) % PRIME for place in range(len(polynomials))]
        values.append(numbers)
    return [list(each) for each in zip(*values, strict=True)]


def _packed(numbers: Sequence[int], width: int) -> int:
    return sum(number << place * width for place, number in enumerate(numbers))
