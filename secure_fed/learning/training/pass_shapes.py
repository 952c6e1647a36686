"""The shapes of the passes that may compute an example: its kind, and how many examples of a kind can share a pass.

Matrix products of another shape are summed in another order, so padding and batch size change a gradient by its rounding: by
about a millionth in float32, by percents in bfloat16. If they depended on the other drawn examples, adding one example would
change the gradients of others. So the example alone determines its kind, and only examples of one kind share a pass:

    collate functions with `padded_to` (all of ours)   texts are padded to the next longer of a few public widths, since models
                                                       drop the attention mask if nothing in the batch is masked, and then use
                                                       other kernels. Texts of the greatest length are a separate kind,
                                                       without padding. An accelerator has fewer widths, since a pass costs
                                                       more there than padding.
    any other collate function                         examples are of one kind if their batches of one have the same shapes

For a model that reads each text once (`read_once`), passes compute only the layers after the encoder, with one shape for texts
of all lengths: with a collate function that has `padded_to`, texts are of one kind.

A comparison shows with which sizes of a pass each example has the same bits, whatever else is in the pass (`agreeing_sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning.tasks.task import Batch, Collate
from secure_fed.learning.training.objective import CANNOT, Objective, row_checksums

_AFTERWARDS = 32  # tokens: passes of examples with kept means are as large as passes of short texts


@dataclass(frozen=True)
class Padded:
    """Texts of more than `above` and at most `width` tokens, padded to `width`.

    full: none of the tokens is padding. read: the model reads each text once (`read_once`).
    """

    width: int
    above: int
    full: bool
    read: bool = False

    @property
    def work(self) -> int:
        """The cost of an example in a pass, in tokens."""
        return min(_AFTERWARDS, self.width) if self.read else self.width


@dataclass(frozen=True)
class Kinds:
    """The kinds of the examples that `collate` takes.

    longest, reads_once: as in `Objective`. apart: the least difference between two widths: 8 on a CPU, 32 elsewhere.
    """

    collate: Collate
    longest: int | None = None
    reads_once: bool = False
    apart: int = 8

    @classmethod
    def of(cls, objective: Objective, collate: Collate) -> Kinds:
        """The kinds of an objective's examples."""
        return cls(collate, objective.longest, objective.reads_once, 8 if objective.device.type == "cpu" else 32)

    def padded(self, tokens: int, *, shown: bool = True) -> Padded:
        """The kind of a text of `tokens` tokens. shown: whether no token is masked."""
        longest = self.longest
        width, above = _width(tokens + 1, self.apart)  # with padding: without any a model may use another kernel
        above = max(0, above - 1)
        if longest is not None and width > longest:
            width, above = (longest, above) if tokens < longest else (tokens, tokens - 1)
        return Padded(width, above, tokens == width and shown)

    def __call__(self, item: Any) -> Hashable:
        if not hasattr(self.collate, "padded_to") or not isinstance(item, Mapping) or "input_ids" not in item:
            return _shapes(self.collate([item]), 1)
        if self.reads_once and self.longest is not None and len(item["input_ids"]) <= self.longest:
            return Padded(self.longest, above=0, full=False, read=True)
        shown = bool(np.all(np.asarray(item["attention_mask"]))) if "attention_mask" in item else True
        return self.padded(len(item["input_ids"]), shown=shown)

    def together(self, kind: Hashable) -> Collate:
        """The collate function for examples of this kind. It raises ModelError for batches of other shapes than the kind's."""
        if isinstance(kind, Padded):
            padded: Collate = self.collate.padded_to(kind.width)  # type: ignore[attr-defined]  # `__call__` asked for it
            return padded

        def collated(items: Any) -> Batch:
            batch = self.collate(items)
            if _shapes(batch, len(items)) != kind:
                raise ModelError(
                    "a batch of examples that have the same shapes alone has another shape, so an example's arithmetic would "
                    "depend on which others were drawn; give a collate that makes tensors with the examples along the first "
                    "dimension, or set training.microbatch to 1"
                )
            return batch

        return collated


def length(item: Any) -> int:
    """The number of an example's unmasked tokens; 0 if it is unknown."""
    if not isinstance(item, Mapping) or "input_ids" not in item:
        return 0
    return int(np.sum(np.asarray(item["attention_mask"]))) if "attention_mask" in item else len(item["input_ids"])


def _width(tokens: int, apart: int) -> tuple[int, int]:
    """The smallest public width of at least `tokens` tokens, and the next smaller width.

    With widths at least 8 apart they are 8, 16, ..., 64, and from there four for every doubling: 80, 96, 112, 128, 160, ...
    """
    step = max(apart, 8 if tokens <= 64 else 1 << ((tokens - 1).bit_length() - 3))
    width = -(-tokens // step) * step
    return width, width - step


def _shapes(batch: Batch, count: int) -> Hashable:
    """The shapes in a batch, without the dimension of its `count` examples."""
    if isinstance(batch, Tensor):
        whole = batch.ndim and len(batch) == count
        return (tuple(batch.shape[1:]) if whole else ("whole", *batch.shape), str(batch.dtype))
    if isinstance(batch, Mapping):
        return tuple(
            (name, _shapes(value, count)) for name, value in sorted(batch.items(), key=lambda entry: str(entry[0]))
        )
    if isinstance(batch, list | tuple):
        # Of a list with an entry for each example, the type alone; `default_collate` makes lists of a batch's fields of tuples.
        fields = all(isinstance(value, Tensor) and value.ndim and len(value) == count for value in batch)
        if isinstance(batch, tuple) or fields or len(batch) != count:
            return tuple(_shapes(value, count) for value in batch)
    return type(batch).__name__


Run = Callable[[list[Any]], Iterable[Tensor]]
"""The results of the items as one pass, (B, ...) each: row i is item i's own."""


def agreeing_sizes(run: Run, probe: Sequence[Any], candidates: Sequence[int]) -> tuple[int, ...]:
    """The sizes among `candidates`, ascending, that give every example the same bits; () if only passes of one do.

    One comparison a kind of examples, at its first use: two passes of the largest size, in one order and in the other, and as
    many passes of each smaller size as show all of these examples. So each example is compared in another row, and in the
    company of others and of few. If there is one size, it has two more passes, each with half of the examples among copies of
    one. The result is a property of the model and of the shape of its passes, not of the examples in the comparison, if
    arithmetic depends on shapes and not on values, as that of matrix products does.

    The result is the largest size that agrees with itself and with a smaller one, and the smaller ones that do; or else the
    least, if it agrees with itself. probe: as many examples as the largest candidate.
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
