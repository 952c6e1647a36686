"""The encoding of contributions as integers modulo 2^k, and the decoding of their sum.

    `Rounded`  fixed point, on the finest grid on which a sum over all clients fits
    `Noised`   privacy.noise = "distributed": rounded at random, and every client's share of the noise added, in integers,
               before any mask

Both depend on a `PublicPlan` alone, and so not on how many clients take part in a round. The noise of a differentially private
sum hides one client if that client moves the sum by at most the clip norm. This requires that the client changes no other
client's words. So the encoding of a contribution may not depend on who takes part in the round.

A client without a contribution sends zeros, under `Noised` with its share of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from privacy.distributed import DistributedGaussian
from privacy.entropy import Stream
from protocols.errors import RangeError
from protocols.masking import FixedPoint, centred, to_words
from secure_fed.errors import ConfigError

Words = NDArray[Any]
Floats = NDArray[np.float64]
LOSS = 1000.0  # larger losses count as this
_MOST_LOST = 0.01  # of the clip norm, to rounding


class Contribution(NamedTuple):
    """One contribution, or a sum of them, as numbers.

    values: (size,). weight: their weight in a mean. loss: mean local loss, NaN if it is private. contributed: the number of
    contributions in a sum, None if the encoding does not carry it.
    """

    values: Floats
    weight: float
    loss: float
    contributed: int | None = None


@dataclass(frozen=True)
class PublicPlan:
    """The input of encoders: numbers that follow from the run's configuration, from the number of clients, and from earlier
    rounds' releases. The number of clients that took part in a round is not among them, and cannot be derived from them.

    size: coordinates of a contribution. bits: of a word. places: the largest possible number of contributions in a sum: all
    clients that coins may draw. bound: the largest magnitude of a coordinate. clip_norm: the norm that a guarantee relies on,
    so that rounding may not make a contribution longer; infinite without a guarantee.

    Guarantee: with a finite `clip_norm` C, a contribution of norm at most `longest()` becomes words that encode a vector of
    norm at most C. Its words depend only on it and on this plan. So one client more or less, in a sum of any size up to
    `places`, moves the sum of words by that client's vector and by nothing else: by at most C.
    """

    size: int
    bits: int
    places: int
    bound: float
    clip_norm: float = math.inf

    @cached_property
    def codec(self) -> FixedPoint:
        return _codec(self.bits, self.bound, self.places)

    def longest(self) -> float:
        """The largest norm of a contribution before rounding for which it is within the clip norm after rounding."""
        if math.isinf(self.clip_norm):
            return self.clip_norm
        longer = math.sqrt(self.size) * self.codec.error
        if longer > _MOST_LOST * self.clip_norm:
            raise ConfigError(
                f"rounding {self.size:,} coordinates of up to {self.places} clients to {self.bits} bits could lengthen a "
                f"contribution by {longer:.3g}, more than {_MOST_LOST:.0%} of the clip norm {self.clip_norm:g}: set "
                "secure_aggregation.bits = 64"
            ).about("secure_aggregation.bits", self.bits, "64")
        return self.clip_norm - longer


_codec = lru_cache(maxsize=64)(FixedPoint)  # for all clients of a process: its scale is computed with fractions


@dataclass(frozen=True)
class Rounded:
    """Fixed point: (share * values, share), or with a loss (share * values, share, loss, has a loss, contributes).

    most: the largest weight; a client with more counts as one with this weight. share: the weight divided by `most`.

    The sum of n contributions is off by at most most * n / (2 scale) on every coordinate. The mean of contributions of weight
    `most` is off by 1 / (2 scale).
    """

    plan: PublicPlan
    most: float = 1.0
    with_loss: bool = False

    @property
    def codec(self) -> FixedPoint:
        return self.plan.codec

    @property
    def length(self) -> int:
        """The length of a vector of words."""
        return self.plan.size + (4 if self.with_loss else 1)

    @property
    def largest(self) -> int:
        """The largest magnitude of one client's word; 0 if no sum may be refused for exceeding it.

        With shares of noise there is no such limit. Where the server adds the noise of a guarantee, the refusal itself is
        visible, so it may depend only on the noised sum.
        """
        return 0 if math.isfinite(self.plan.clip_norm) else self.codec.largest

    def admitted(self) -> float:
        """The largest norm of a contribution whose encoding stays within the clip norm."""
        return self.plan.longest()

    def require_precise(self) -> None:
        """Refuse contributions that cannot be encoded, or only with a large error."""
        try:
            _ = self.codec
            self.plan.longest()
        except RangeError as error:
            message = f"{error} (secure_aggregation.bits, range)"
            raise ConfigError(message).about("secure_aggregation.bits", self.plan.bits, str(error)) from error

    def encode(self, contribution: Contribution | None, stream: Stream) -> Words:
        """The integer vector that a client adds to the sum. `None` encodes no contribution."""
        carried, size, bound = np.zeros(self.length), self.plan.size, self.plan.bound
        if contribution is not None:
            share = min(contribution.weight / self.most, 1.0)
            np.multiply(contribution.values, share, out=carried[:size])
            carried[size] = share * bound
            if self.with_loss:
                carried[-1] = bound
            if self.with_loss and math.isfinite(contribution.loss):
                carried[-3:-1] = bound * max(-1.0, min(contribution.loss / LOSS, 1.0)), bound
        return self.codec.encode(carried)

    def decode(self, total: Words) -> Contribution:
        """The weighted sum of values, the sum of weights and the mean loss, from a sum of words."""
        carried, size, bound = self.codec.decode(total), self.plan.size, self.plan.bound
        weight = float(carried[size]) / bound * self.most
        has_loss = self.with_loss and carried[-2] > 0
        loss = float(carried[-3] / carried[-2]) * LOSS if has_loss else math.nan
        count = round(carried[-1] / bound) if self.with_loss else None
        return Contribution(carried[:size] * self.most, weight, loss, count)


@dataclass(frozen=True)
class Noised:
    """`privacy.distributed`: a contribution is clipped, rounded and noised before it is masked. Its face is `Rounded`'s."""

    plan: PublicPlan
    mechanism: DistributedGaussian

    @property
    def length(self) -> int:
        return self.plan.size

    @property
    def largest(self) -> int:
        return 0

    def admitted(self) -> float:
        return self.plan.clip_norm

    def require_precise(self) -> None:
        self.mechanism.grid(self.plan.size)

    def encode(self, contribution: Contribution | None, stream: Stream) -> Words:
        values = np.zeros(self.plan.size) if contribution is None else contribution.values
        return to_words(self.mechanism.encoded(values, self.plan.clip_norm, stream), self.mechanism.bits)

    def decode(self, total: Words) -> Contribution:
        values = self.mechanism.decoded(centred(total), self.plan.clip_norm, self.plan.size)
        return Contribution(values, math.nan, math.nan)


Encoding = Rounded | Noised  # encodes the contributions of one pass as words, and decodes the sum of these words
