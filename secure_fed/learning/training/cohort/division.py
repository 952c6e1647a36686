"""The division of a step's examples, of all clients, into passes.

    Tight    sorted by length, and cut when a pass has enough tokens: there is hardly any padding. Rounding depends on the other
             examples of a pass.
    Public   each example is padded to one of a few public widths, and a pass has one of the sizes for which a trial found
             every example's gradient bit-identical whatever the other examples of the pass. So a client's training is a
             function of its own examples alone, as the sensitivity of a sum of clipped contributions requires.

In both, the order of one client's examples over the passes depends on its own examples alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.cohort.one_pass import Found, Pack, Places, found_in
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trials.bit_trial import sizes_that_agree
from secure_fed.learning.training.trials.gradient_trial import moved_away, still
from secure_fed.learning.training.trials.kind_probe import Probing
from secure_fed.learning.training.trials.kinds import Kinds, Padded
from secure_fed.learning.training.trials.supported import mixes_experts
from secure_fed.learning.training.trials.uncoupled import Uncoupled

Entry = tuple[int, Any]  # the number of an owner, a client or a unit, and one of its examples
Passes = Callable[[Sequence[Entry], Sequence[int]], Iterator[Found]]
"""(entries, the row of each owner's client) -> the gradients of all entries, with their owners' numbers."""


class Packing(Protocol):
    """A division of entries into passes."""

    def packs(self, entries: Sequence[Entry]) -> Iterator[Pack]:
        """The passes of these entries, which are ordered by client."""


@dataclass(frozen=True)
class Room:
    """The limits of a pass.

    tokens, rows: the most tokens and examples. parts: the fewest passes of a step, for many cores. filled: whether public
    passes have the largest size alone.
    """

    tokens: int
    rows: int
    parts: int = 1
    filled: bool = False

    @classmethod
    def of(cls, device: torch.device, numbers: int, *, public: bool, expected: float = math.inf) -> Room:
        """numbers: the size of one client's moving tensors; a pass has a copy and a gradient of them for each example.

        public: whether passes have public shapes. On an accelerator most sizes give other bits, so all passes are filled up to
        one size, which should have room for most steps, and for little more. expected: the expected number of examples in a
        client's step, if it is public; the variance is at most as large.
        """
        tokens, rows, memory, parts = (1536, 48, 2**25, 4) if device.type == "cpu" else (2**15, 2**12, 2**30, 1)
        filled = public and device.type != "cpu"
        if filled:
            tokens, rows = _FILLED, int(min(rows, expected + _DEVIATIONS * math.sqrt(expected) + 1))
        return cls(tokens, max(1, min(rows, memory // max(1, numbers))), parts, filled)

    def among(self, tokens: int) -> Room:
        """The limits of each pass of a step with `tokens` tokens. They, and so bits, do not depend on the number of cores."""
        return replace(self, tokens=min(self.tokens, max(_WORTH_A_PASS, -(-tokens // self.parts)))) if tokens else self

    def of_width(self, width: int) -> int:
        """The number of examples of `width` tokens that fit; width 0 means unknown."""
        return max(1, min(self.rows, self.tokens // width if width else self.tokens // _UNKNOWN))


@dataclass(frozen=True)
class Tight:
    """Passes of examples of like length."""

    collate: Collate
    room: Room

    def packs(self, entries: Sequence[Entry]) -> Iterator[Pack]:
        by_length = sorted(entries, key=lambda entry: _tokens(entry[1]), reverse=True)
        room, at = self.room.among(sum(_tokens(item) for _, item in entries)), 0
        while at < len(by_length):
            some = by_length[at : at + room.of_width(_tokens(by_length[at][1]))]
            at += len(some)
            yield Pack([owner for owner, _ in some], [item for _, item in some], self.collate, len(some))


@dataclass(frozen=True)
class Shapes:
    """The shapes that passes of a kind may have.

    sizes: in examples, ascending. untried: a larger size without a trial so far, or 0; item: the example for its trial.
    """

    collate: Collate
    sizes: tuple[int, ...]
    untried: int = 0
    item: Any = None


class Public:
    """Passes of public shapes.

    The largest passes take most of the time of a trial, so their trial waits until enough examples come. A gradient has the
    same bits before and after: the largest size is used only if it gives the bits of the smaller sizes, and a smaller size that
    fails this trial is given up. If passes are filled (`Room`), only the largest size is tried.
    """

    def __init__(
        self,
        objective: Objective,
        collate: Collate,
        room: Room,
        placed: Placed,
        uncoupled: Uncoupled | None = None,
    ) -> None:
        """placed: some client's tensors, for trials of shapes.

        uncoupled: the requirement on examples of a kind, if each of them is protected.
        """
        self._uncoupled = uncoupled
        self._objective, self._room, self._placed = objective, room, placed
        self._kinds = Kinds.of(objective, collate)
        self._probing = Probing(objective, self._kinds, placed)

    def packs(self, entries: Sequence[Entry]) -> Iterator[Pack]:
        by_kind: dict[Hashable, list[Entry]] = {}
        for entry in entries:
            by_kind.setdefault(self._kinds(entry[1]), []).append(entry)
        for kind in sorted(by_kind, key=repr):
            some = by_kind[kind]
            if isinstance(kind, Padded) and kind.read:  # the encoder reads new texts in passes of like lengths
                some = sorted(some, key=lambda entry: _tokens(entry[1]))
            yield from self._of_kind(kind, some)

    def _of_kind(self, kind: Hashable, entries: Sequence[Entry]) -> Iterator[Pack]:
        width = kind.work if isinstance(kind, Padded) else _UNKNOWN
        shapes, at = self._shapes(kind, entries[0][1], len(entries), width), 0
        while at < len(entries):
            size = next_size(shapes.sizes, len(entries) - at, width)
            some = entries[at : at + size]
            at += len(some)
            filled = [*some, *[some[0]] * (size - len(some))]
            yield Pack([one for one, _ in filled], [item for _, item in filled], shapes.collate, len(some), apart=True)

    def _shapes(self, kind: Hashable, item: Any, count: int, width: int) -> Shapes:
        """The shapes for `count` examples of a kind and width, from a trial at their first use."""
        most = self._room.of_width(kind.work if isinstance(kind, Padded) else 0)
        key, ways = ("cohort", kind, most, self._placed.shapes), self._objective.ways
        if key not in ways:
            ways[key] = self._tried(kind, item, most)
        shapes: Shapes = ways[key]
        if shapes.untried and next_size((*shapes.sizes, shapes.untried), count, width) == shapes.untried:
            found = self._agreeing(
                self._probe(kind, shapes.item, most), shapes.collate, (*shapes.sizes, shapes.untried)
            )
            same = found[:1] == shapes.sizes[:1]  # else the larger sizes agree on other bits
            shapes = ways[key] = Shapes(shapes.collate, found if same else shapes.sizes[:1])
        return shapes

    def _tried(self, kind: Hashable, item: Any, most: int) -> Shapes:
        if self._uncoupled:
            self._uncoupled.require(kind, self._placed, [item])
        small = (most,) if self._room.filled else tuple(sorted({1, min(2, most), min(3, most), max(1, most // 4)}))
        probe, collate = self._probing.of(kind, item, small[-1]), self._kinds.together(kind)
        # Nothing to try; no positions for this width; no trial for experts.
        if probe is None or not probe.padded or mixes_experts(self._objective.model):
            return Shapes(self._kinds.collate, (1,))
        if self._agreeing(probe.items, collate, small) == small:
            return Shapes(collate, small, most if most > small[-1] else 0, item)
        if self._room.filled:
            return Shapes(collate, (1,))
        sizes = self._agreeing(self._probe(kind, item, most), collate, tuple(sorted({*small, most})))
        return Shapes(collate, sizes or (1,))

    def _probe(self, kind: Hashable, item: Any, count: int) -> list[Any]:
        probe = self._probing.of(kind, item, count)
        return probe.items if probe else []

    def _agreeing(self, probe: Sequence[Any], collate: Collate, candidates: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes among `candidates`, ascending, with which gradients are bit-identical in a trial."""
        away = [moved_away(self._placed, number) for number in range(min(len(probe), _PLACES))]
        places = Places.of(away)

        def gradients(entries: Sequence[Entry]) -> Mapping[str, Tensor]:
            pack = Pack([own for own, _ in entries], [one for _, one in entries], collate, len(entries), apart=True)
            found = found_in(self._objective, places, pack)
            return {"gradient": found.gradients, "loss": found.losses[:, None]}

        entries = [(number % len(away), one) for number, one in enumerate(probe)]
        with still(self._objective, lambda: gradients(entries[:1])["loss"]):
            return sizes_that_agree(gradients, entries, candidates)


def next_size(sizes: Sequence[int], left: int, width: int) -> int:
    """The size of the next pass: the size with which `left` examples of a width cost least, fillers included."""
    return min(reversed(sizes), key=lambda size: -(-left // size) * (size * width + _PER_PASS))


def _tokens(item: Any) -> int:
    return len(item["input_ids"]) if isinstance(item, Mapping) and "input_ids" in item else 0


_PER_PASS = 96  # the overhead of a pass, in tokens
_WORTH_A_PASS = 128  # tokens
_FILLED = 2**13  # tokens
_DEVIATIONS = 3  # standard deviations of a step's size for which a pass has room
_UNKNOWN = 64  # the assumed number of an example's tokens if it is unknown
_PLACES = 4
