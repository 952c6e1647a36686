"""The public numbers that the encoding of a contribution may depend on.

The noise of a differentially private sum hides one client if that client moves the sum by at most the clip norm. This requires
that the client changes no other client's words. So the encoding of a contribution may not depend on who takes part in the
round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from protocols.errors import RangeError
from protocols.masking import FixedPoint
from secure_fed.errors import ConfigError


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

    def require_precise(self) -> None:
        """Refuse words that cannot represent such contributions, or only with a large error."""
        try:
            _ = self.codec
            self.longest()
        except RangeError as error:
            message = f"{error} (secure_aggregation.bits, range)"
            raise ConfigError(message).about("secure_aggregation.bits", self.bits, str(error)) from error


@lru_cache(maxsize=64)
def _codec(bits: int, bound: float, places: int) -> FixedPoint:
    """Cached for all clients of a process: its scale is computed with fractions."""
    return FixedPoint(bits, bound, places)


_MOST_LOST = 0.01
