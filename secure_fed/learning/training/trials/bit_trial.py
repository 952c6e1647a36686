"""Trials of the sizes that a pass may have: with which is each gradient bit-identical, whatever else is in the pass?

The result is a property of the model and of the shape of its passes, not of the examples in the trial.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secure_fed.activity import Activity, activity
from secure_fed.errors import ConfigError, ModelError

CANNOT = (ModelError, RuntimeError, ValueError)  # what a model raises that cannot compute a pass


def sizes_that_agree(
    gradients: Callable[[Sequence[Any]], Mapping[str, Tensor]],
    probe: Sequence[Any],
    candidates: Sequence[int],
    copied: int = 3,
) -> tuple[int, ...]:
    """The pass sizes with which every example's gradient is bit-identical, ascending; () if only passes of one agree.

    Passes of each size consist of the first examples, of the last examples in reverse, and of one example in every row, for up
    to `copied` examples, so that an example appears beside other examples and in another row. Each of these examples also
    appears beside fewer examples: in smaller passes; with a single candidate, in passes of half of them that are filled up with
    copies of one. If several sets of sizes agree, the largest set is returned. candidates: the sizes to try, up to
    `len(probe)`, ascending.
    """
    with activity("checking how many examples can share a pass", len(candidates)) as now:
        return _agreeing(gradients, probe, candidates, copied, now)


def _agreeing(
    gradients: Callable[[Sequence[Any]], Mapping[str, Tensor]],
    probe: Sequence[Any],
    candidates: Sequence[int],
    copied: int,
    now: Activity,
) -> tuple[int, ...]:
    agreeing: list[tuple[list[int], dict[int, bytes]]] = []
    for size in candidates:
        now.step()
        last = len(probe) - 1
        copies = [(one,) * size for one in (0, last // 2, last)[:copied]]
        halves = [] if len(candidates) > 1 else [_covering(range(at, size, 2), size)[0] for at in (0, 1) if at < size]
        passes = dict.fromkeys([tuple(range(size)), tuple(range(last, last - size, -1)), *copies, *map(tuple, halves)])
        own = _own(gradients, probe, list(passes))
        for sizes, known in agreeing if own else ():
            if any(known.get(i, digest) != digest for i, digest in own.items()):
                continue  # most sizes differ on a GPU: passes for the other examples would take long
            known |= _own(gradients, probe, _covering([i for i in own if i not in known], sizes[-1]))
            if all(known.get(i) == digest for i, digest in own.items()):
                sizes.append(size)
                break
        else:
            agreeing += [([size], own)] if own else []
    best = max((sizes for sizes, _ in agreeing), key=lambda sizes: (len(sizes), sizes[-1]), default=[1])
    return tuple(best) if best[-1] > 1 else ()


def _covering(places: Sequence[int], size: int) -> list[list[int]]:
    """Passes of this size that contain all of these examples; the last pass is filled up with its first example."""
    parts = [list(places[at : at + size]) for at in range(0, len(places), size)]
    return [part + part[:1] * (size - len(part)) for part in parts]


def _own(
    gradients: Callable[[Sequence[Any]], Mapping[str, Tensor]], probe: Sequence[Any], passes: Sequence[Sequence[int]]
) -> dict[int, bytes]:
    """A digest of each example's gradient, if it is the same in every row of these passes; otherwise {}.

    {} also if a pass draws random numbers, which could couple examples. ConfigError if memory lacks for a pass: the memory that
    other clients hold must not decide sizes, and so bits.
    """
    own, drawn = dict[int, bytes](), torch.get_rng_state()
    for rows in passes:
        try:
            found = gradients([probe[i] for i in rows]).values()
            flat = torch.cat([part.detach().flatten(1) for part in found], 1) + 0.0  # turns -0.0 into 0.0
        except torch.OutOfMemoryError as error:
            limit = f"{max(1, len(rows) // 2)} or less"
            raise ConfigError(
                f"a pass of {len(rows)} examples needs more memory than the device has: set training.microbatch to {limit}"
            ).about("training.microbatch", None, limit) from error
        except CANNOT:
            return {}
        if not torch.equal(torch.get_rng_state(), drawn):
            return {}
        digests = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in flat.cpu().numpy()]
        if any(own.setdefault(i, digest) != digest for i, digest in zip(rows, digests, strict=True)):
            return {}
    return own


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `most`."""
    steps = [2**power * part // 2 for power in range(most.bit_length()) for part in (2, 3)]
    return sorted({size for size in steps if size <= most} | {most})
