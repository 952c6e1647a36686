"""The server's side of masked sums (secure aggregation): `Summing` behind masks, from a cohort to the sum.

One pass of a round is one `Session` of `protocols` (Bonawitz et al., 2017; Bell et al., 2020, for the neighbours and the active
variant): its stages over the transport, from the first key to the unmasked sum.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from protocols import wire
from protocols.errors import Aborted, Misdealt, ProtocolError, Tampering
from protocols.parameters import Parameters
from protocols.server import Server as Unmasking
from secure_fed.errors import TrainingError
from secure_fed.rounds.masked.checks import require_plausible, require_plausible_release
from secure_fed.rounds.masked.encoding_plan import Encoding
from secure_fed.rounds.masked.terms import Terms
from secure_fed.rounds.sums import Clock, Intake, RoundLost, Spent
from secure_fed.rounds.transport import ContributorList, Request, Stage, Transport
from secure_fed.tensors.tensors import Layout, Tensors


@dataclass(frozen=True)
class Summed:
    """A `Summation` that is closed. losses: the mean loss, if the sum carried it."""

    tensors: Tensors
    weight: float
    count: int
    losses: list[float] = field(default_factory=list)

    def add(self, contribution: Tensors, weight: float = 1.0) -> None:
        raise TrainingError("a masked sum is closed: nothing can be added to it")

    def total(self) -> Tensors:
        return self.tensors


@dataclass
class MaskedSum:
    """Sums the contributions of a cohort. It stores the sum and never a contribution.

    clients: the number of participants. If coins draw the cohort, other clients fill it up to a public number (`Terms.invited`)
    and contribute zeros, so that neither the sum nor its existence depends on the size of the drawn cohort. barred: clients
    that dealt wrong shares, which are not invited again in this run. during: entered for each session, by its digest, and left
    when it ends, however it ends. loses_aborted: a session without a sum, or with one that honest clients cannot make, loses
    its round instead of ending the run.
    """

    terms: Terms
    clients: int
    clock: Clock
    device: torch.device
    during: Callable[[bytes], AbstractContextManager[object]] = nullcontext
    barred: set[int] = field(default_factory=set)
    loses_aborted: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def resumable(cls, terms: Terms, clients: int, clock: Clock, device: torch.device) -> MaskedSum:
        """For clients that outlive the server's process: no session number repeats, even after a restart."""
        numbers = itertools.count(secrets.randbits(62))
        return cls(terms, clients, clock, device, loses_aborted=True, _numbers=numbers)

    def gather(self, cohort: Sequence[int], request: Request, layout: Layout, transport: Transport) -> Intake:
        """The sum over the clients that stayed. RoundLost if a client dealt wrong shares, or vanished between passes."""
        encoding = self.terms.encoding(layout.size, request.clip_norm)
        session, before = self._session(cohort, request, encoding), self.clock.seconds
        try:
            with self.during(session.parameters.session):
                machine = session.run(transport)
            return self._intake(session, machine, encoding, layout)
        except Misdealt as error:
            self.barred.add(error.client)
            why = "a client dealt shares that do not fit what it published, and is left out from now on"
            raise session.lost(why, error.client) from error
        except (Aborted, Tampering) as error:
            if not self.loses_aborted:
                raise
            raise session.lost(str(error)) from error
        finally:
            session.spent.client_seconds = self.clock.seconds - before

    def _session(self, cohort: Sequence[int], request: Request, encoding: Encoding) -> Session:
        """A session of its own number. A later pass that masks alone protect must not lack a client of the first pass, since
        the two sums together would reveal that client's contribution.
        """
        terms, wanted = self.terms, frozenset(cohort) - self.barred
        contributors = ContributorList(request.digest, tuple(sorted(wanted))) if terms.declares else None
        digest = contributors.layout if contributors else bytes.fromhex(request.digest)
        invited = self._invited(sorted(wanted))
        return Session(
            terms.parameters(next(self._numbers), invited, digest, encoding.length, encoding.largest),
            wanted,
            request,
            terms.registry.public if terms.registry else {},
            contributors,
            whole=bool(request.first) and terms.protection.placement.masks_alone,
        )

    def _intake(self, session: Session, machine: Unmasking, encoding: Encoding, layout: Layout) -> Intake:
        spent, received = session.spent, [client for client in machine.survivors if client in session.wanted]
        with session.timed():
            total = self._read(machine, encoding, layout, len(received))
        spent.left_out, spent.survivors = len(received) - total.count, len(machine.survivors)
        if not self.terms.protection.placement.private and received and not total.weight:
            raise TrainingError(
                "no client of the cohort had an update that is finite and within secure_aggregation.range; lower training.lr, "
                "or federation.server_lr if the state they started from is to blame"
            )
        rejected, suspects = sorted(session.rejected), sorted(machine.suspects)
        return Intake(
            total, received, rejected, total.losses, spent.bytes_up, spent.bytes_down, spent=spent, suspects=suspects
        )

    def _read(self, machine: Unmasking, encoding: Encoding, layout: Layout, count: int) -> Summed:
        decoded = encoding.decode(machine.total())
        values = torch.from_numpy(decoded.values)
        # The server's noise is added in float64, and then the noised sum is checked.
        if not self.terms.protection.placement.server_noise:
            require_plausible(decoded, encoding, count)
            values = values.float()
        losses = [] if math.isnan(decoded.loss) else [decoded.loss]
        contributed = count if decoded.contributed is None else decoded.contributed
        return Summed(layout.unflatten(values.to(self.device)), decoded.weight, contributed, losses)

    def require_plausible(self, noised: Tensors, clip_norm: float, std: float) -> None:
        """Tampering if the noised sum is longer than the largest possible number of contributors can make it, or RoundLost if
        such a sum loses its round. The gathered sum's cost is in the record already.
        """
        try:
            require_plausible_release(noised, clip_norm, std, self.terms.places)
        except Tampering as error:
            if not self.loses_aborted:
                raise
            raise RoundLost(str(error), Spent(), []) from error

    def traffic(
        self, layout: Layout, request: Request, cohort: float, wire_size: Callable[[], int]
    ) -> tuple[float, float]:
        """Bytes of a sum to which `cohort` of the invited clients contribute and from which none vanishes."""
        encoding, invited = self.terms.encoding(layout.size, request.clip_norm), self.terms.invited
        traffic = wire.traffic(self.terms.parameters(0, range(invited), bytes(32), encoding.length, encoding.largest))
        up, down = (invited * sum(stage[way] for stage in traffic.values()) for way in (0, 1))
        listed = invited * ContributorList.bytes_of(cohort) if self.terms.declares else 0.0
        return up, down + listed + cohort * request.bytes_down

    def _invited(self, cohort: Sequence[int]) -> list[int]:
        """The clients invited to a sum: the cohort, filled up to a public number if its size is secret."""
        if not self.terms.varies:
            return sorted(cohort)
        left_out = self.barred.union(cohort)
        others = (client for client in range(self.clients) if client not in left_out)
        return sorted([*cohort, *itertools.islice(others, max(0, self.terms.invited - len(cohort)))])


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
