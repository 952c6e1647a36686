"""Finished federations whose clients have one batch each, in an attack's view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from attacks.adversary.case import Case, Seen, sums_of
from secure_fed import Federation, RunConfig
from secure_fed.rounds.transport import Recording, Reply, Request
from secure_fed.runs.recording import Update
from secure_fed.tensors.tensors import Tensors

USUAL: dict[str, Any] = {
    "model.max_length": 12,
    "data.test_examples": 60,
    "data.partition": "iid",
    "federation.rounds": 2,
    "method.name": "fedlora",
    "method.rank": 16,
    "method.target_modules": ("query", "key", "value"),
    "training.optimizer": "sgd",
    "training.lr": 1.0,
    "training.lr_schedule": "constant",
    "training.steps": 1,
    "training.batch_size": 1,
    "training.together": 1,
    "evaluation.every": 2,
}


def case(vantage: str = "server", clients: int = 3, each: int = 1, **settings: Any) -> Case:
    """An adversary's view of a run of `clients` clients with `each` examples.

    Settings are written section__name; None stands for the default.
    """
    chosen = {name.replace("__", "."): value for name, value in settings.items()}
    sizes = {"data.examples": clients * each, "federation.clients": clients, "federation.cohort": clients}
    whole = USUAL | {"training.batch_size": each} | sizes | chosen
    config = RunConfig().replace(
        {tuple(name.split(".", 1)): value for name, value in whole.items() if value is not None}
    )  # type: ignore[misc]
    noted = _Noted()
    federation = Federation(config, callbacks=[noted])
    recording = Recording(federation.assembly.transport)
    federation.assembly = replace(federation.assembly, transport=recording)
    final = federation.run().state.tensors
    updates = [
        Update(
            asked.round,
            federation.assembly.problem.names[reply.client],
            asked.pass_name,
            reply.contribution,
            reply.weight,
        )
        for asked, reply in recording.exchanges
        if isinstance(asked, Request) and isinstance(reply, Reply)
    ]
    states = dict(enumerate([federation.assembly.initial.tensors, *noted.states]))
    lr = dict.fromkeys(states, config.training.lr)
    kept = updates if vantage == "server" else []
    return Case(federation.assembly, Seen(vantage, final, states, sums_of(updates), kept, lr), _none)


class _Noted:
    def __init__(self) -> None:
        self.states: list[Tensors] = []

    def on_round_end(self, record: Any, state: Any) -> None:
        self.states.append(state.tensors)


def _none(count: int) -> Any:
    raise AssertionError(f"an inversion trains no references, and {count} were asked for in {Path(__file__).name}")
