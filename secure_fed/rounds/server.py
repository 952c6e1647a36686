"""The server: it draws the cohort, learns sums, and turns means into the next state. It never keeps a contribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from privacy.sampling import Sampler, Uniform
from secure_fed.errors import TrainingError
from secure_fed.methods.method import Method, Reporting, RoundPlan, State
from secure_fed.rounds.masked.plausible import require_plausible_release
from secure_fed.rounds.phantom_scores import SCORES, Listening
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.server_optimizer import ServerOptimizer
from secure_fed.rounds.transport import Reply, Request, Transport
from secure_fed.tensors.low_rank import in_own_factors
from secure_fed.tensors.sums import PlainSum, Summation
from secure_fed.tensors.tensors import Layout, Tensors

if TYPE_CHECKING:
    from secure_fed.rounds.masked.masked_sum import MaskedSums, Spent


@dataclass
class Intake:
    """What one pass brings in: the running sum, and the little that is said beside it.

    spent: by a masked sum, on masking. suspects: who opened wrong shares in it.
    """

    total: Summation
    heard: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    spent: Spent | None = None
    suspects: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Server:
    """Everything the server decides; a round's order is in `engine`.

    names: of the clients, and after them of the phantoms that stand beside them. charge: makes the charge for one release of
    the federation durable, or refuses it; the round and the pass are noted. masked: sums contributions behind masks; without
    it they are added as they come. phantoms: how these are drawn, beside a cohort that is as without them. listens: keeps how
    far what rounds release goes along the directions of phantoms.
    """

    method: Method
    protection: Protection
    sampler: Sampler
    optimizer: ServerOptimizer
    names: Sequence[str]
    personal: tuple[str, ...]
    skip_nonfinite: bool
    seed: int
    charge: Callable[[int, str], None]
    open_sum: Callable[[Layout], Summation] = PlainSum
    masked: MaskedSums | None = None
    phantoms: Sampler | None = None
    listens: Listening | None = None

    @property
    def clients(self) -> int:
        """How many there are, phantoms apart: the first of all who are asked."""
        return len(self.names) - getattr(self.phantoms, "population", 0)

    def draw(self, round_: int) -> list[int]:
        """Whom to ask: by secret coins if the guarantee counts on them, else seeded; everybody, if each tosses for itself."""
        if self.protection.hidden:
            return list(range(len(self.names)))
        cohort = self.sampler.draw(self._coins("cohort", round_, _COHORT_STREAM))
        if self.phantoms is None:
            return cohort
        beside = self.phantoms.draw(self._coins("phantoms", round_, _PHANTOM_STREAM))
        return [*cohort, *(self.clients + phantom for phantom in beside)]

    def _coins(self, name: str, round_: int, number: int) -> Uniform:
        """Of a round: secret where the guarantee counts on it, else of the seed and a number that is no client's index."""
        if self.protection.hides_cohort:
            return self.protection.entropy.stream(name, round_).uniform
        return np.random.default_rng([self.seed, round_, number]).random

    def real(self, asked: Sequence[int]) -> list[int]:
        """Those of them that are clients, and no phantoms."""
        return [client for client in asked if client < self.clients]

    def plan(self, state: State) -> RoundPlan:
        """The method's plan; what is personal trains but does not travel."""
        plan = self.method.plan(state)
        return replace(plan, down=tuple(name for name in plan.down if name not in self.personal))

    def request(
        self, state: State, plan: RoundPlan, pass_name: str, lr: float, means: Mapping[str, Tensors], first: str = ""
    ) -> Request:
        """What a pass asks of its clients. first: digest of the round's first request, for every later one."""
        tensors = state.tensors.select(plan.down) if pass_name == plan.passes[0] else Tensors()
        layout = self.layout(state, pass_name).digest
        counters = self.protection.in_travel.counters
        earlier = {name: mean.without(counters) for name, mean in means.items()}
        return Request(state.round, pass_name, plan, lr, layout, tensors, earlier, state.clip_norm, first)

    def layout(self, state: State, pass_name: str) -> Layout:
        """The layout of a pass's sum, which holds nothing personal, and the mechanism's counters."""
        return self.protection.layout(self.method, state, pass_name, self.personal)

    def gather(self, asked: Sequence[int], request: Request, layout: Layout, transport: Transport) -> Intake:
        """Ask these clients for one pass, and sum what they contribute."""
        if self.masked is not None:
            total, heard, refused, spent, suspects = self.masked.gather(asked, request, layout, transport)
            return Intake(total, heard, refused, total.losses, spent.bytes_up, spent.bytes_down, spent, suspects)
        intake = Intake(self.open_sum(layout), bytes_down=request.bytes_down * len(asked))
        for reply in transport.exchange(dict.fromkeys(asked, request)):
            self.take(reply, intake)
        return intake

    def take(self, reply: Reply, intake: Intake) -> None:
        """Add a reply to the sum, or reject it by name if it is not finite."""
        intake.bytes_up += reply.contribution.wire_size
        if reply.contribution.is_finite():
            intake.total.add(reply.contribution, reply.weight)
            intake.heard.append(reply.client)
            if reply.client < self.clients:
                intake.losses.append(reply.loss)
            return
        intake.rejected.append(reply.client)
        if not self.skip_nonfinite:
            raise TrainingError(
                f"client {self.names[reply.client]} sent an update that is not finite; lower training.lr, "
                "or set federation.nonfinite = 'skip' to go on without it"
            )

    def release(self, intake: Intake, state: State, pass_name: str) -> Tensors:
        """The mean contribution, perturbed as the mechanism says: all that a method ever sees.

        With noise on the sum it is divided by the expected size of a cohort, which is public, and never by the size that was
        drawn; the sum of nobody is noise all the same. Otherwise it is divided by the weight that arrived from clients, and of
        nobody it is zero. What phantoms weigh is in no divisor.
        """
        if intake.rejected and not self.real(intake.heard) and not self.protection.hides_cohort:
            raise TrainingError(
                f"every client of the cohort sent an update that is not finite ({len(intake.rejected)} of them); "
                "lower training.lr, or federation.server_lr if the state they started from is to blame"
            )
        total, weight = intake.total.total(), intake.total.weight
        if self.masked is not None and self.protection.place == "nowhere" and intake.heard and not weight:
            raise TrainingError(
                "no client of the cohort had an update that is finite and within secure_aggregation.range; lower training.lr, "
                "or federation.server_lr if the state they started from is to blame"
            )
        if self.protection.place == "sum":
            total = self._noised(total, state, pass_name)
        if self.protection.place in ("sum", "shares"):
            weight = self.sampler.expected
        elif beside := len(intake.heard) - len(self.real(intake.heard)):
            weight -= beside
            if weight < 0.5:  # phantoms alone: nobody's change is none
                return total * 0.0
        return total * (1.0 / weight) if weight else total

    def _noised(self, total: Tensors, state: State, pass_name: str) -> Tensors:
        """The sum under the server's noise, refused if clients behind masks have spoiled it."""
        mechanism, clip_norm = self.protection.mechanism, state.clip_norm
        stream = self.protection.entropy.stream("sum", state.round, pass_name)
        noised = Tensors(mechanism.noised(total.dense().parts(), clip_norm, stream))
        if self.masked is not None:
            clipped = noised.without(mechanism.counters)
            most = self.sampler.most + (self.phantoms.most if self.phantoms else 0)
            require_plausible_release(clipped, clip_norm, mechanism.std(clip_norm), most)
        return noised

    def publishable(self, record: dict[str, Any], state: State, plan: RoundPlan) -> dict[str, Any]:
        """A round's record without what tells who took part or how many, where the guarantee counts on nobody's knowing.

        Bytes behind masks tell who vanished in the middle of a sum: under privacy, they are those of a sum that loses nobody.
        """
        hides = self.protection.hides_cohort
        if not hides and (self.protection.place == "nowhere" or "masked" not in record):
            return record
        cohort = self.sampler.expected if hides else record["cohort"]
        up, down = self._traffic(state, plan, cohort + (self.phantoms.expected if self.phantoms else 0.0))
        if hides:
            record = {name: value for name, value in record.items() if name != "caught"}
        sizes = {"bytes_up": round(up), "bytes_down": round(down)}
        if "masked" in record:
            survivors = {"survivors": None} if hides else {}
            record = record | {"masked": record["masked"] | sizes | survivors}
        return record | sizes | ({"cohort": round(cohort), "rejected": []} if hides else {})

    def _traffic(self, state: State, plan: RoundPlan, cohort: float) -> tuple[float, float]:
        """The bytes that a cohort of this size sends and receives in this round, whatever it trained."""
        up = down = 0.0
        after = state.tensors.select(plan.trainable).without(self.personal)
        means: dict[str, Tensors] = {}
        for pass_name in plan.passes:
            request, layout = self.request(state, plan, pass_name, 0.0, means), self.layout(state, pass_name)
            if self.masked is not None:
                sent_up, sent_down = self.masked.expected_traffic(layout, request, cohort)
            else:
                sent = in_own_factors(self.method.contribute(pass_name, state.tensors, after, means))
                sent_up = cohort * (sent | self.protection.in_travel.counted(lambda: 0.0, math.inf)).wire_size
                sent_down = cohort * request.bytes_down
            up, down = up + sent_up, down + sent_down
            means[pass_name] = PlainSum(self.method.layout(state, pass_name)).total()
        return up, down

    def unmoved(self, state: State, plan: RoundPlan) -> State:
        """The next state where nothing was learned: that of a mean of zero, without a step of the server's optimiser."""
        nothing = {name: PlainSum(self.method.layout(state, name)).total() for name in plan.passes}
        return replace(self.method.apply(state, nothing), memory=state.memory, clip_norm=state.clip_norm)

    def reported(self, means: Mapping[str, Tensors]) -> dict[str, float]:
        """What the method has to say of these means, if anything."""
        return self.method.reported(means) if isinstance(self.method, Reporting) else {}

    def listened(
        self, state: State, following: State, plan: RoundPlan, lr: float, means: Mapping[str, Tensors]
    ) -> State:
        """The state that follows, with the scores of phantoms after what this round released."""
        if self.listens is None:
            return following
        scores = self.listens.heard(self, state, plan, lr, means)
        return replace(following, memory=following.memory | {SCORES: scores})

    def apply(self, state: State, means: Mapping[str, Tensors]) -> State:
        """The next state; one that is not finite is refused before anybody gets to see it."""
        mechanism, first = self.protection.in_travel, next(iter(means.values()))
        clip_norm = mechanism.adapted(state.clip_norm, first.select(mechanism.counters).parts())
        means = {name: mean.without(mechanism.counters) for name, mean in means.items()}
        steps, memory = self.optimizer.step(means, state.memory)
        dim = Layout.of(next(reversed(means.values()))).size
        noise_std = self.optimizer.lr * self.protection.mean_noise_std(state.clip_norm, self.sampler.expected, dim)
        following = replace(self.method.apply(state, steps, noise_std), memory=memory, clip_norm=clip_norm)
        if not following.tensors.is_finite():
            raise TrainingError(f"the state after round {following.round} is not finite; lower federation.server_lr")
        return following


_COHORT_STREAM = 2**32 - 1  # no client has this index, so no client's randomness is the cohort's
_PHANTOM_STREAM = 2**32 - 3
