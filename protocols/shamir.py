"""Shamir's secret sharing over the integers modulo p = 2^256 + 297.

A secret of 32 bytes is f(0) of a random polynomial f of degree t - 1; holder h gets f(h + 1) in 33 bytes. Any t shares give f
by interpolation (`polynomials`), and t - 1 of them are equally likely for every secret. Wrong shares are found by unique
decoding (`decoding`).

Python's integers take time that depends on their values. Shares are made and combined once each, on the machines of those who
may know them, so this tells nobody else anything but through a clock that stands beside the machine.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from protocols.decoding import misplaced
from protocols.errors import Aborted, ParameterError, Tampering
from protocols.keys import Secret
from protocols.polynomials import PRIME, Interpolation, evaluated_together

SHARE = 33  # bytes
_SECRET = 32  # bytes
_TRIES = 512
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
