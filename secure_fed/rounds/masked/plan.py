"""The public numbers that the encoding of a contribution may depend on.

The noise of a differentially private sum hides one client if that client moves the sum by at most the clip norm. That holds as
long as it changes no other client's words. So nothing that encodes a contribution may depend on who takes part in the round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from protocols.codec import FixedPoint
from protocols.errors import RangeError
from secure_fed.errors import ConfigError


@dataclass(frozen=True)
class PublicPlan:
    """The input of encoders: numbers that follow from the run's configuration, from how many clients there are, and from what
    earlier rounds released. No number of clients that took part in a round is among them, or can be derived from them.

    size: coordinates of a contribution. bits: of a word. places: the most contributions that a sum can ever hold, which are
    those of all clients that coins may draw. bound: the largest magnitude of a coordinate. clip_norm: what a guarantee rests
    on, so that rounding may not make a contribution longer; infinite if none does.

    Guarantee: with a finite `clip_norm` C, a contribution of norm at most `longest()` becomes words that stand for a vector of
    norm at most C. Its words depend on it and on this plan alone. So one client more or less, in a sum of any size up to
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
        """The longest that a contribution may be before rounding, so that it keeps to the clip norm after rounding."""
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

    def require_precise(self) -> None:
        """Refuse words that cannot carry such contributions, or only with much lost."""
        try:
            _ = self.codec
            self.longest()
        except RangeError as error:
            message = f"{error} (secure_aggregation.bits, range)"
            raise ConfigError(message).about("secure_aggregation.bits", self.bits, str(error)) from error


@lru_cache(maxsize=64)
def _codec(bits: int, bound: float, places: int) -> FixedPoint:
    """The same for all clients of a process: its scale is worked out in fractions."""
    return FixedPoint(bits, bound, places)


_MOST_LOST = 0.01
