"""A member's own memory of the rounds of a public order in which it took part.

The guarantee of a public order counts on how seldom a member takes part, so the member itself sees to it: it knows the order
and takes no other turn than its own, and it takes no turn twice. Whoever asks for one too early, or again, gets no
contribution.

The memory outlives the process: a record of every turn is in the file before `enter` returns, and reading starts at its first
record. A kill loses none. A power cut may lose the last ones, and then the ledger's charge of the round, which was on disk
before anybody was asked, says that it has begun: an interrupted round is not repeated.

    file: for each turn, the member and the round, as two little-endian integers of 4 bytes
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from privacy.errors import LedgerError, PrivacyError
from privacy.public_order import PublicOrder

_TURN = struct.Struct("<II")


class NotYourTurn(PrivacyError):  # noqa: N818 - what the member answers
    """A member was asked to take part in a round where its guarantee has no room for it."""


class Attendance:
    """The turns that members of this process have taken."""

    def __init__(self, order: PublicOrder) -> None:
        self._order = order
        self._taken: dict[int, int] = {}
        self._file: int | None = None

    def begin(self, path: Path | None) -> None:
        """Begin or resume a run whose memory is in that file; None for one that is gone with the process."""
        self.end()
        self._taken = {}
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            kept = path.read_bytes()
            os.ftruncate(self._file, len(kept) - len(kept) % _TURN.size)  # a record that a kill tore was never acted on
        except OSError as error:
            raise LedgerError(f"{path} keeps when clients took part, and cannot be used: {error}") from error
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

    def enter(self, member: int, round_: int) -> None:
        """Remember that the member takes part in this round. NotYourTurn unless that is its turn, and its first time."""
        last = self._taken.get(member)
        if not self._order.has_turn(member, round_):
            raise NotYourTurn(f"client {member} was asked to take part in round {round_ + 1}, which is not its turn")
        if last is not None and round_ - last < self._order.gap:
            raise NotYourTurn(
                f"client {member} was asked to take part in round {round_ + 1}, and took part in round {last + 1}: at least "
                f"{self._order.gap} rounds lie between its turns"
            )
        if self._file is not None:
            os.write(self._file, _TURN.pack(member, round_))
        self._taken[member] = round_
