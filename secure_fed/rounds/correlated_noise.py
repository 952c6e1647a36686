"""The server's noise where it is correlated over rounds: of one secret key, so that a round can make earlier noise again."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from privacy.correlation import Correlation, noised
from privacy.entropy import Entropy, Floats
from privacy.errors import PrivacyError
from privacy.mechanisms import Named


@dataclass
class CorrelatedNoise:
    """The noise of a run's sums, once the run has opened its source.

    source: streams that are the same whenever they are asked for, of a key that nobody else has.
    """

    correlation: Correlation
    rounds: int
    source: Entropy | None = field(default=None, repr=False)

    def spread(self, round_: int) -> float:
        """The standard deviation of a round's noise, over that of the independent noise it is made of."""
        return float(np.linalg.norm(self._weights[: round_ + 1]))

    def noised(self, total: Named, std: float, round_: int, pass_name: str) -> dict[str, Tensor]:
        """The total of a pass with its noise. std: of the independent noise."""
        if self.source is None:
            raise PrivacyError("nothing may be released outside a run: its noise is opened by Federation.run")
        streams = [self.source.stream("sum", earlier, pass_name) for earlier in range(round_, -1, -1)]
        return noised(total, std, streams, self._weights[: round_ + 1])

    @cached_property
    def _weights(self) -> Floats:
        return self.correlation.weights(self.rounds)
