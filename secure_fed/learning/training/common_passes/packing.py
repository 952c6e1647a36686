"""The division of a step's examples, of all clients, into passes.

    Tight    sorted by length, and cut when a pass is full: there is hardly any padding. Rounding depends on the other examples
             of a pass. With `apart`, clients share no pass, so it depends on a client's own examples alone.
    Public   each example is padded to one of a few public widths, and a pass has one of the sizes with which every example's
             gradient is bit-identical whatever the other examples of the pass (`pass_shapes`). So a client's training is a
             function of its own examples alone, as the sensitivity of a sum of clipped contributions requires.

In both, the order of one client's examples over the passes depends on its own examples alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secure_fed.activity import activity
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.data.rows import places_of
from secure_fed.learning.models.architecture import couples_examples
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.common_passes.passes import Found, Pack, Places, found_alone, found_in
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.pass_shapes import Kinds, Padded, agreeing_sizes
from secure_fed.learning.training.trials import agree, embedding_rows, moved_away, of_kind, same_losses, still

_PER_PASS = 96  # the overhead of a pass, in tokens
_WORTH_A_PASS = 128  # tokens
_LEAST, _MOST, _TOKENS_TIMES_MATRIX = 192, 1536, 1.2e8
_FEWEST = 512  # tokens of a pass of a large model, if no comparison limits it
_WORTH_COMPARING = 4  # examples: a pass of fewer saves less than their padding costs
_FILLED = 2**13  # tokens
_DEVIATIONS = 3  # standard deviations of a step's size for which a pass has room
_UNKNOWN = 64  # the assumed number of an example's tokens if it is unknown
_PLACES = 4
Entry = tuple[int, Any]  # the number of an owner, a client or a unit, and one of its examples
Work = tuple[Pack, list[int]]  # a pass, and the owner of each of its examples
Passes = Callable[[Sequence[Entry], Sequence[int]], Iterator[tuple[Found, list[int]]]]
"""(entries, the row of each owner's client) -> the gradients of all entries, and the owners of each pass's examples."""


@dataclass(frozen=True)
class Room:
    """The limits of a pass.

    tokens, rows, scores: the most tokens, examples, and scores of tokens (of a language model's vocabulary). words: the scores
    of one token; 0 if the model scores no tokens. parts: the fewest passes of a step, for many cores. filled: whether public
    passes have the largest size alone.
    """

    tokens: int
    rows: int
    parts: int = 1
    filled: bool = False
    words: int = 0
    scores: int = 2**29

    @classmethod
    def of(
        cls, device: torch.device, model: nn.Module, numbers: int, *, public: bool, expected: float = math.inf
    ) -> Room:
        """numbers: the size of one client's moving tensors; a pass has a copy and a gradient of them for each example.

        On a CPU a pass has so many tokens that its fixed cost, a millisecond for each matrix, is small beside their products;
        more take no less time for each token. public: whether passes have public shapes. On an accelerator most sizes give
        other bits, so all passes are filled up to one size, which should have room for most steps, and for little more.
        expected: the expected number of examples in a client's step, if it is public; the variance is at most as large.
        """
        words = embedding_rows(model, "output")
        if device.type == "cpu":
            # The size of the model's matrices without embeddings, a mean in which each number of theirs counts alike.
            embedded = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
            sizes = [one.numel() for one in model.parameters() if one.ndim == 2 and id(one) not in embedded]
            matrix = sum(size * size for size in sizes) / sum(sizes) if sizes else 1.0
            tokens = int(np.clip(_TOKENS_TIMES_MATRIX / matrix, _LEAST, _MOST))
            rows, memory = 48, 2**25
            return cls(
                tokens if public else max(tokens, _FEWEST), max(1, min(rows, memory // max(1, numbers))), 4, words=words
            )
        tokens, rows, memory = (_FILLED if public else 2**15), 2**12, 2**30
        if public:
            rows = int(min(rows, expected + _DEVIATIONS * math.sqrt(expected) + 1))
        return cls(tokens, max(1, min(rows, memory // max(1, numbers))), filled=public, words=words)

    @property
    def mixes(self) -> bool:
        """Whether clients should share passes also where that takes a comparison: if a pass has room for many texts."""
        return not self.filled and self.tokens > _MOST // 2

    def among(self, tokens: int) -> Room:
        """The limits of each pass of a step with `tokens` tokens. They, and so bits, do not depend on the number of cores."""
        least = _WORTH_A_PASS if self.mixes else _FEWEST
        return replace(self, tokens=min(self.tokens, max(least, -(-tokens // self.parts)))) if tokens else self

    def of_width(self, width: int, labelled: int | None = None) -> int:
        """The number of examples of `width` tokens that fit; width 0 means unknown.

        labelled: the scored tokens of an example; None for all of them.
        """
        scored = (width if labelled is None else labelled) * self.words
        fit = self.tokens // width if width else self.tokens // _UNKNOWN
        return max(1, min(self.rows, fit, self.scores // scored if scored else self.rows))


@dataclass(frozen=True)
class Tight:
    """Passes of examples of like length. apart: whether clients share none. packs: of entries ordered by client."""

    collate: Collate
    room: Room
    apart: bool = False

    def packs(self, entries: Sequence[Entry], clients: Sequence[int]) -> Iterator[Work]:
        for places in places_of(clients[owner] if self.apart else 0 for owner, _ in entries).values():
            some = sorted((entries[i] for i in places), key=lambda entry: _tokens(entry[1]), reverse=True)
            room = self.room if self.apart else self.room.among(sum(_tokens(item) for _, item in some))
            while some:
                scored = np.cumsum([room.words * labelled(item) for _, item in some[: room.rows]])
                fit = min(int((scored <= room.scores).sum()), room.of_width(_tokens(some[0][1]), 0))
                part = some[: max(1, fit)]
                some = some[len(part) :]
                owners = [clients[owner] for owner, _ in part]
                yield Pack(owners, [item for _, item in part], self.collate, len(part)), [owner for owner, _ in part]


class Public:
    """Passes of public shapes. On an accelerator, where they are filled, clients share none."""

    def __init__(
        self, objective: Objective, collate: Collate, room: Room, placed: Placed, *, alone: bool = False
    ) -> None:
        """placed: some client's tensors, for comparisons. alone: whether no two examples share a pass."""
        self._objective, self._room, self._placed = objective, room, placed
        self._kinds = Kinds.of(objective, collate)
        self._alone = alone or couples_examples(objective.model)

    def packs(self, entries: Sequence[Entry], clients: Sequence[int]) -> Iterator[Work]:
        by_kind: dict[tuple[str, int], list[Entry]] = {}
        kinds: dict[str, Hashable] = {}
        for owner, item in entries:
            kind = self._kinds(item)
            kinds.setdefault(repr(kind), kind)
            by_kind.setdefault((repr(kind), clients[owner] if self._room.filled else 0), []).append((owner, item))
        for name, client in sorted(by_kind):
            some = by_kind[name, client]
            if getattr(kinds[name], "read", False):  # the encoder reads new texts in passes of like lengths
                some = sorted(some, key=lambda entry: _tokens(entry[1]))
            yield from self._of_kind(kinds[name], some, clients)

    def _of_kind(self, kind: Hashable, entries: Sequence[Entry], clients: Sequence[int]) -> Iterator[Work]:
        width = kind.work if isinstance(kind, Padded) else _UNKNOWN
        (collate, sizes), at = self._shapes(kind, entries[0][1]), 0
        while at < len(entries):
            size = next_size(sizes, len(entries) - at, width)
            some = entries[at : at + size]
            at += len(some)
            filled = [*some, *[some[0]] * (size - len(some))]
            owners = [clients[owner] for owner, _ in filled]
            pack = Pack(owners, [item for _, item in filled], collate, len(some), each=sizes != (1,))
            yield pack, [owner for owner, _ in some]

    def _shapes(self, kind: Hashable, item: Any) -> tuple[Collate, tuple[int, ...]]:
        """The collate function for passes of a kind, and their sizes in examples, from a comparison at their first use.

        Sizes ascend; (1,) is each example by itself, unpadded. item: an example, for its columns.
        """
        if (most := self._most(kind)) == 1:
            return self._kinds.collate, (1,)
        candidates = (most,) if self._room.filled else tuple(sorted({2, max(2, most // 3), most}))
        kept, key = self._objective.kept, (repr(kind), candidates, self._placed.shapes, torch.get_num_threads())
        around = partial(self._objective.surroundings, self._kinds.collate, self._placed.tensors)
        sizes = kept.sizes(key, around, lambda: self._compared(kind, item, candidates))
        collate = self._kinds.collate if sizes == (1,) else self._kinds.together(kind)
        return collate, sizes

    def largest(self, items: Sequence[Any]) -> Iterator[Pack]:
        """The largest pass of each kind of these items, whatever comparisons show; they compute such a pass too."""
        kinds: dict[str, tuple[Hashable, Any]] = {}
        for item in items:
            kind = self._kinds(item)
            if repr(kind) not in kinds or _tokens(item) > _tokens(kinds[repr(kind)][1]):
                kinds[repr(kind)] = kind, item
        for kind, item in kinds.values():
            size = self._most(kind)
            collate = self._kinds.collate if size == 1 else self._kinds.together(kind)
            yield Pack([0] * size, [item] * size, collate, size, each=size > 1)

    def _most(self, kind: Hashable) -> int:
        """The most examples of a kind for which there is room; 1 where more are not allowed, or not worth a comparison."""
        most = self._room.of_width(kind.work if isinstance(kind, Padded) else 0)
        return 1 if self._alone or most < _WORTH_COMPARING else most

    def _compared(self, kind: Hashable, item: Any, candidates: tuple[int, ...]) -> tuple[int, ...]:
        objective, collate = self._objective, self._kinds.together(kind)
        probe = of_kind(objective, self._kinds, self._placed, kind, item, candidates[-1])
        if not probe:
            return (1,)
        away = [
            moved_away(self._placed, number) for number in range(1 if self._room.filled else min(len(probe), _PLACES))
        ]
        places = Places.of(away)

        def run(entries: list[Entry]) -> Iterable[Tensor]:
            owners, items = [own for own, _ in entries], [one for _, one in entries]
            found = found_in(objective, places, Pack(owners, items, collate, len(items), each=True))
            return [*found.gradients.values(), found.losses[:, None]]

        entries = [(number % len(away), one) for number, one in enumerate(probe)]
        with still(objective), activity("checking how many examples can share a pass"):
            sizes = agreeing_sizes(run, entries, candidates)
            if sizes:  # a rule that is wrong for this model is wrong in every pass
                own = found_alone(objective, away[0], probe[0], self._kinds.collate)
                *rows, loss = run([entries[0]] * sizes[-1])
                together = {name: row[:1] for name, row in zip(own.gradients, rows, strict=True)}
                right = agree(together, own.gradients, objective.tolerance) and same_losses(
                    loss[:1, 0], own.losses, objective.tolerance
                )
                return sizes if right else (1,)
        return (1,)


Packing = Tight | Public


def next_size(sizes: Sequence[int], left: int, width: int) -> int:
    """The size of the next pass: the size with which `left` examples of a width cost least, fillers included."""
    return min(reversed(sizes), key=lambda size: -(-left // size) * (size * width + _PER_PASS))


def _tokens(item: Any) -> int:
    return len(item["input_ids"]) if isinstance(item, Mapping) and "input_ids" in item else 0


def labelled(item: Any) -> int:
    """The tokens of a text that have a label; 0 where labels are not of tokens."""
    labels = np.asarray(item.get("labels", 0) if isinstance(item, Mapping) else 0)
    return int((labels != IGNORED).sum()) if labels.ndim == 1 else 0
