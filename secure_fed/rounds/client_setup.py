"""What all clients of one process share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from privacy.sampling import Attendance
from secure_fed.config import TrainingConfig
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.cohort.trainings import Ways
from secure_fed.learning.training.local import Falling, Job, Train, train
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.method import Method
from secure_fed.rounds.acceptable import Acceptable
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.ranks import part
from secure_fed.rounds.transport import Request
from secure_fed.tensors.tensors import Layout, Tensors


@dataclass(frozen=True)
class ClientSetup:
    """The part of a client that all clients of one process share: the frozen base inside the objective, and the settings.

    initial: the state that `method.prepare` made, which every party can compute.
    personal: names of trained tensors that never leave their client. allowance: called with a client's name, a number of
    releases and the round; charges up to this number, as many as the client has left, durably, and returns the charged number.
    watch: receives the tensors before and after every training, and the client's weight; None where a guarantee forbids that.
    train: local training without noise in its steps, `local.train` or an equivalent. ways: the measured facts about common
    passes. attendance: the rounds that clients took part in, where a public order fixes their turns. acceptable: the bounds on
    requests. last: the names of the head's last layer. rounds: of the run. ranks: by the name of a client, the number of ranks
    that it trains, if it may not be all.
    """

    objective: Objective
    method: Method
    protection: Protection
    training: TrainingConfig
    collate: Collate
    initial: Tensors
    rounds: int
    personal: tuple[str, ...]
    by_examples: bool
    seed: int
    group_examples: int
    allowance: Callable[[str, int, int], int]
    watch: Callable[[Tensors, Tensors, float], None] | None = None
    train: Train = train
    ways: Ways = field(default_factory=Ways)
    attendance: Attendance | None = None
    acceptable: Acceptable | None = None
    last: tuple[str, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)

    def job(
        self, before: Tensors, request: Request, examples: Sequence[Any], rng: np.random.Generator, name: str = ""
    ) -> Job:
        """The local training that a request asks for. name: of a client, which may train a part of the ranks."""
        falling = Falling(self.training, request.round, self.rounds)
        trainable, round_ = request.plan.trainable, request.round
        made = Job(before, trainable, examples, self.collate, self.training, request.lr, rng, round=round_)
        job = replace(made, last=self.last, falling=falling)
        if name not in self.ranks:
            return job
        return replace(job, before=part(before, self.ranks[name]), whole=Layout.of(before.select(trainable)))
