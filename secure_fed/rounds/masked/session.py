"""The server's side of one session of the protocol: its stages over the transport, from the first key to the unmasked sum."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from protocols.errors import Aborted, ProtocolError
from protocols.parameters import Parameters
from protocols.server import Server as Unmasking
from secure_fed.rounds.record import Spent
from secure_fed.rounds.summing import RoundLost
from secure_fed.rounds.transport import ContributorList, Request, Stage, Transport


@contextmanager
def _advised() -> Iterator[None]:
    """Add to an abort's message the setting for the number of clients that may vanish."""
    try:
        yield
    except Aborted as error:
        advice = f"{error.what} (secure_aggregation.dropout says how many may vanish)"
        raise Aborted(advice, who=error.who, stage=error.stage, protected=error.protected) from error


@dataclass
class Session:
    """One session. It runs once.

    wanted: the clients that contribute; the other invited ones send zeros. identities: their public keys, where the protocol
    checks signatures. contributors: the list of `wanted`, where clients are told. whole: losing one of `wanted` before the sum
    is fixed loses the round. spent, rejected: what the session cost, and the clients whose messages were invalid, also where
    it fails.
    """

    parameters: Parameters
    wanted: frozenset[int]
    request: Request
    identities: Mapping[int, bytes] = field(default_factory=dict)
    contributors: ContributorList | None = None
    whole: bool = False
    spent: Spent = field(default_factory=Spent)
    rejected: set[int] = field(default_factory=set)

    @_advised()
    def run(self, transport: Transport) -> Unmasking:
        """The finished protocol, which holds the sum. `Aborted`, `Misdealt` or `Tampering` by the protocol, or RoundLost."""
        machine = Unmasking(self.parameters, identities=self.identities)
        messages: Mapping[int, bytes] = dict.fromkeys(self.parameters.clients, b"")
        while (name := machine.stage) != "done":
            stages = {client: self._stage(name, client, message) for client, message in messages.items()}
            self.spent.bytes_down += sum(stage.bytes_down for stage in stages.values())
            for staged in transport.exchange(stages):
                with self.timed():
                    self._receive(machine, staged.client, staged.message)
            with self.timed():
                messages = machine.close()
            if name not in ("consistency", "unmask"):  # a client that vanishes later stays in the sum
                self._require_whole(messages)
        return machine

    def lost(self, why: str, dealer: int | None = None) -> RoundLost:
        """The end of a session without a usable sum."""
        return RoundLost(why, self.spent, list(self.rejected), dealer)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time inside as the server's."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent.server_seconds += time.perf_counter() - started

    def _stage(self, name: str, client: int, message: bytes) -> Stage:
        """A client's stage. With the stage that masks, contributors get the request, and everybody their list."""
        masks = name == "mask"
        request = self.request if masks and client in self.wanted else None
        contributors = self.contributors if masks else None
        return Stage(self.request.round, name, self.parameters, message, request, contributors)

    def _receive(self, machine: Unmasking, client: int, message: bytes) -> None:
        """Pass a message to the protocol. A client with an invalid message is treated as vanished."""
        self.spent.bytes_up += len(message)
        try:
            machine.receive(client, message)
        except ProtocolError:
            self.rejected.add(client)

    def _require_whole(self, there: Mapping[int, bytes]) -> None:
        if self.whole and (missing := self.wanted - there.keys()):
            raise self.lost(
                f"{len(missing)} of {len(self.wanted)} clients vanished between two passes of the round, and a sum over the "
                "others would reveal their contributions"
            )
