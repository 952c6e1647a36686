"""The server's noise where it is correlated over rounds: from secret keys, so that earlier noise can be made again."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from torch import Tensor

from privacy.correlation import CorrelatedRows, Correlation
from privacy.entropy import Entropy, Floats, Stream
from privacy.errors import PrivacyError
from privacy.mechanisms import Named


@dataclass
class CorrelatedNoise:
    """The noise of a run's sums, once the run has opened its source. Each pass of a round has its own rows."""

    correlation: Correlation
    rounds: int
    _source: Entropy | None = field(default=None, init=False, repr=False)
    _rows: dict[str, CorrelatedRows] = field(default_factory=dict, init=False, repr=False)

    def open(self, source: Entropy) -> CorrelatedNoise:
        """Begin or resume a run. source: reproducible streams, from keys that nobody else has."""
        self.close()
        self._source = source
        return self

    def close(self) -> None:
        """Forget the source and all noise made from it."""
        self._source = None
        self._rows.clear()

    def spread(self, round_: int) -> float:
        """The standard deviation of a round's noise, relative to the independent noise that it is made from."""
        return float(np.linalg.norm(self._weights[: round_ + 1]))

    def noised(self, total: Named, std: float, round_: int, pass_name: str) -> dict[str, Tensor]:
        """The total of a pass with its noise. std: of the independent noise."""
        if self._source is None:
            raise PrivacyError("nothing may be released outside a run: Federation.run opens the noise")
        if pass_name not in self._rows:
            self._rows[pass_name] = CorrelatedRows(self.correlation, partial(_stream, self._source, pass_name))
        return self._rows[pass_name].noised(total, std, round_)

    @cached_property
    def _weights(self) -> Floats:
        return self.correlation.weights(self.rounds)


def _stream(source: Entropy, pass_name: str, round_: int) -> Stream:
    return source.stream("sum", round_, pass_name)
