"""Shamir's secret sharing over the integers modulo p = 2^256 + 297.

A secret of 32 bytes is f(0) of a random polynomial f of degree t - 1; holder h gets f(h + 1) in 33 bytes. Any t shares give f
by interpolation (`polynomials`), and t - 1 shares are equally likely for every secret. Wrong shares are found by unique
decoding (`decoding`).

The time of Python's integer operations depends on the values. Shares are made and combined once each, on the machines of
parties that may know them, so this leaks only to an observer who can time these machines.
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
_RAREST = 10**6  # sets of holders per set without a liar
_CHANCE = secrets.SystemRandom()  # `random` itself may be seeded, and liars would know the sets tried

Fits = Callable[[Secret], bool]


def split(secret: Secret, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    """A share for each holder; any `threshold` shares give the secret."""
    return split_each((secret,), threshold, holders)[0]


def split_each(secrets_: Sequence[Secret], threshold: int, holders: Sequence[int]) -> list[dict[int, bytes]]:
    """For each secret a share for each holder, by independent polynomials."""
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
            raise ParameterError(f"the secret to share has {len(secret.reveal())} bytes: it must have {_SECRET}")
    if not 1 <= threshold <= len(holders):
        raise ParameterError(
            f"the threshold is {threshold} for {len(holders)} holders: choose from 1 to {len(holders)}"
        )
    if len(set(holders)) != len(holders) or min(holders) < 0:
        raise ParameterError("a holder of shares is listed twice, or has a negative number")


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
        while _hopeful(len(places), threshold):
            yield Interpolation(sorted(_CHANCE.sample(places, threshold)))

    def _audit(self, places: Sequence[int], threshold: int) -> Audit:
        """The previous audit, or its basis, if it was for the same holders."""
        last, first = self._last, tuple(places[:threshold])
        basis = last.basis if last is not None and last.basis.places == first else Interpolation(first)
        if last is None or last.basis is not basis or last.whole.places != tuple(places):
            last = self._last = Audit(basis, places)
        return last

    def _off(self, basis: Interpolation, values: Mapping[int, int]) -> set[int]:
        """The places whose value is not on the basis' polynomial."""
        if self._last is not None and self._last.basis is basis and self._last.passes(values):
            return set()
        others = values.keys() - set(basis.places)
        return {place for place in others if _combined(basis.at(place), basis, values) != values[place]}


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


def _hopeful(count: int, threshold: int) -> bool:
    """Whether at least one set in a million is without a liar, with one liar more than unique decoding tolerates.

    Otherwise all tries together find the secret once in two thousand times at best, and take half a minute for a thousand
    holders.
    """
    liars = (count - threshold) // 2 + 1
    return math.comb(count, threshold) <= _RAREST * math.comb(count - liars, threshold)


def _combined(weights: Sequence[int], basis: Interpolation, values: Mapping[int, int]) -> int:
    return sum(weight * values[place] for weight, place in zip(weights, basis.places, strict=True)) % PRIME


def _secret(basis: Interpolation, values: Mapping[int, int]) -> Secret | None:
    """f(0); None if it does not fit 32 bytes and so cannot have been shared."""
    found = _combined(basis.at_zero, basis, values)
    return Secret(found.to_bytes(_SECRET, "little")) if found < 2 ** (8 * _SECRET) else None


def _number(share: bytes) -> int | None:
    """The number below p in its unique encoding; None for bytes that are no share."""
    value = int.from_bytes(share, "little")
    return value if len(share) == SHARE and value < PRIME else None
