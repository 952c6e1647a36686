"""The server: it draws the cohort, learns sums, and turns means into the next state. It never keeps a contribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from privacy.mechanisms import Mechanism
from privacy.sampling import Sampler
from secure_fed.errors import TrainingError
from secure_fed.methods.method import Method, RoundPlan, State
from secure_fed.server_optimizer import ServerOptimizer
from secure_fed.summation import PlainSum, Summation
from secure_fed.tensors import Layout, Tensors
from secure_fed.transport import Reply, Request


@dataclass
class Intake:
    """What one pass brings in: the running sum, and the little that is said beside it."""

    total: Summation
    heard: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_up: int = 0


@dataclass(frozen=True)
class Server:
    """Everything the server decides; a round's order is in `engine`."""

    method: Method
    mechanism: Mechanism
    sampler: Sampler
    optimizer: ServerOptimizer
    names: Sequence[str]
    personal: tuple[str, ...]
    skip_nonfinite: bool
    seed: int
    open_sum: Callable[[Layout], Summation] = PlainSum

    def draw(self, round_: int) -> list[int]:
        """The cohort of a round: seeded, because without privacy nothing depends on its being secret."""
        return self.sampler.draw(np.random.default_rng([self.seed, round_, _COHORT_STREAM]))

    def plan(self, state: State) -> RoundPlan:
        """The method's plan; what is personal trains but does not travel."""
        plan = self.method.plan(state)
        return replace(plan, down=tuple(name for name in plan.down if name not in self.personal))

    def request(
        self, state: State, plan: RoundPlan, pass_name: str, lr: float, means: Mapping[str, Tensors]
    ) -> Request:
        first = pass_name == plan.passes[0]
        tensors = state.tensors.select(plan.down) if first else Tensors()
        return Request(state.round, pass_name, plan, lr, self.layout(state, pass_name).digest, tensors, dict(means))

    def layout(self, state: State, pass_name: str) -> Layout:
        """The layout of a pass's sum, which holds nothing personal."""
        entries = self.method.layout(state, pass_name).entries
        return Layout(tuple(entry for entry in entries if entry[0] not in self.personal))

    def take(self, reply: Reply, intake: Intake) -> None:
        """Add a reply to the sum, or reject it by name if it is not finite."""
        intake.bytes_up += reply.contribution.wire_size
        if reply.contribution.is_finite():
            intake.total.add(reply.contribution, reply.weight)
            intake.heard.append(reply.client)
            intake.losses.append(reply.loss)
            return
        intake.rejected.append(reply.client)
        if not self.skip_nonfinite:
            raise TrainingError(
                f"client {self.names[reply.client]} sent an update that is not finite; lower training.lr, "
                "or set federation.nonfinite = 'skip' to go on without it"
            )

    def release(self, intake: Intake) -> Tensors:
        """The mean contribution, perturbed as the mechanism says: all that a method ever sees. Of nobody, it is zero."""
        if intake.rejected and not intake.heard:
            raise TrainingError(
                f"every client of the cohort sent an update that is not finite ({len(intake.rejected)} of them); "
                "lower training.lr, or federation.server_lr if the state they started from is to blame"
            )
        total = self.mechanism.release(intake.total.total())
        return total * (1.0 / intake.total.weight) if intake.total.weight else total

    def apply(self, state: State, means: Mapping[str, Tensors]) -> State:
        """The next state; one that is not finite is refused before anybody gets to see it."""
        steps, memory = self.optimizer.step(means, state.memory)
        following = replace(self.method.apply(state, steps), memory=memory)
        if not following.tensors.is_finite():
            raise TrainingError(f"the state after round {following.round} is not finite; lower federation.server_lr")
        return following


_COHORT_STREAM = 2**32 - 1  # no client has this index, so no client's randomness is the cohort's
