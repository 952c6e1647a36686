"""A member's own record of the rounds of a public order in which it took part.

The guarantee of a public order relies on how seldom a member takes part, so the member enforces this itself: it knows the order
and the number of rounds, takes only its own turns, and takes no turn twice. A request for a turn that is too early, repeated,
or after the last round gets no contribution.

The record outlives the process: every turn is in the file before `enter` returns, and reading starts at the first turn. A kill
loses none. In a simulation a power cut may lose the last ones; the ledger's charge of the round, which was on disk before any
member was asked to take part, then shows that the round had begun, and an interrupted round is not repeated. On a machine of
its own a member has no such charge, so each turn is synchronised (`durable`).

    file: for each turn, the member and the round, as two little-endian integers of 4 bytes
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from privacy.errors import LedgerError, PrivacyError
from privacy.public_order import PublicOrder

_TURN = struct.Struct("<II")


class NotYourTurn(PrivacyError):  # noqa: N818 - the member's answer
    """A member was asked to take part in a round that its guarantee does not allow."""


class Attendance:
    """The turns that members of this process have taken, in a run of `rounds` rounds."""

    def __init__(self, order: PublicOrder, rounds: int) -> None:
        self._order = order
        self._rounds = rounds
        self._taken: dict[int, int] = {}
        self._file: int | None = None
        self._durable = False
        self._entered: Callable[[int], None] | None = None

    def begin(
        self,
        path: Path | None,
        *,
        begun: bool = False,
        durable: bool = False,
        entered: Callable[[int], None] | None = None,
    ) -> None:
        """Begin or resume a run with its record in `path`; with None the record is lost when the process ends.

        begun: a round of the run has been charged, so that LedgerError is raised where there is no record. durable: every turn
        is on disk before `enter` returns, for a member on a machine of its own. entered: called with the round once its turn is
        on disk, and before `enter` returns.
        """
        self.end()
        self._taken, self._durable, self._entered = {}, durable, entered
        if path is None:
            return
        if begun and not path.exists():
            raise LedgerError(
                f"{path}, the record of which client took part when, is missing, and the run has begun rounds: restore it, or "
                "start a new run"
            )
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            kept = path.read_bytes()
            os.ftruncate(self._file, len(kept) - len(kept) % _TURN.size)  # a record that a kill tore was never acted on
        except OSError as error:
            raise LedgerError(f"{path}, the record of which client took part when, cannot be used: {error}") from error
        for member, round_ in _TURN.iter_unpack(kept[: len(kept) - len(kept) % _TURN.size]):
            self._taken[member] = max(round_, self._taken.get(member, 0))

    def end(self) -> None:
        """Make all turns durable against a power cut too, and close the file."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def last(self, member: int) -> int | None:
        """The last round that this member took part in."""
        return self._taken.get(member)

    def admits(self, member: int, round_: int) -> bool:
        """Whether this round is the member's turn and its last turn was at least `gap` rounds earlier."""
        last = self._taken.get(member)
        own = 0 <= round_ < self._rounds and self._order.has_turn(member, round_)
        return own and (last is None or round_ - last >= self._order.gap)

    def enter(self, member: int, round_: int) -> None:
        """Record that the member takes part in this round. NotYourTurn unless `admits`."""
        if not self.admits(member, round_):
            last = self._taken.get(member)
            taken = "" if last is None else f"; it took part in round {last + 1}"
            raise NotYourTurn(
                f"client {member} cannot take part in round {round_ + 1}: the public order of {self._rounds} rounds gives it "
                f"no turn then, or its turn is over{taken}"
            )
        if self._file is not None:
            self._note(self._file, _TURN.pack(member, round_))
        self._taken[member] = round_
        if self._entered is not None:
            self._entered(round_)

    def _note(self, file: int, record: bytes) -> None:
        try:
            whole = os.fstat(file).st_size
            if os.write(file, record) == len(record):
                if self._durable:
                    os.fsync(file)
                return
            why = "the disk is full"
            os.ftruncate(file, whole)  # a partial record left here would garble all later ones on the next read
        except OSError as error:
            why = str(error)
        raise LedgerError(f"a client's turn could not be recorded, so it does not take part: {why}")
