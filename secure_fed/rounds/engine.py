"""One round, from top to bottom, and the loop over rounds.

The order is the contract. Plan; then for every linear pass charge, draw the cohort (in the first pass), gather, release; then
apply, keep, evaluate, save, report. A charge is on disk before any part of its pass is computed. A release is on disk before it
is used: a killed run resumes from that very release, since computing it again, with fresh noise, would be a second release. No
callback learns a round's record before its state is saved.

A masked round can be lost, for example because a client dealt wrong shares. Nothing of it is applied, its charges stay, and the
next round is made without that client. A round of a public order that was interrupted before its release is lost likewise,
since its clients' turn is over. A lost round is not repeated: two sums of one round, over different clients, would reveal the
contribution of a client that is in only one of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from privacy.errors import PrivacyError, TurnPassed
from secure_fed.errors import ConfigError
from secure_fed.methods.method import State
from secure_fed.rounds.server import Server
from secure_fed.rounds.sums import Intake, Record, RoundLost, Spent
from secure_fed.rounds.transport import Transport
from secure_fed.tensors.tensors import Tensors

_MISDEALT = "dealt wrong shares"


class Keeper(Protocol):
    """Keeps a release on disk until the end of its round is saved."""

    def kept(self, round_: int) -> tuple[State, Record] | None:
        """The state and record of round `round_` (from 1), if it was interrupted after its release."""

    def keep(self, state: State, record: Record) -> None:
        """Make the state after a release durable."""


class KeepsNothing:
    """`Keeper` of a run without privacy, whose rounds may be computed again, to the same bits, at no cost."""

    def kept(self, round_: int) -> None:
        return None

    def keep(self, state: State, record: Record) -> None:
        pass


@dataclass(frozen=True)
class Schedule:
    """The number of rounds, the local learning rate of each, and the rounds that are evaluated."""

    rounds: int
    lr: Callable[[int], float]
    every: int

    def evaluates(self, finished: int) -> bool:
        return finished % self.every == 0 or finished == self.rounds


def run(
    state: State,
    server: Server,
    transport: Transport,
    schedule: Schedule,
    evaluate: Callable[[State], Record],
    keeper: Keeper = KeepsNothing(),  # noqa: B008 - it has no state
) -> Iterator[tuple[State, Record]]:
    """The remaining rounds, each as its state and its record."""
    while state.round < schedule.rounds:
        started = time.perf_counter()
        kept = keeper.kept(state.round + 1)
        state, record = kept or run_round(state, server, transport, schedule.lr(state.round))
        if kept is None:
            keeper.keep(state, record)
        if schedule.evaluates(state.round):
            measured = evaluate(state)
            if clash := sorted({*record, "seconds"} & set(measured)):
                message = (
                    f"metrics gives {clash[0]!r}, a name that every round's record has already; call it something else"
                )
                raise ConfigError(message).about("metrics", clash[0], "a name of its own")
            record = record | measured
        yield state, _plain(record | {"seconds": time.perf_counter() - started})


def run_round(state: State, server: Server, transport: Transport, lr: float) -> tuple[State, Record]:
    """One round of the federation: the next state and the round's record.

    Every later pass is over the participants whose contribution is in the sum of the pass before, and its request carries the
    digest of the round's first request.
    """
    plan, tally, means = server.plan(state), _Tally(), dict[str, Tensors]()
    participants, first = list[int](), ""
    try:
        for pass_name in plan.passes:
            server.charge(state.round, pass_name)
            if not means:
                participants = server.draw(state.round)
                tally.cohort = len(server.without_dummies(participants))
            request = server.request(state, plan, pass_name, lr, means, first)
            if not first and pass_name != plan.passes[-1]:  # computing a digest reads every number of the request
                first = request.digest
            intake = server.gather(participants, request, server.layout(state, pass_name), transport)
            tally.add(intake)
            means[pass_name] = server.release(intake, state, pass_name)
            participants = sorted(intake.received)
    except (RoundLost, TurnPassed) as error:
        tally.lose(error)
        return server.unmoved(state, plan), server.publishable(tally.record(state, server.names, lr), state, plan)
    following = server.scored(state, server.apply(state, means), plan, lr, means)
    record = tally.record(state, server.names, lr) | server.reported(means, following)
    return following, server.publishable(record, state, plan)


@dataclass
class _Tally:
    """The sums of a round's record over its passes so far. caught: clients that lied in the protocol, each with its lie."""

    cohort: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    rejected: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    masked: list[Spent] = field(default_factory=list)
    caught: dict[int, str] = field(default_factory=dict)
    lost: str = ""

    def add(self, intake: Intake) -> None:
        self.bytes_up += intake.bytes_up
        self.bytes_down += intake.bytes_down
        self.rejected += intake.rejected
        self.losses = self.losses or intake.losses
        self.masked += [intake.spent] if intake.spent else []
        self.caught |= dict.fromkeys(intake.suspects, "opened wrong shares")

    def lose(self, error: RoundLost | TurnPassed) -> None:
        """End the round in a pass without a sum."""
        self.lost = str(error)
        if isinstance(error, TurnPassed):
            return
        self.bytes_up += error.spent.bytes_up
        self.bytes_down += error.spent.bytes_down
        self.rejected += error.rejected
        self.masked.append(error.spent)
        if error.dealer is not None:
            self.caught[error.dealer] = _MISDEALT

    def record(self, state: State, names: Sequence[str], lr: float) -> Record:
        return {
            "round": state.round + 1,
            "train_loss": _plain(float(np.mean(self.losses))) if self.losses else None,
            "cohort": self.cohort,
            "rejected": [names[client] for client in self.rejected],
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "lr": lr,
            **({"masked": Spent.together(self.masked)} if self.masked else {}),
            **({"caught": {names[client]: how for client, how in self.caught.items()}} if self.caught else {}),
            **({"lost": self.lost} if self.lost else {}),
        }


def dealt_wrong(records: Sequence[Record], names: Sequence[str]) -> list[int]:
    """The clients that dealt wrong shares in these rounds, which later rounds leave out. Where cohorts are secret, records name
    none.
    """
    caught = {name for record in records for name, how in record.get("caught", {}).items() if how == _MISDEALT}
    return [client for client, name in enumerate(names) if name in caught]


def _plain(value: Any) -> Any:
    """The value with None for every number that JSON lacks: NaN and the infinities."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Budget(Protocol):
    """A run's budget: every call that returns has made its charge durable, before any part of the release is computed.

    Noise on a sum, also in shares of its clients, is charged by the server: once for each pass, or in a public order for all
    passes of a round at its first. Noise that a client adds to its own steps or contribution is charged to that client, by the
    number of releases that it requests.
    """

    @property
    def made(self) -> int | None:
        """The releases charged to the federation so far; None before this process has charged any."""

    def charge(self, round_: int, pass_name: str) -> None:
        """Charge one release of the whole federation. BudgetExhausted if none is left; TurnPassed in a round of a public order
        that a run charged before it was interrupted.
        """

    def allowance(self, who: str, wanted: int, round_: int) -> int:
        """Charge up to `wanted` releases to this client, as many as it has left, and return that number."""


@dataclass
class Charges:
    """Charges to the budget of the run in progress. Clients and server outlive a run; its budget is open as long as it runs."""

    budget: Budget | None = None

    def charge(self, round_: int, pass_name: str) -> None:
        self._open().charge(round_, pass_name)

    def allowance(self, who: str, wanted: int, round_: int) -> int:
        return self._open().allowance(who, wanted, round_)

    @property
    def made(self) -> int | None:
        """The releases charged to the federation so far, if this run's process has charged any."""
        return self.budget.made if self.budget else None

    def close(self) -> None:
        self.budget = None

    def _open(self) -> Budget:
        if self.budget is None:
            raise PrivacyError("nothing may be released outside a run: Federation.run opens the budget")
        return self.budget


def charges_nothing(round_: int, pass_name: str) -> None:
    """`Budget.charge` where the federation releases nothing: without privacy, or where every client accounts for itself."""
