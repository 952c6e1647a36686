"""Small recorded federations, and the server's view of them under each protection: for `inversion.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attacks.texts.factor_changes import Sent
from attacks.texts.recovery import faster, texts_of
from attacks.texts.span import FirstLayer, first_layer
from privacy.entropy import SeededEntropy
from privacy.mechanisms import Gaussian, clip_factor
from secure_fed import Federation, RunConfig
from secure_fed.rounds.transport import Recording
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, Tensors

COHORT, ROUNDS = 10, 4


@dataclass(frozen=True)
class Run:
    """A recorded run. states: before each round, and at the end. sent: by round, each client's contribution."""

    seed: int
    federation: Federation
    first: FirstLayer
    states: list[Tensors]
    sent: list[list[Tensors]]

    @property
    def scale(self) -> float:
        adapter: Any = self.federation.assembly.method
        return float(adapter.adapter.scaling)

    @property
    def faster(self) -> dict[str, float]:
        return faster(self.federation.assembly)

    @property
    def step(self) -> float:
        """The learning rate of one step of AdamW, which the attack undoes; 0 for SGD."""
        training = self.federation.config.training
        return training.rate if training.optimizer == "adamw" else 0.0

    def texts(self, client: int) -> list[list[int]]:
        return texts_of(self.federation.assembly.problem.train[client]) or []


class Watch:
    """Records the state after every round."""

    def __init__(self, states: list[Tensors]) -> None:
        self.states = states

    def on_round_end(self, record: Any, state: Any) -> None:
        self.states.append(state.tensors)


def watched(
    batch: int, method: str, rank: int, model: str, length: int, lr: float, seed: int = 0, optimizer: str = "sgd"
) -> Run:
    """Some recorded rounds of a federation whose clients have one batch each."""
    config = _config(batch, method, rank, model, length, lr, seed, optimizer)
    states: list[Tensors] = []
    federation = Federation(config, callbacks=[Watch(states)])
    recording = Recording(federation.assembly.transport)
    federation.assembly = replace(federation.assembly, transport=recording)
    federation.run()
    sent: list[list[Tensors]] = [[Tensors()] * COHORT for _ in range(ROUNDS)]
    for request, reply in recording.exchanges:
        sent[request.round][reply.client] = reply.contribution
    initial = federation.assembly.initial.tensors
    first = first_layer(federation.assembly.problem.model, list(initial), length, (0,))
    return Run(seed, federation, first, [initial, *states], sent)


def _config(
    batch: int, method: str, rank: int, model: str, length: int, lr: float, seed: int, optimizer: str
) -> RunConfig:
    settings: dict[str, Any] = {
        "model.name": model,
        "model.max_length": length,
        "data.examples": batch * COHORT,
        "data.test_examples": 200,
        "data.partition": "iid",
        "federation.seed": seed,
        "federation.clients": COHORT,
        "federation.rounds": ROUNDS,
        "method.name": method,
        "method.rank": rank,
        "method.target_modules": ("query", "key", "value"),
        "training.optimizer": optimizer,
        "training.lr": lr,
        "training.lr_schedule": "constant",
        "training.steps": 1,
        "training.batch_size": batch,
        "evaluation.every": ROUNDS,
    }
    named: Any = {tuple(name.split(".", 1)): value for name, value in settings.items()}
    return RunConfig().replace(named)


Sends = Callable[[Run, int], Sequence[Sent]]


def as_sent(*rounds: int) -> Sends:
    """A client's contributions in these rounds, unprotected."""
    return lambda run, client: [
        Sent(run.sent[at][client], run.states[at], step=run.step, faster=run.faster) for at in rounds
    ]


def protected(multiplier: float) -> Sends:
    """A client's contribution in the second round, clipped to half its length, with noise unless the multiplier is 0."""

    def sends(run: Run, client: int) -> Sequence[Sent]:
        whole = run.sent[1][client]
        bound = whole.norm() / 2
        clipped = whole * clip_factor(whole.norm(), bound)
        if not multiplier:
            return [Sent(clipped, run.states[1], step=run.step, faster=run.faster)]
        stream = SeededEntropy(1000 * run.seed + client).stream("benchmark")
        noised = Tensors(Gaussian(multiplier).noised(clipped.dense().parts(), bound, stream))
        return [Sent(noised, run.states[1], multiplier * bound)]

    return sends


def summed(clients: int) -> Sends:
    """The secure sum of the second round over a client and the next ones, `clients` in all."""

    def sends(run: Run, client: int) -> Sequence[Sent]:
        total = PlainSum(Layout.of(run.sent[1][client]))
        for index in range(clients):
            total.add(run.sent[1][(client + index) % COHORT], 1.0)
        return [Sent(total.total(), run.states[1], clients=clients)]

    return sends
