"""The server: it draws the cohort, requests the sums of a round, and turns their means into the next state.

It keeps no contribution beyond its round, and with masked sums it never receives one. `Turns` are the rounds in which clients,
or their units, take part, as far as the server's draws are public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from privacy.participation import Sampler, Uniform
from secure_fed.errors import MethodError, TrainingError
from secure_fed.methods.method import FromSums, Method, Reporting, RoundPlan, Shrinking, State
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.server_optimizer import ServerOptimizer, Tail, added_up, noise_so_far
from secure_fed.rounds.sums import Intake, Record, Summing
from secure_fed.rounds.transport import Participant, Request, Transport
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, Tensors

_COHORT_STREAM = 2**32 - 1  # no client has this index, so no client draws the same numbers
_DUMMY_STREAM = 2**32 - 3
Floats = NDArray[np.float64]


class Scoring(Protocol):
    """Membership scores of dummies, updated from each round's releases."""

    def after(
        self, server: Server, state: State, plan: RoundPlan, lr: float, means: Mapping[str, Tensors]
    ) -> Mapping[str, Tensor]:
        """The scores after a round that began at `state` and released these means, by their name in a state's memory."""


@dataclass(frozen=True)
class Server:
    """The server's part of a round, step by step; `engine` has their order.

    names: of the clients, and after them of the dummies. charge: makes the charge for one release of the federation durable,
    or refuses it; the round and the pass are noted. summing: sums the clients' contributions of a pass. tail: the last rounds,
    whose models are averaged. dummies: dummy clients, which the server runs itself. dummy_sampler: draws those of a round; the
    cohort is drawn as if there were none. scoring: updates their membership scores.

    What dummies contribute is a function of public numbers, and of noise that each adds itself where every client does. The
    server adds it to the sum of the clients, behind masks to the unmasked sum, and after any noise on that sum. So masks,
    noise and divisor are those of a run without dummies.
    """

    method: Method
    protection: Protection
    sampler: Sampler
    optimizer: ServerOptimizer
    names: Sequence[str]
    personal: tuple[str, ...]
    seed: int
    charge: Callable[[int, str], None]
    summing: Summing
    tail: Tail
    dummies: Sequence[Participant] = ()
    dummy_sampler: Sampler | None = None
    scoring: Scoring | None = None

    @property
    def clients(self) -> int:
        """The number of clients. Participants with a higher index are dummies."""
        return len(self.names) - getattr(self.dummy_sampler, "population", 0)

    def draw(self, round_: int) -> list[int]:
        """The participants of a round: the cohort, or all clients if each tosses its own coin; and after them the dummies.

        Coins are secret if the guarantee relies on them, else they come from the seed.
        """
        if self.protection.hidden:
            cohort = list(range(self.clients))
        else:
            cohort = self.sampler.draw(self._coins("cohort", round_, _COHORT_STREAM), round_)
        if self.dummy_sampler is None:
            return cohort
        beside = self.dummy_sampler.draw(self._coins("dummies", round_, _DUMMY_STREAM), round_)
        return [*cohort, *(self.clients + dummy for dummy in beside)]

    def _coins(self, name: str, round_: int, number: int) -> Uniform:
        """The coins of a round: secret if the guarantee relies on them, else from the seed and `number`."""
        if self.protection.hides_cohort or self.protection.hidden:
            return self.protection.entropy.stream(name, round_).uniform
        return np.random.default_rng([self.seed, round_, number]).random

    def without_dummies(self, participants: Sequence[int]) -> list[int]:
        """The clients among these participants."""
        return [client for client in participants if client < self.clients]

    def plan(self, state: State) -> RoundPlan:
        """The method's plan. Personal tensors train but are not sent to clients."""
        plan = self.method.plan(state)
        return replace(plan, down=tuple(name for name in plan.down if name not in self.personal))

    def request(
        self, state: State, plan: RoundPlan, pass_name: str, lr: float, means: Mapping[str, Tensors], first: str = ""
    ) -> Request:
        """The request of a pass. first: digest of the round's first request, for every later one."""
        tensors = state.tensors.select(plan.down) if pass_name == plan.passes[0] else Tensors()
        layout = self.layout(state, pass_name).digest
        counters = self.protection.contribution_mechanism.counters
        earlier = {name: mean.without(counters) for name, mean in means.items()}
        return Request(state.round, pass_name, plan, lr, layout, tensors, earlier, state.clip_norm, first)

    def layout(self, state: State, pass_name: str) -> Layout:
        """The layout of a pass's sum: the method's tensors without personal ones, and the mechanism's counters."""
        return self.protection.layout(self.method, state, pass_name, self.personal)

    def gather(self, participants: Sequence[int], request: Request, layout: Layout, transport: Transport) -> Intake:
        """Send the request to the clients among these participants, and sum their contributions; beside them, the dummies'."""
        clients = self.without_dummies(participants)
        intake = self.summing.gather(clients, request, layout, transport)
        dummies = [number for number in participants if number >= self.clients]
        if dummies:
            beside = PlainSum(layout)
            for number in dummies:
                beside.add(self.dummies[number - self.clients].handle(request).contribution)
            intake.of_dummies = beside.total()
            intake.received += dummies
        return intake

    def release(self, intake: Intake, state: State, pass_name: str) -> Tensors:
        """The mean contribution, noised by the mechanism. A method sees nothing else.

        Noised sums are divided by the expected cohort size, which is public, and never by the drawn size; an empty cohort still
        releases noise. Other sums are divided by the weight that arrived from clients, and without any the mean is zero.
        """
        if intake.rejected and not self.without_dummies(intake.received) and not self.protection.hides_cohort:
            raise TrainingError(
                f"every client of the cohort sent an update that is not finite ({len(intake.rejected)} of them); "
                "lower training.lr, or federation.server_lr if the state they started from is to blame"
            )
        total, weight = intake.total.total(), intake.total.weight
        if self.protection.placement.server_noise:
            total = self._noised(total, state, pass_name)
        if self.protection.placement.expected_divisor:
            weight = self.sampler.expected
        if not weight:
            return total * 0.0
        if intake.of_dummies is not None:
            total = total + intake.of_dummies
        return total * (1.0 / weight)

    def _noised(self, total: Tensors, state: State, pass_name: str) -> Tensors:
        """The sum with the server's noise. Only the noised sum is checked, since a refusal is visible."""
        protection, clip_norm = self.protection, state.clip_norm
        noised = Tensors(protection.noised(total.dense().parts(), clip_norm, state.round, pass_name))
        std = protection.sum_noise_std(clip_norm, state.round)
        self.summing.require_plausible(noised.without(protection.mechanism.counters), clip_norm, std)
        return noised

    def publishable(self, record: Record, state: State, plan: RoundPlan) -> Record:
        """A round's record without what reveals the cohort or its size, where the guarantee counts on their secrecy.

        The bytes of a masked sum reveal which clients vanished during it, and the bytes of a contribution whether it is zeros.
        In a private run with masks, or with the server's noise, they are replaced by the bytes of a sum from which nobody
        vanishes.
        """
        hides, placement = self.protection.hides_cohort, self.protection.placement
        if not hides and (not placement.private or ("masked" not in record and not placement.server_noise)):
            return record
        cohort = self.sampler.expected if hides else record["cohort"]
        up, down = self.traffic(state, plan, cohort)
        if hides:
            record = {name: value for name, value in record.items() if name != "caught"}
        sizes = {"bytes_up": round(up), "bytes_down": round(down)}
        if "masked" in record:
            survivors = {"survivors": None} if hides else {}
            record = record | {"masked": record["masked"] | sizes | survivors}
        return record | sizes | ({"cohort": round(cohort), "rejected": []} if hides else {})

    def traffic(self, state: State, plan: RoundPlan, cohort: float) -> tuple[float, float]:
        """The bytes that a cohort of this size sends and receives in this round, whatever it trained.

        With masks all invited clients send, and for a hidden cohort these are all clients.
        """
        up = down = 0.0
        after = state.tensors.select(plan.trainable).without(self.personal)
        means: dict[str, Tensors] = {}
        for pass_name in plan.passes:
            request, layout = self.request(state, plan, pass_name, 0.0, means), self.layout(state, pass_name)
            wire_size = partial(self._wire_size, pass_name, state.tensors, after, means)
            sent_up, sent_down = self.summing.traffic(layout, request, cohort, wire_size)
            up, down = up + sent_up, down + sent_down
            means[pass_name] = PlainSum(self.method.layout(state, pass_name)).total()
        return up, down

    def _wire_size(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> int:
        """The bytes of one unmasked contribution."""
        sent = self.protection.measurable(self.method.contribute(pass_name, before, after, means))
        return (sent | self.protection.contribution_mechanism.counted(lambda: 0.0, math.inf)).wire_size

    def unmoved(self, state: State, plan: RoundPlan) -> State:
        """The next state after a lost round: a mean of zero, without a step of the server's optimiser."""
        nothing = {name: PlainSum(self.method.layout(state, name)).total() for name in plan.passes}
        following = replace(self.method.apply(state, nothing), memory=state.memory, clip_norm=state.clip_norm)
        return self.tail.taken_in(self.method, state.memory, following)

    def reported(self, means: Mapping[str, Tensors], following: State) -> dict[str, float]:
        """The method's own entries for the round's record."""
        return self.method.reported(means, following) if isinstance(self.method, Reporting) else {}

    def scored(self, state: State, following: State, plan: RoundPlan, lr: float, means: Mapping[str, Tensors]) -> State:
        """`following` with the membership scores of dummies after this round's release."""
        if self.scoring is None:
            return following
        scores = self.scoring.after(self, state, plan, lr, means)
        return replace(following, memory=following.memory | scores)

    def apply(self, state: State, means: Mapping[str, Tensors]) -> State:
        """The next state. A state that is not finite is refused before it is saved or sent."""
        mechanism, first = self.protection.contribution_mechanism, next(iter(means.values()))
        clip_norm = mechanism.adapted(state.clip_norm, first.select(mechanism.counters).parts())
        means = {name: mean.without(mechanism.counters) for name, mean in means.items()}
        steps, memory = self.optimizer.step(means, state.memory)
        size = Layout.of(next(reversed(means.values()))).size
        std = self.protection.mean_noise_std(state.clip_norm, self.sampler.expected, size)
        noise, noted = noise_so_far(state, std, self.protection.noise_weights(state.round + 1), self.optimizer)
        memory, before, noise_std = memory | noted, state, noise.step
        if noise.total and isinstance(self.method, FromSums) and self.method.from_sums(state):
            start, steps, kept = added_up(state, steps)
            memory, before, noise_std = memory | kept, replace(state, tensors=start), noise.total
        applied = self.method.apply(before, steps, noise_std)
        self._require_next(state, applied)
        following = replace(applied, memory=memory, clip_norm=clip_norm)
        if not following.tensors.is_finite():
            raise TrainingError(f"the state after round {following.round} is not finite; lower federation.server_lr")
        return self.tail.taken_in(self.method, state.memory, following)

    def _require_next(self, state: State, following: State) -> None:
        """Refuse a value that is not a state of the next round: a method may be the user's own."""
        name = f"{self.method.card.name}'s apply"
        if not isinstance(following, State):
            raise MethodError(f"{name} returns {type(following).__name__}, and not the next State")
        if following.round != state.round + 1:
            raise MethodError(
                f"{name} returns round {following.round} after round {state.round}; `round` must grow by one"
            )
        shrinks = isinstance(self.method, Shrinking)
        if not shrinks and (odd := Layout.of(following.tensors).differing(Layout.of(state.tensors))):
            raise MethodError(f"{name} returns other tensors than the state has: {odd}")


@dataclass
class Turns:
    """The public probability that a unit takes part in a round.

    With cohorts from the public seed it is 0 or 1; with secret coins it is their rate. draw: the participants of a round, if
    they are public. hosts: for each unit the index that must be drawn: its own, or its client's. most: the largest number of
    rounds that any unit takes part in.
    """

    rate: float
    hosts: Sequence[int]
    draw: Callable[[int], Sequence[int]] | None = None
    most: float = float("inf")
    _drawn: list[NDArray[np.bool_]] = field(default_factory=list)

    def rates(self, round_: int) -> Floats:
        """(units,)"""
        if self.draw is None:
            return np.full(len(self.hosts), self.rate)
        while len(self._drawn) <= round_:
            self._drawn.append(np.isin(self.hosts, self.draw(len(self._drawn))))
        before = np.sum(self._drawn[:round_], axis=0) if round_ else np.zeros(len(self.hosts))
        return (self._drawn[round_] & (before < self.most)).astype(float)

    def allowance(self, number: int, who: str, wanted: int, round_: int) -> int:
        """The releases that a client unit may make, with the signature of `ClientSetup.allowance`. Charges no budget."""
        return wanted if self.rates(round_)[number] > 0 else 0


def turns_of(server: Server, hosts: Sequence[int], passes: int) -> Turns:
    """hosts: an index for each unit. passes: of a round. For cohorts that the guarantee hides, only the rate is known."""
    protection, plan = server.protection, server.protection.plan
    secret = protection.hides_cohort or protection.hidden
    most = math.inf if plan is None or plan.participations is None else plan.participations
    if protection.placement.own_noise and plan is not None:
        most = min(plan.limits.values()) // passes
    return Turns(server.sampler.rate, hosts, None if secret else server.draw, most)
