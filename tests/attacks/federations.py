"""Finished federations whose clients have one batch each, in an attack's view."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from attacks.adversary.case import Case, Seen, sums_of
from secure_fed import Federation, RunConfig
from secure_fed.rounds.transport import Recording, Reply, Request
from secure_fed.runs.recording import Update
from secure_fed.tensors.tensors import Tensors
from tests.attacks import canaried

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
    return seen(Federation(config), vantage)


def seen(federation: Federation, vantage: str = "server") -> Case:
    """An adversary's view of a run of this federation."""
    states: list[Tensors] = []
    federation.callbacks = [SimpleNamespace(on_round_end=lambda record, state: states.append(state.tensors))]
    recording = Recording(federation.assembly.transport)
    federation.assembly = replace(federation.assembly, transport=recording)
    final = federation.run().state.tensors
    names = federation.assembly.problem.names
    updates = [
        Update(asked.round, names[reply.client], asked.pass_name, reply.contribution, reply.weight)
        for asked, reply in recording.exchanges
        if isinstance(asked, Request) and isinstance(reply, Reply)
    ]
    by_round = dict(enumerate([federation.assembly.initial.tensors, *states]))
    lr = dict.fromkeys(by_round, federation.config.training.lr)
    kept = updates if vantage == "server" else []
    return Case(federation.assembly, Seen(vantage, final, by_round, sums_of(updates), kept, lr), canaried.never)
