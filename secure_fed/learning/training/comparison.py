"""How many examples can share a pass: with which sizes has each of them the same bits, whatever else is in the pass?

One comparison a kind of examples, at its first use: two passes of the largest size, in one order and in the other, and as many
passes of each smaller size as show all of these examples. So each example is compared in another row, and in the company of
others and of few. If there is one size, it has two more passes, each with half of the examples among copies of one. The result
is a property of the model and of the shape of its passes, not of the examples in the comparison, if arithmetic depends on
shapes and not on values, as that of matrix products does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from secure_fed.errors import ConfigError
from secure_fed.learning.training.checksums import row_checksums
from secure_fed.learning.training.objective import CANNOT

Run = Callable[[list[Any]], Iterable[Tensor]]
"""The results of the items as one pass, (B, ...) each: row i is item i's own."""


def agreeing_sizes(run: Run, probe: Sequence[Any], candidates: Sequence[int]) -> tuple[int, ...]:
    """The sizes among `candidates`, ascending, that give every example the same bits; () if only passes of one do.

    They are the largest size that agrees with itself and with a smaller one, and the smaller ones that do; or else the least,
    if it agrees with itself. probe: as many examples as the largest candidate.
    """
    for at in range(len(candidates) - 1, -1, -1):
        size, known = candidates[at], dict[int, tuple[int, ...]]()
        every = list(range(size))
        if size == 1 or not _agree(run, probe, [every, every[::-1]], known):
            continue
        smaller = [one for one in candidates[:at] if _agree(run, probe, _covering(every, one), dict(known))]
        halves = [rows for start in (0, 1) for rows in _covering(every[start::2], size)]
        if smaller or (not at and _agree(run, probe, halves, known)):
            return (*smaller, size)
    return ()


def _covering(places: Sequence[int], size: int) -> list[list[int]]:
    """Passes of this size with all of these examples, backwards; the last is filled up with copies of its first."""
    parts = [list(places[at : at + size])[::-1] for at in range(0, len(places), size)]
    return [part[:1] * (size - len(part)) + part for part in parts]


def _agree(run: Run, probe: Sequence[Any], passes: Sequence[Sequence[int]], known: dict[int, tuple[int, ...]]) -> bool:
    return all(_agrees(run, probe, rows, known) for rows in passes)


def _agrees(run: Run, probe: Sequence[Any], rows: Sequence[int], known: dict[int, tuple[int, ...]]) -> bool:
    """Whether each row of a pass has the bits in `known`, to which new ones are added.

    False also if the pass draws random numbers, which could couple examples. ConfigError if memory lacks for a pass: the memory
    that other clients hold must not decide sizes, and so bits.
    """
    drawn = torch.get_rng_state()
    try:
        parts = [row_checksums(part.detach() + 0.0) for part in run([probe[i] for i in rows])]  # turns -0.0 into 0.0
    except torch.OutOfMemoryError as error:
        limit = f"{max(1, len(rows) // 2)} or less"
        raise ConfigError(
            f"a pass of {len(rows)} examples needs more memory than the device has: set training.microbatch to {limit}"
        ).about("training.microbatch", None, limit) from error
    except CANNOT:
        return False
    found = zip(rows, zip(*parts, strict=True), strict=True)
    return torch.equal(torch.get_rng_state(), drawn) and all(known.setdefault(i, bits) == bits for i, bits in found)
