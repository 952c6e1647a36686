"""How the examples of a step, of all clients, are divided into passes.

    Tight    sorted by length, and cut where a pass holds enough tokens: next to nothing is spent on padding. Rounding goes by
             who shares a pass.
    Public   each example is padded to one of a few public widths, and a pass has one of the sizes for which a trial found
             every example's gradient to be the same to the bit whoever shares it. So the training of a client is a function of
             its own examples, whoever else was drawn, as the sensitivity of a sum of clipped contributions asks for.

Both give the examples of one client to passes in an order that depends on its own examples alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.cohort_pass import Found, Pack, Places, found_in
from secure_fed.learning.training.gradient_trial import moved_away, sizes_that_agree, still
from secure_fed.learning.training.kind_probe import Probing
from secure_fed.learning.training.kinds import Kinds, Padded
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.supported import mixes_experts
from secure_fed.learning.training.uncoupled import Uncoupled

Entry = tuple[int, Any]  # the number of an owner, a client or a unit, and one of its examples
Passes = Callable[[Sequence[Entry], Sequence[int]], Iterator[Found]]
"""Passes over entries, given the row of each owner's client: the gradients of all of them, by their owners' numbers."""


class Packing(Protocol):
    """A division of entries into passes."""

    def packs(self, entries: Sequence[Entry]) -> Iterator[Pack]:
        """The passes of these entries, which are ordered by client."""


@dataclass(frozen=True)
class Room:
    """What a pass has room for. rows: examples at most. parts: passes that a step makes at least, for cores to share."""

    tokens: int
    rows: int
    parts: int = 1

    @classmethod
    def of(cls, device: torch.device, numbers: int) -> Room:
        """numbers: of one client's moving tensors, of which a pass has a copy and a gradient for each example."""
        tokens, rows, memory, parts = (1536, 48, 2**25, 4) if device.type == "cpu" else (2**15, 2**12, 2**30, 1)
        return cls(tokens, max(1, min(rows, memory // max(1, numbers))), parts)

    def among(self, tokens: int) -> Room:
        """The room of each pass of a step that has so many tokens. It does not go by the cores that are there, nor do bits."""
        return replace(self, tokens=min(self.tokens, max(_WORTH_A_PASS, -(-tokens // self.parts)))) if tokens else self

    def of_width(self, width: int) -> int:
        """The examples of so many tokens that fit; width 0 is not known."""
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

    sizes: in examples, ascending. untried: a larger size, or 0 for none; item: the example it is to be tried with.
    """

    collate: Collate
    sizes: tuple[int, ...]
    untried: int = 0
    item: Any = None


class Public:
    """Passes of public shapes.

    The largest passes take most of a trial, so they are tried out when so many examples come. A gradient has the same bits
    before and after: they are taken only if they give the bits of the smaller ones, and a smaller one that turns out not to
    give every example its own is given up.
    """

    def __init__(
        self,
        objective: Objective,
        collate: Collate,
        room: Room,
        placed: Placed,
        known: Sequence[Any],
        uncoupled: Uncoupled | None = None,
    ) -> None:
        """placed: where some client stands, to try shapes out at. known: examples to try them on, where none can be made up.

        uncoupled: what examples of a kind have to be, if each of them is protected.
        """
        self._uncoupled = uncoupled
        self._objective, self._room, self._placed = objective, room, placed
        self._kinds = Kinds.of(objective, collate)
        self._probing = Probing(objective, self._kinds, placed, known)

    def packs(self, entries: Sequence[Entry]) -> Iterator[Pack]:
        by_kind: dict[Hashable, list[Entry]] = {}
        for entry in entries:
            by_kind.setdefault(self._kinds(entry[1]), []).append(entry)
        for kind in sorted(by_kind, key=repr):
            yield from self._of_kind(kind, by_kind[kind])

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
        """The shapes for so many examples of a kind and width; tried out the first time that they are wanted."""
        most = self._room.of_width(kind.work if isinstance(kind, Padded) else 0)
        key, ways = ("cohort", kind, most, self._placed.shapes), self._objective.ways
        if key not in ways:
            ways[key] = self._tried(kind, item, most)
        shapes: Shapes = ways[key]
        if shapes.untried and next_size((*shapes.sizes, shapes.untried), count, width) == shapes.untried:
            items = self._probing.of(kind, [shapes.item], most).items
            found = self._agreeing(items, shapes.collate, (*shapes.sizes, shapes.untried))
            same = found[:1] == shapes.sizes[:1]  # else the larger sizes agree on other bits
            shapes = ways[key] = Shapes(shapes.collate, found if same else shapes.sizes[:1])
        return shapes

    def _tried(self, kind: Hashable, item: Any, most: int) -> Shapes:
        if self._uncoupled:
            self._uncoupled.require(kind, self._placed, [item])
        small = tuple(sorted({1, min(2, most), min(3, most), max(1, most // 4)}))
        probe, collate = self._probing.of(kind, [item], small[-1]), self._kinds.together(kind)
        if mixes_experts(self._objective.model) or not probe.padded:
            return Shapes(self._kinds.collate, (1,))  # not to be tried out; or no positions for this width
        if self._agreeing(probe.items, collate, small) == small:
            return Shapes(collate, small, most if most > small[-1] else 0, item)
        items = self._probing.of(kind, [item], most).items
        return Shapes(collate, self._agreeing(items, collate, tuple(sorted({*small, most}))) or (1,))

    def _agreeing(self, probe: Sequence[Any], collate: Collate, candidates: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes among these, ascending, under which gradients are the same to the bit, as far as a trial tells."""
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
    """The size of the next pass: the one by which `left` examples of a width cost least, counting what fills passes up."""
    return min(reversed(sizes), key=lambda size: -(-left // size) * (size * width + _PER_PASS))


def _tokens(item: Any) -> int:
    return len(item["input_ids"]) if isinstance(item, Mapping) and "input_ids" in item else 0


_PER_PASS = 96  # what a pass costs beside its examples, in tokens
_WORTH_A_PASS = 128  # tokens
_UNKNOWN = 64  # tokens that an example is taken to have where that is not known
_PLACES = 4
