"""One participant: it holds its examples, trains on them, and lets out a bounded change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from privacy.mechanisms import Mechanism
from secure_fed.config import TrainingConfig
from secure_fed.errors import MethodError
from secure_fed.methods.method import Method, State
from secure_fed.tensors import Layout, LayoutError, Tensors
from secure_fed.training import Collate, Objective, Trained, train
from secure_fed.transport import Reply, Request


@dataclass(frozen=True)
class Workbench:
    """What all clients of one process share: the frozen base inside the objective, and the rules of the federation.

    initial: the state that `method.prepare` made, which every party can compute.
    personal: names of trained tensors that never leave their client.
    """

    objective: Objective
    method: Method
    mechanism: Mechanism
    training: TrainingConfig
    collate: Collate
    initial: Tensors
    personal: tuple[str, ...]
    by_examples: bool
    seed: int


class Client:
    """A client of the federation.

    kept: its personal tensors since it first trained, and all that it remembers between rounds.
    """

    def __init__(self, index: int, name: str, examples: Sequence[Any], bench: Workbench) -> None:
        self.index = index
        self.name = name
        self.examples = examples
        self._bench = bench
        self._before = self._after = Tensors()
        self._loss = float("nan")
        self.kept: Tensors | None = None

    @property
    def personal(self) -> Tensors:
        """Its personal tensors, those of the initial state until it trains."""
        return self._bench.initial.select(self._bench.personal) if self.kept is None else self.kept

    def handle(self, request: Request) -> Reply:
        """Answer one linear pass; the first of a round trains, the later ones contribute from what it trained."""
        bench = self._bench
        if request.pass_name == request.plan.passes[0]:
            self._train(request)
        contribution = bench.method.contribute(request.pass_name, self._before, self._after, request.means)
        if Layout.of(contribution).digest != request.layout:
            raise LayoutError(f"client {self.name} and the server disagree on what pass {request.pass_name!r} carries")
        if request.pass_name == request.plan.passes[-1]:
            self._before = self._after = Tensors()
        factor = bench.mechanism.scale(contribution.norm)
        weight = float(len(self.examples)) if bench.by_examples else 1.0
        return Reply(self.index, contribution if factor == 1.0 else contribution * factor, weight, self._loss)

    def _train(self, request: Request) -> None:
        bench = self._bench
        self._before = bench.initial | request.tensors | self.personal
        trained: Trained = train(
            bench.objective,
            self._before,
            request.plan.trainable,
            self.examples,
            bench.collate,
            bench.training,
            request.lr,
            np.random.default_rng([bench.seed, request.round, self.index]),
        )
        own = trained.after.select(name for name in bench.personal if name in trained.after)
        if own.is_finite():  # what diverged is not taken into the next round
            self.kept = self.personal | own
        self._after = trained.after.without(bench.personal)
        self._loss = trained.loss


def personal_names(method: Method, state: State, patterns: Sequence[str]) -> tuple[str, ...]:
    """The trained tensors that some pattern names; refuses a pattern that names none, or a tensor that the method sends only
    as part of a product."""
    plan = method.plan(state)
    sent = {name for pass_name in plan.passes for name, _ in method.layout(state, pass_name).entries}
    for pattern in patterns:
        named = [name for name in plan.trainable if _names(pattern, name)]
        if not named:
            shown = ", ".join(plan.trainable[:3])
            raise MethodError(
                f"method.personal names {pattern!r}, but no trained tensor is called so; there are {shown}, ..."
            )
        if not sent.issuperset(named):
            bound = next(name for name in named if name not in sent)
            raise MethodError(
                f"method.personal names {pattern!r}, but {method.card.name} sends {bound} only inside a product"
            )
    return tuple(name for name in plan.trainable if any(_names(pattern, name) for pattern in patterns))


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(pattern + ".")
