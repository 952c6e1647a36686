"""The noise C^-1 Z of `correlation`, one row for each round.

With y_t the noise of round t, C (C^-1 Z) = Z gives a row from the band - 1 rows before it:

    y_t = (Z_t - sum_(j = 1 ... band - 1) c_j y_(t - j)) / c_0.

So a round takes the memory and time of `band` rows. A process that resumes a run lacks the earlier rows and makes them again
from the first one, of the same streams. The rows are as secret as the keys of their streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from torch import Tensor

from privacy.correlation import Correlation
from privacy.entropy import Floats, Stream
from privacy.mechanisms import Named, perturbed

Shapes = Mapping[str, tuple[int, ...]]


class CorrelatedRows:
    """Rows of C^-1 Z, where Z_t is the stream of round t from its beginning. A row is the same at every call.

    All rows have the same shapes and are drawn in the order of names, so each coordinate's noise cancels its own earlier noise.
    """

    def __init__(self, correlation: Correlation, stream_of: Callable[[int], Stream]) -> None:
        self._column = correlation.column
        self._stream_of = stream_of
        self._past: deque[dict[str, Floats]] = deque(maxlen=correlation.band - 1)  # the latest first
        self._next = 0

    def noised(self, total: Named, std: float, round_: int) -> dict[str, Tensor]:
        """A round's total plus its noise row, ready for release. std: the standard deviation of Z on each coordinate."""
        row = self.row(round_, {name: tuple(tensor.shape) for name, tensor in total.items()})
        stream = self._stream_of(round_)

        def noised(name: str, tensor: Tensor) -> Tensor:
            return perturbed(tensor, std, stream, lambda *_: row[name].copy())

        return {name: noised(name, tensor) for name, tensor in sorted(total.items())}

    def row(self, round_: int, shapes: Shapes) -> dict[str, Floats]:
        """y of this round; the rows of skipped rounds are made on the way."""
        if round_ < self._next:
            self._past.clear()
            self._next = 0
        for earlier in range(self._next, round_):
            self._past.appendleft(self._made(earlier, shapes))
        found = self._made(round_, shapes)
        self._past.appendleft(found)
        self._next = round_ + 1
        return found

    def _made(self, round_: int, shapes: Shapes) -> dict[str, Floats]:
        stream, found = self._stream_of(round_), {}
        for name, shape in sorted(shapes.items()):
            row = stream.normal(shape)
            for weight, earlier in zip(
                self._column[1:], self._past, strict=False
            ):  # there are fewer before the first rows
                row -= weight * earlier[name]
            row /= self._column[0]
            found[name] = row
        return found
