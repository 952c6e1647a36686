"""Shamir's secret sharing over the integers modulo p = 2^256 + 297, the smallest prime above 2^256.

A secret of 32 bytes is f(0) of a random polynomial f of degree t - 1; holder h gets f(h + 1) in 33 bytes. Any t shares give f,
and t - 1 of them are equally likely for every secret.

Interpolation is Lagrange's in its barycentric form. With w_i = 1 / prod_{j != i} (x_i - x_j), a polynomial f of degree below t
is, at any x that is none of x_1 ... x_t,

    f(x) = l(x) sum_i w_i f(x_i) / (x - x_i),    l(x) = prod_i (x - x_i)

so the w_i take O(t^2) small products once, and every point O(t) and one inversion modulo p.

Wrong shares are found by unique decoding of Reed-Solomon codes. Over all m places, sum_i w_i f(x_i) x_i^j = 0 whenever f has a
degree below t and j < m - t. So of values f(x_i) + e_i, where e_i is not 0 for i in E alone, the m - t syndromes

    S_j = sum_i w_i (f(x_i) + e_i) x_i^j = sum_{i in E} (w_i e_i) x_i^j

know the errors only. They obey the linear recurrence with the roots x_i, i in E, and if |E| <= (m - t) / 2 they obey no other
that is as short: the algorithm of Berlekamp and Massey finds it, and its roots are the places of the errors.

Python's integers take time that depends on their values. Shares are made and combined once each, on the machines of those who
may know them, so this tells nobody else anything but through a clock that stands beside the machine.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

import numpy as np

from protocols.errors import Aborted, ParameterError, Tampering
from protocols.keys import Secret

PRIME = 2**256 + 297
SHARE = 33  # bytes
_SECRET = 32  # bytes
_TRIES = 512
_LAZY = 512  # bits by which a value may outgrow the field before its remainder is taken
_WORD = 62  # bits of a machine word that a product of differences may fill
_RAREST = 10**6  # sets of holders to one without a liar
_CHANCE = secrets.SystemRandom()  # `random` itself may be seeded: liars would know what is tried

Fits = Callable[[Secret], bool]


def split(secret: Secret, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    """A share for each holder, of which any `threshold` give the secret."""
    return split_each((secret,), threshold, holders)[0]


def split_each(secrets_: Sequence[Secret], threshold: int, holders: Sequence[int]) -> list[dict[int, bytes]]:
    """Of each secret a share for each holder, by polynomials that are independent of each other."""
    _check_split(secrets_, threshold, holders)
    polynomials = [
        [*(secrets.randbelow(PRIME) for _ in range(threshold - 1)), int.from_bytes(secret.reveal(), "little")]
        for secret in secrets_
    ]
    values = evaluated_together(polynomials, [holder + 1 for holder in holders])
    return [
        {holder: value.to_bytes(SHARE, "little") for holder, value in zip(holders, each, strict=True)}
        for each in values
    ]


def _check_split(secrets_: Sequence[Secret], threshold: int, holders: Sequence[int]) -> None:
    for secret in secrets_:
        if len(secret.reveal()) != _SECRET:
            raise ParameterError(f"a secret of {len(secret.reveal())} bytes is to be shared: it must have {_SECRET}")
    if not 1 <= threshold <= len(holders):
        raise ParameterError(f"the threshold is {threshold}, for {len(holders)} holders: choose between 1 and that")
    if len(set(holders)) != len(holders) or min(holders) < 0:
        raise ParameterError("a holder of shares is listed twice, or has a negative number")


class Rebuilder:
    """Rebuilds secrets from shares and finds whose shares were wrong.

    n holders at threshold t take O(n^2) products of small numbers, and O(n) while the holders stay the same and nobody lies.
    (n - t) // 2 liars or fewer take O(n (n - t)) products more, and are always found.
    """

    def __init__(self) -> None:
        self._last: Audit | None = None

    def rebuild(self, shares: Mapping[int, bytes], threshold: int, fits: Fits) -> tuple[Secret, frozenset[int]]:
        """The secret that `fits`, and the holders whose shares are not of its polynomial.

        The holders with the smallest numbers are believed first; if what they give does not fit, then those that are left by
        unique decoding, which bears (n - t) // 2 wrong shares among the n that are numbers at all. For more liars than that,
        since `fits` can tell their secret, other sets of holders are tried, at random, a bounded number of times, unless there
        are so many of them that a set without a liar would hardly be met.

        Two polynomials with the secret at 0 meet in at most t - 2 of the n places, so only one can leave (n - t + 1) / 2 shares
        wrong or fewer. If more of the holders lied than that, and agreed on how, the blame can fall on others.
        """
        if threshold < 1 or min(shares, default=0) < 0:
            raise ParameterError(f"the threshold is {threshold}, or a holder's number negative: take positive ones")
        if len(shares) < threshold:
            raise Aborted(f"{len(shares)} shares are there, of the {threshold} that rebuild a secret")
        values = {holder + 1: value for holder, share in shares.items() if (value := _number(share)) is not None}
        best: tuple[Secret, frozenset[int]] | None = None
        for basis in islice(self._bases(values, threshold), _TRIES):
            secret = _secret(basis, values)
            if secret is None or not fits(secret):
                continue
            off = self._off(basis, values)
            if best is None or len(shares) - len(values) + len(off) < len(best[1]):
                best = secret, frozenset(shares.keys() - {place - 1 for place in values.keys() - off})
            if 2 * len(off) <= len(values) - threshold + 1:
                break
        if best is None:
            raise Tampering(
                f"no {threshold} of {len(shares)} shares rebuild what was committed to: some of their holders lied"
            )
        return best

    def _bases(self, values: Mapping[int, int], threshold: int) -> Iterator[Interpolation]:
        """Which places to believe, one attempt after the other."""
        places = sorted(values)
        if len(places) < threshold:
            return
        audit = self._audit(places, threshold)
        yield audit.basis
        wrong = misplaced(audit.whole, threshold, values)
        if wrong == frozenset():
            return  # all agree, so that every set of them gives what the first gave
        if wrong is not None and not wrong.isdisjoint(audit.basis.places):
            yield Interpolation([place for place in places if place not in wrong][:threshold])
        while _hopeful(len(places), threshold):
            yield Interpolation(sorted(_CHANCE.sample(places, threshold)))

    def _audit(self, places: Sequence[int], threshold: int) -> Audit:
        """The one before, or its basis, if it was for the same holders."""
        last, first = self._last, tuple(places[:threshold])
        basis = last.basis if last is not None and last.basis.places == first else Interpolation(first)
        if last is None or last.basis is not basis or last.whole.places != tuple(places):
            last = self._last = Audit(basis, places)
        return last

    def _off(self, basis: Interpolation, values: Mapping[int, int]) -> set[int]:
        """The places whose value is not that of the basis' polynomial."""
        if self._last is not None and self._last.basis is basis and self._last.passes(values):
            return set()
        others = values.keys() - set(basis.places)
        return {place for place in others if _combined(basis.at(place), basis, values) != values[place]}


class Interpolation:
    """Through these places: different integers from 1 to 2^64 - 1."""

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
        """The weights with which values at the places add up to the value at `point`, which is none of them."""
        differences = [point - place for place in self.places]
        whole = 1
        for difference in differences:
            whole = whole * difference % PRIME
        below = zip(self._distances, differences, strict=True)
        return [whole * inverse % PRIME for inverse in inverses([one * other % PRIME for one, other in below])]


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


def misplaced(whole: Interpolation, threshold: int, values: Mapping[int, int]) -> frozenset[int] | None:
    """The fewest places without which the values are of one polynomial of degree below `threshold`, if there are few enough.

    `whole` is through all m places that have values. Few enough are (m - threshold) // 2: there is at most one polynomial that
    all but so many of the values are of. None if there is none. If more than that were made wrong, on purpose, the polynomial
    can be another than the one that was shared: what it gives is to be judged. O(m (m - threshold)) products modulo p.
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
    before, discrepancy, since = [1], 1, 1  # of the last time that it grew longer, and how long ago that is
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
    """one - factor * other, the shorter of them filled up with zeros."""
    size = max(len(one), len(other))
    left = [*one, *[0] * (size - len(one))]
    for index, number in enumerate(other):
        left[index] = (left[index] - factor * number) % PRIME
    return left


def _hopeful(count: int, threshold: int) -> bool:
    """Whether one set in a million or more is without a liar, where one liar more has lied than unique decoding bears.

    Where it is not, all tries together find the secret once in two thousand times at best, and take half a minute for a
    thousand holders.
    """
    liars = (count - threshold) // 2 + 1
    return math.comb(count, threshold) <= _RAREST * math.comb(count - liars, threshold)


def _combined(weights: Sequence[int], basis: Interpolation, values: Mapping[int, int]) -> int:
    return sum(weight * values[place] for weight, place in zip(weights, basis.places, strict=True)) % PRIME


def _secret(basis: Interpolation, values: Mapping[int, int]) -> Secret | None:
    """f(0), unless it is more than 32 bytes hold and so cannot have been shared."""
    found = _combined(basis.at_zero, basis, values)
    return Secret(found.to_bytes(_SECRET, "little")) if found < 2 ** (8 * _SECRET) else None


def _number(share: bytes) -> int | None:
    """The one encoding of every number below p; None for what is no share."""
    value = int.from_bytes(share, "little")
    return value if len(share) == SHARE and value < PRIME else None


def evaluated(coefficients: Sequence[int], point: int) -> int:
    """A polynomial's value by Horner's rule, the highest coefficient first."""
    value = 0
    for coefficient in coefficients:
        value = (value * point + coefficient) % PRIME
    return value


def evaluated_together(polynomials: Sequence[Sequence[int]], points: Sequence[int]) -> list[list[int]]:
    """The values of polynomials of one degree, coefficients highest first, at points from 1 on: by polynomial, by point.

    Horner's rule for all polynomials in one integer, in fields wide enough for `lazy` steps without a remainder: before them a
    field is below p, and after them below p (lazy + 1) point^lazy.
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
    """prod_{j != i} (x_i - x_j), for each i. As many differences as fit a machine word are multiplied there."""
    least, bits = min(places), (max(places) - min(places)).bit_length()
    count, group = len(places), max(1, _WORD // max(bits, 1))
    table = np.ones((count, -(-count // group) * group), dtype=np.int64 if bits <= _WORD else object)
    row = np.array([place - least for place in places], dtype=table.dtype)
    np.subtract(row[:, None], row, out=table[:, :count])
    np.fill_diagonal(table, 1)
    return [math.prod(factors) for factors in np.multiply.reduce(table.reshape(count, group, -1), axis=1).tolist()]


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
