"""Contributions as integers modulo 2^k, and sums of them back.

    `Rounded`  fixed point: what is sent is rounded to a grid as fine as all clients together leave room for
    `Noised`   privacy.noise = "distributed": rounded at random, and every client's share of the noise added, in integers,
               before any mask

Both are made of a `PublicPlan`, and of nothing that tells how many clients take part in a round.

A client that contributes nothing sends zeros, and under `Noised` its share of the noise all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from privacy.distributed import DistributedGaussian
from privacy.entropy import Stream
from protocols.codec import FixedPoint, centred, to_words
from secure_fed.rounds.masked.plan import PublicPlan

Words = NDArray[Any]
Floats = NDArray[np.float64]


class Said(NamedTuple):
    """One contribution as numbers: (size,) values, the weight that they count with, and a loss, NaN where that is private.

    contributed: of a sum, how many contributions are in it, where that is told.
    """

    values: Floats
    weight: float
    loss: float
    contributed: int | None = None


class Carrier(Protocol):
    """How the contributions of one pass become words, and the sum of these words numbers."""

    @property
    def length(self) -> int:
        """Of a vector of words."""

    @property
    def largest(self) -> int:
        """The most that one client's word can be, in magnitude; 0 where a sum is not to be judged by it.

        That is so where the clients' noise sets no limit. It is so, too, where the server adds noise that a guarantee rests on:
        whether a sum is refused is seen, and may depend on the sum under that noise alone.
        """

    def admitted(self) -> float:
        """The longest that a contribution may be, so that what it becomes keeps to the clip norm."""

    def require_precise(self) -> None:
        """Refuse what cannot be carried, or only with much lost."""

    def words(self, said: Said | None, stream: Stream) -> Words:
        """What a client puts into the sum; with nothing said, what one does that contributes nothing."""

    def read(self, total: Words) -> Said:
        """The weighted sum of values, the sum of weights, and the mean loss, of a sum of words."""


@dataclass(frozen=True)
class Rounded:
    """Fixed point: every value times its client's weight, that weight; perhaps a loss, that it is one, and that it contributes.

    most: the weight that counts in full; a client with more counts as one with so much.

    The sum of n contributions is off by at most n / (2 scale) on every coordinate, and their mean, equally weighted, by
    1 / (2 scale).
    """

    plan: PublicPlan
    most: float = 1.0
    with_loss: bool = False

    @property
    def codec(self) -> FixedPoint:
        return self.plan.codec

    @property
    def length(self) -> int:
        return self.plan.size + (4 if self.with_loss else 1)

    @property
    def largest(self) -> int:
        return 0 if math.isfinite(self.plan.clip_norm) else self.codec.largest

    def admitted(self) -> float:
        return self.plan.longest()

    def require_precise(self) -> None:
        self.plan.require_precise()

    def words(self, said: Said | None, stream: Stream) -> Words:
        carried, size, bound = np.zeros(self.length), self.plan.size, self.plan.bound
        if said is not None:
            share = min(said.weight / self.most, 1.0)
            np.multiply(said.values, share, out=carried[:size])
            carried[size] = share * bound
            if self.with_loss:
                carried[-1] = bound
            if self.with_loss and math.isfinite(said.loss):
                carried[-3:-1] = bound * max(-1.0, min(said.loss / LOSS, 1.0)), bound
        return self.codec.encode(carried)

    def read(self, total: Words) -> Said:
        carried, size, bound = self.codec.decode(total), self.plan.size, self.plan.bound
        weight = float(carried[size]) / bound * self.most
        told = self.with_loss and carried[-2] > 0
        loss = float(carried[-3] / carried[-2]) * LOSS if told else math.nan
        count = round(carried[-1] / bound) if self.with_loss else None
        return Said(carried[:size] * self.most, weight, loss, count)


@dataclass(frozen=True)
class Noised:
    """`privacy.distributed`: what a client sends is bounded, rounded and noised before it is masked.

    silent: what a phantom sends is not noised. Its words are masked all the same, so that nobody can tell them from others';
    and the noise of a sum is what it would be without phantoms, and rests on real clients alone.
    """

    plan: PublicPlan
    mechanism: DistributedGaussian
    silent: bool = False

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

    def words(self, said: Said | None, stream: Stream) -> Words:
        values = np.zeros(self.plan.size) if said is None else said.values
        encode = self.mechanism.silent if self.silent else self.mechanism.encoded
        return to_words(encode(values, self.plan.clip_norm, stream), self.mechanism.bits)

    def read(self, total: Words) -> Said:
        values = self.mechanism.decoded(centred(total), self.plan.clip_norm, self.plan.size)
        return Said(values, math.nan, math.nan)


LOSS = 1000.0  # a client's mean loss beyond counts as this
