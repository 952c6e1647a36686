"""Summing the contributions of one pass: what a sum is, what the server learns beside it, and what it costs.

`Summing` has two implementations: `OpenSum` adds contributions as they arrive, `masked.server.MaskedSum` sums them behind
masks (secure aggregation). The server uses either without knowing which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from secure_fed.config import FederationConfig
from secure_fed.errors import TrainingError
from secure_fed.rounds.transport import Reply, Request, Transport
from secure_fed.tensors.sums import MEDIAN, NotFiniteError, PlainSum, Summation, TrimmedSum
from secure_fed.tensors.tensors import Layout, Tensors

Record = dict[str, Any]  # of a round, as it is stored and reported


@dataclass
class Spent:
    """The cost of masked sums: bytes of the protocol, models and masked vectors included, and seconds on either side.

    survivors: clients in the sum. left_out: clients among them that sent zeros because their contribution was not finite or
    out of range, 0 where the encoding does not count them.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    client_seconds: float = 0.0
    server_seconds: float = 0.0
    survivors: int = 0
    left_out: int = 0

    @staticmethod
    def together(passes: Sequence[Spent]) -> Record:
        """The cost of all passes of a round. `survivors` is the smallest number in any pass that had a sum."""
        added = {name: sum(getattr(one, name) for one in passes) for name in vars(passes[0])}
        return added | {"survivors": min((one.survivors for one in passes if one.survivors), default=None)}


@dataclass
class Clock:
    """Seconds that the clients of this process have spent on the protocol, training apart."""

    seconds: float = 0.0


@dataclass
class Intake:
    """The result of one pass: the sum, and what the server learned beside it.

    received: participants whose contribution is in the sum. rejected: clients whose contribution or message was refused.
    losses: mean local training losses. spent: the cost of secure aggregation, None without masks. suspects: clients that opened
    wrong shares in it. of_dummies: the sum of dummies beside it, who are in `received` too; None without any.
    """

    total: Summation
    received: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    spent: Spent | None = None
    suspects: list[int] = field(default_factory=list)
    of_dummies: Tensors | None = None


class RoundLost(TrainingError):  # noqa: N818 - the way a round ended
    """There is no sum, and the run can go on without this round. dealer: the client that is left out from now on, if known."""

    def __init__(self, why: str, spent: Spent, rejected: Sequence[int], dealer: int | None = None) -> None:
        super().__init__(why)
        self.spent, self.rejected, self.dealer = spent, sorted(rejected), dealer


class Summing(Protocol):
    """Requests contributions and sums them."""

    def gather(self, cohort: Sequence[int], request: Request, layout: Layout, transport: Transport) -> Intake:
        """Send one pass's request to these participants, and sum their contributions. RoundLost if there is no sum."""

    def require_plausible(self, noised: Tensors, clip_norm: float, std: float) -> None:
        """Refuse a sum with noise of this standard deviation that no contributions within the clip norm can produce."""

    def traffic(
        self, layout: Layout, request: Request, cohort: float, wire_size: Callable[[], int]
    ) -> tuple[float, float]:
        """Expected bytes up and down in a pass that loses nobody and to which `cohort` contribute.

        wire_size: computes the bytes of one unmasked contribution.
        """


@dataclass(frozen=True)
class OpenSum:
    """`Summing` of contributions that the server receives one by one, and keeps only for a median or trimmed mean.

    names: of the clients. skip_nonfinite: whether a contribution that is not finite is left out; else it ends the run. empty:
    the sum of a pass before its first contribution.
    """

    names: Sequence[str]
    skip_nonfinite: bool
    empty: Callable[[Layout], Summation] = PlainSum

    def gather(self, cohort: Sequence[int], request: Request, layout: Layout, transport: Transport) -> Intake:
        intake = Intake(self.empty(layout), bytes_down=request.bytes_down * len(cohort))
        for reply in transport.exchange(dict.fromkeys(cohort, request)):
            self._add(reply, intake)
        return intake

    def _add(self, reply: Reply, intake: Intake) -> None:
        """Add a reply to the sum, or reject it by name if it is not finite."""
        intake.bytes_up += reply.contribution.wire_size
        try:
            intake.total.add(reply.contribution, reply.weight)
        except NotFiniteError as error:
            intake.rejected.append(reply.client)
            if not self.skip_nonfinite:
                raise TrainingError(
                    f"client {self.names[reply.client]} sent an update that is not finite; lower training.lr, "
                    "or set federation.nonfinite = 'skip' to go on without it"
                ) from error
            return
        intake.received.append(reply.client)
        intake.losses.append(reply.loss)

    def require_plausible(self, noised: Tensors, clip_norm: float, std: float) -> None:
        """Refuses nothing: each client clips its own contribution, and the run trusts clients to do so."""

    def traffic(
        self, layout: Layout, request: Request, cohort: float, wire_size: Callable[[], int]
    ) -> tuple[float, float]:
        return cohort * wire_size(), cohort * request.bytes_down


def empty_sum(settings: FederationConfig, *, precise: bool) -> Callable[[Layout], Summation]:
    """Makes the empty sum of a pass without masks, for `federation.aggregate`."""
    if settings.aggregate != "mean":
        return partial(TrimmedSum, share=MEDIAN if settings.aggregate == "median" else settings.trim)
    return partial(PlainSum, precise=precise)


@dataclass(frozen=True)
class RecordedSum:
    """A `Summing` that passes each request and the sum of its contributions to `record`."""

    inner: Summing
    record: Callable[[Request, Intake], None]

    def gather(self, cohort: Sequence[int], request: Request, layout: Layout, transport: Transport) -> Intake:
        intake = self.inner.gather(cohort, request, layout, transport)
        self.record(request, intake)
        return intake

    def require_plausible(self, noised: Tensors, clip_norm: float, std: float) -> None:
        self.inner.require_plausible(noised, clip_norm, std)

    def traffic(
        self, layout: Layout, request: Request, cohort: float, wire_size: Callable[[], int]
    ) -> tuple[float, float]:
        return self.inner.traffic(layout, request, cohort, wire_size)
