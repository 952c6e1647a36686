"""The noise of `correlation`, C^-1 Z, a row for each round.

With y_t the noise of round t, C (C^-1 Z) = Z says how a row follows from the band - 1 rows before it:

    y_t = (Z_t - sum_(j = 1 ... band - 1) c_j y_(t - j)) / c_0.

So memory and the time of a round are those of `band` rows. Rows are made again from the first one, of the same streams, where
those before are not at hand: in a process that goes on with a run. They are as secret as the keys of their streams.
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
    """Rows of C^-1 Z, where Z_t is the stream of round t from its beginning: the same whenever it is asked for.

    All rows are of the same shapes, drawn in the order of names, so that every number takes back its own earlier ones.
    """

    def __init__(self, correlation: Correlation, stream_of: Callable[[int], Stream]) -> None:
        self._column = correlation.column
        self._stream_of = stream_of
        self._past: deque[dict[str, Floats]] = deque(maxlen=correlation.band - 1)  # the latest first
        self._next = 0

    def noised(self, total: Named, std: float, round_: int) -> dict[str, Tensor]:
        """A round's total with its row, ready to be released. std: of Z, on each coordinate."""
        row = self.row(round_, {name: tuple(tensor.shape) for name, tensor in total.items()})
        stream = self._stream_of(round_)

        def noised(name: str, tensor: Tensor) -> Tensor:
            return perturbed(tensor, std, stream, lambda *_: row[name].copy())

        return {name: noised(name, tensor) for name, tensor in sorted(total.items())}

    def row(self, round_: int, shapes: Shapes) -> dict[str, Floats]:
        """y of that round; those of rounds that were left out are made on the way."""
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
