"""Common passes that train a round's clients of one process before the clients answer.

Only the arithmetic is shared. Each client alone receives its result, and does all further steps (clipping, noise, masks)
itself. Where clients are protected, passes have public shapes, so that one client's result does not depend on who else was
drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from secure_fed.learning.training.cohort.trainings import Ways, train_together
from secure_fed.learning.training.local import Job, Trained
from secure_fed.learning.training.objective import Objective

_log = logging.getLogger(__name__)


@runtime_checkable
class Trainable(Protocol):
    """A participant whose training may be done outside it."""

    def job(self, request: Any) -> Job | None: ...

    def train_ahead(self, request: Any, trained: Trained) -> None: ...


@dataclass(frozen=True)
class Together:
    """Trains participants for their next answers. public: whether clients are protected."""

    objective: Objective
    public: bool
    ways: Ways = field(default_factory=Ways)

    def __call__(self, some: Sequence[tuple[Any, Any]]) -> None:
        trainable = [(one, request) for one, request in some if isinstance(one, Trainable)]
        asked = [(participant, request, participant.job(request)) for participant, request in trainable]
        theirs = [(participant, request, job) for participant, request, job in asked if job is not None]
        tried = len(self.ways.trials)
        found = train_together(self.objective, [job for _, _, job in theirs], self.ways, public=self.public)
        self._say(tried)
        for (participant, request, _), trained in zip(theirs, found, strict=True):
            participant.train_ahead(request, trained)

    def _say(self, tried: int) -> None:
        """Log the results of trials after the first `tried`."""
        for trial in list(self.ways.trials.values())[tried:]:
            if trial.why_not:
                _log.warning("clients train one after the other: %s", trial.why_not)
            else:
                _log.info("clients train in shared passes")
