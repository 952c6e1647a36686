"""One round, from top to bottom, and the loop that runs rounds.

The order is the contract: plan, draw, then for every linear pass ask the cohort, sum, release; then apply, evaluate, save,
tell. Nobody is told of a round before its state is saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fed.errors import ConfigError
from secure_fed.methods.method import State
from secure_fed.server import Intake, Server
from secure_fed.tensors import Tensors
from secure_fed.transport import Transport

Record = dict[str, Any]


@dataclass(frozen=True)
class Schedule:
    """What depends on the round: how many there are, the local learning rate, and when to evaluate."""

    rounds: int
    lr: Callable[[int], float]
    every: int

    def evaluates(self, finished: int) -> bool:
        return finished % self.every == 0 or finished == self.rounds


def run_round(state: State, server: Server, transport: Transport, lr: float) -> tuple[State, Record]:
    """One round of the federation: the next state, and what there is to say of it."""
    plan = server.plan(state)
    cohort = server.draw(state.round)
    asked, rejected, losses = cohort, list[int](), list[float]()
    bytes_up = bytes_down = 0
    means: dict[str, Tensors] = {}
    for pass_name in plan.passes:
        request = server.request(state, plan, pass_name, lr, means)
        intake = Intake(server.open_sum(server.layout(state, pass_name)))
        for reply in transport.exchange(dict.fromkeys(asked, request)):
            server.take(reply, intake)
        means[pass_name] = server.release(intake)
        bytes_up += intake.bytes_up
        bytes_down += request.bytes_down * len(asked)
        rejected += intake.rejected
        losses = losses or intake.losses
        asked = sorted(intake.heard)
    record: Record = {
        "round": state.round + 1,
        "train_loss": float(np.mean(losses)) if losses else None,
        "cohort": len(cohort),
        "rejected": [server.names[client] for client in rejected],
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
        "lr": lr,
    }
    return server.apply(state, means), record


def run(
    state: State,
    server: Server,
    transport: Transport,
    schedule: Schedule,
    evaluate: Callable[[State], Record],
) -> Iterator[tuple[State, Record]]:
    """Every round that is left, each as its state and its record."""
    while state.round < schedule.rounds:
        started = time.perf_counter()
        state, record = run_round(state, server, transport, schedule.lr(state.round))
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
