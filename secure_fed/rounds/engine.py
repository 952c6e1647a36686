"""One round, from top to bottom, and the loop that runs rounds.

The order is the contract: plan; then for every linear pass charge, draw (in the first), ask the cohort, sum, release; then
apply, keep, evaluate, save, tell. A charge is on disk before anything of its pass is computed. What was released is on disk
before anything is done with it: a run that is killed goes on with that very release, where making it again, with fresh noise,
would be a second one. Nobody is told of a round before its state is saved.

A round can be lost behind masks, for example because a client dealt wrong shares. Nothing of it is applied, its charges stay,
and the next round is made without that client. It is not made again under its own number: two sums of one round would tell the
server the contribution of a client that is in one of them alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from secure_fed.errors import ConfigError
from secure_fed.methods.method import State
from secure_fed.rounds.record import Record, Spent
from secure_fed.rounds.server import Server
from secure_fed.rounds.summing import Intake, RoundLost
from secure_fed.rounds.transport import Transport
from secure_fed.tensors.tensors import Tensors


class Keeper(Protocol):
    """Holds what a round released, from the release until the round's end is saved."""

    def kept(self, round_: int) -> tuple[State, Record] | None:
        """What round `round_` (from 1) left before it was interrupted, if it came to a release."""

    def keep(self, state: State, record: Record) -> None:
        """Make the state after a release durable."""


class KeepsNothing:
    """`Keeper` where a round may be computed again, to the same bits, at no cost."""

    def kept(self, round_: int) -> None:
        return None

    def keep(self, state: State, record: Record) -> None:
        pass


@dataclass(frozen=True)
class Schedule:
    """What depends on the round: how many there are, the local learning rate, and when to evaluate."""

    rounds: int
    lr: Callable[[int], float]
    every: int

    def evaluates(self, finished: int) -> bool:
        return finished % self.every == 0 or finished == self.rounds


@dataclass
class _Tally:
    """What a round took, over its passes so far. caught: clients that lied in the protocol, by number, and how."""

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

    def lose(self, error: RoundLost) -> None:
        """The round ends here, in a pass without a sum."""
        self.lost = str(error)
        self.bytes_up += error.spent.bytes_up
        self.bytes_down += error.spent.bytes_down
        self.rejected += error.rejected
        self.masked.append(error.spent)
        if error.dealer is not None:
            self.caught[error.dealer] = "dealt wrong shares"

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


def run_round(state: State, server: Server, transport: Transport, lr: float) -> tuple[State, Record]:
    """One round of the federation: the next state, and what there is to say of it."""
    plan, tally, means = server.plan(state), _Tally(), dict[str, Tensors]()
    asked, first = list[int](), ""
    try:
        for pass_name in plan.passes:
            server.charge(state.round, pass_name)
            if not means:
                asked = server.draw(state.round)
                tally.cohort = len(server.without_phantoms(asked))
            request = server.request(state, plan, pass_name, lr, means, first)
            first = first or request.digest
            intake = server.gather(asked, request, server.layout(state, pass_name), transport)
            means[pass_name] = server.release(intake, state, pass_name)
            tally.add(intake)
            asked = sorted(intake.received)
    except RoundLost as error:
        tally.lose(error)
        return server.unmoved(state, plan), server.publishable(tally.record(state, server.names, lr), state, plan)
    record = tally.record(state, server.names, lr) | server.reported(means)
    following = server.scored(state, server.apply(state, means), plan, lr, means)
    return following, server.publishable(record, state, plan)


def run(
    state: State,
    server: Server,
    transport: Transport,
    schedule: Schedule,
    evaluate: Callable[[State], Record],
    keeper: Keeper = KeepsNothing(),  # noqa: B008 - it has no state
) -> Iterator[tuple[State, Record]]:
    """Every round that is left, each as its state and its record."""
    while state.round < schedule.rounds:
        started = time.perf_counter()
        kept = keeper.kept(state.round + 1)
        state, record = kept or run_round(state, server, transport, schedule.lr(state.round))
        if kept is None:
            keeper.keep(state, record)
        if schedule.evaluates(state.round):
            record = _with_metrics(record, evaluate(state))
        yield state, _plain(record | {"seconds": time.perf_counter() - started})


def _with_metrics(record: Record, measured: Record) -> Record:
    if clash := sorted({*record, "seconds"} & set(measured)):
        raise ConfigError(
            f"metrics gives {clash[0]!r}, a name that every round's record has already; call it something else"
        )
    return record | measured


def _plain(value: Any) -> Any:
    """The same with None for every number that JSON does not know: NaN and the infinities."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
