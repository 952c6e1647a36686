"""The server's side of a masked sum, one pass from the first key to the sum of its contributions."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from protocols import costs
from protocols.errors import Aborted, Misdealt, ProtocolError
from protocols.parameters import Parameters
from protocols.server import Server as Unmasking
from secure_fed.errors import TrainingError
from secure_fed.rounds.masked.bound import masks_alone
from secure_fed.rounds.masked.encoding import Carrier
from secure_fed.rounds.masked.masked_client import Clock
from secure_fed.rounds.masked.plausible import require_plausible, require_plausible_release
from secure_fed.rounds.masked.terms import Terms
from secure_fed.rounds.record import Spent
from secure_fed.rounds.summing import Intake, RoundLost
from secure_fed.rounds.transport import Asked, Request, Stage, Transport
from secure_fed.tensors.tensors import Layout, Tensors


@dataclass(frozen=True)
class Summed:
    """`Summation` of a sum that is closed. losses: the mean one, if it was in the sum."""

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
    """Turns the contributions of a cohort into their sum, which is all that this object ever holds of them.

    clients: how many there are in all. Where coins draw the cohort, others make up a public number (`Terms.invited`) and
    contribute zeros: neither the sum nor whether there is one depends on how many the coins drew. barred: who dealt shares that
    do not fit, and is invited no more in this run.
    """

    terms: Terms
    clients: int
    clock: Clock
    device: torch.device
    barred: set[int] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def gather(self, asked: Sequence[int], request: Request, layout: Layout, transport: Transport) -> Intake:
        """The sum over those of `asked` that stayed. RoundLost if a client's shares do not fit, or a later pass lacks one."""
        spent, rejected, before = Spent(), set[int](), self.clock.seconds
        try:
            return self._gathered(
                [one for one in asked if one not in self.barred], request, layout, transport, spent, rejected
            )
        except Misdealt as error:
            self.barred.add(error.client)
            raise RoundLost(
                "a client dealt shares that do not fit what it published, and is left out from now on",
                spent,
                list(rejected),
                error.client,
            ) from error
        finally:
            spent.client_seconds = self.clock.seconds - before

    def _gathered(
        self,
        asked: Sequence[int],
        request: Request,
        layout: Layout,
        transport: Transport,
        spent: Spent,
        rejected: set[int],
    ) -> Intake:
        wanted, invited = set(asked), self._invited(asked)
        carrier = self.terms.carrier(layout.size, request.clip_norm)
        contribute = Asked(request.digest, tuple(sorted(wanted))) if self.terms.declares else None
        digest = contribute.layout if contribute else bytes.fromhex(request.digest)
        parameters = self.terms.parameters(next(self._numbers), invited, digest, carrier.length, carrier.largest)
        with _advised():
            machine = self._run(parameters, wanted, contribute, request, transport, spent, rejected)
        started = time.perf_counter()
        received = [client for client in machine.survivors if client in wanted]
        total = self._read(machine, carrier, layout, len(received))
        spent.left_out = len(received) - total.count
        spent.server_seconds += time.perf_counter() - started
        spent.survivors = len(machine.survivors)
        if not self.terms.protection.placement.private and received and not total.weight:
            raise TrainingError(
                "no client of the cohort had an update that is finite and within secure_aggregation.range; lower training.lr, "
                "or federation.server_lr if the state they started from is to blame"
            )
        return Intake(
            total,
            received,
            sorted(rejected),
            total.losses,
            spent.bytes_up,
            spent.bytes_down,
            spent,
            sorted(machine.suspects),
        )

    def _require_all(
        self, there: set[int], wanted: set[int], request: Request, spent: Spent, rejected: set[int]
    ) -> None:
        """RoundLost where a later pass lacks a client of the first: the two sums would tell that client's contribution."""
        if request.first and masks_alone(self.terms.protection) and (missing := wanted - there):
            raise RoundLost(
                f"{len(missing)} of {len(wanted)} clients vanished between two passes of the round, and a sum over the others "
                "would tell their contributions",
                spent,
                list(rejected),
            )

    def _read(self, machine: Unmasking, carrier: Carrier, layout: Layout, count: int) -> Summed:
        said = carrier.read(machine.total())
        values = torch.from_numpy(said.values)
        if (
            not self.terms.protection.placement.server_noise
        ):  # else they stay float64, and are judged under the server's noise
            require_plausible(said, carrier, count)
            values = values.float()
        losses = [] if math.isnan(said.loss) else [said.loss]
        told = count if said.contributed is None else said.contributed
        return Summed(layout.unflatten(values.to(self.device)), said.weight, told, losses)

    def require_plausible(self, noised: Tensors, clip_norm: float, std: float) -> None:
        """Tampering if the noised sum is longer than the most contributors that a sum can have make it."""
        require_plausible_release(noised, clip_norm, std, self.terms.places)

    def traffic(
        self, layout: Layout, request: Request, cohort: float, wire_size: Callable[[], int]
    ) -> tuple[float, float]:
        """Bytes of a sum to which `cohort` of the invited clients contribute and from which none vanishes."""
        carrier, invited = self.terms.carrier(layout.size, request.clip_norm), self.terms.invited
        traffic = costs.traffic(self.terms.parameters(0, range(invited), bytes(32), carrier.length, carrier.largest))
        up, down = (invited * sum(stage[way] for stage in traffic.values()) for way in (0, 1))
        listed = invited * Asked.bytes_of(cohort) if self.terms.declares else 0.0
        return up, down + listed + cohort * request.bytes_down

    def _run(
        self,
        parameters: Parameters,
        asked: set[int],
        contribute: Asked | None,
        request: Request,
        transport: Transport,
        spent: Spent,
        rejected: set[int],
    ) -> Unmasking:
        """One session to its end."""
        machine = Unmasking(parameters, identities=self.terms.registry.public if self.terms.registry else {})
        messages: Mapping[int, bytes] = dict.fromkeys(parameters.clients, b"")
        while machine.stage != "done":
            name = machine.stage
            stages = {
                client: Stage(
                    request.round,
                    name,
                    parameters,
                    message,
                    request if name == "mask" and client in asked else None,
                    contribute if name == "mask" else None,
                )
                for client, message in messages.items()
            }
            spent.bytes_down += sum(stage.bytes_down for stage in stages.values())
            for staged in transport.exchange(stages):
                started = time.perf_counter()
                spent.bytes_up += len(staged.message)
                try:
                    machine.receive(staged.client, staged.message)
                except ProtocolError:  # whoever sends what is no answer is left out, as if it had vanished
                    rejected.add(staged.client)
                spent.server_seconds += time.perf_counter() - started
            started = time.perf_counter()
            messages = machine.close()
            spent.server_seconds += time.perf_counter() - started
            if name not in ("consistency", "unmask"):  # from here on, who vanishes stays in the sum
                self._require_all(asked.intersection(messages), asked, request, spent, rejected)
        return machine

    def _invited(self, asked: Sequence[int]) -> list[int]:
        """Those asked; where their number is secret, others fill it up to what the terms are."""
        if not self.terms.varies:
            return sorted(asked)
        left_out = self.barred.union(asked)
        others = (client for client in range(self.clients) if client not in left_out)
        return sorted([*asked, *itertools.islice(others, max(0, self.terms.invited - len(asked)))])


@contextmanager
def _advised() -> Iterator[None]:
    """An abort, with the settings that say how many may be missing."""
    try:
        yield
    except Aborted as error:
        advice = f"{error.what} (secure_aggregation.dropout says how many may vanish)"
        raise Aborted(advice, who=error.who, stage=error.stage, protected=error.protected) from error
