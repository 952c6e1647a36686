"""The model that a run's noise alone would end with: the rounds of its plan, with clients that contribute nothing.

Every step after the noise is the run's own: the server's optimizer, the method's rule, the mean of the last models. So a method
that denoises, refactors or drops a part of its sums shows the noise as it treats it. Under plain averaging the noise on a
number of the final model has the standard deviation

    server rate * z C sqrt(T) / cohort

and server momentum, correlated noise and the mean of the last models change it as they change it in the run.

Secrecy. Nothing here is a release: no data enter, so the outcome needs no privacy and costs none. The numbers come from a fixed
public seed, so that every start of a run finds the same outcome. None of them is ever released as noise, which comes from
`privacy.entropy.SystemEntropy`: noise that anybody could compute again would hide nothing.

Noise in the clients' steps (DP-SGD) enters through their optimizer (`StepNoise`). The mean of n clients has the spread of one
client over sqrt(n), and enters a round as one client's change.

Approximations. A run of many rounds, or of many numbers, is replaced by fewer rounds, at least `_FEWEST`, with noise of the
same standard deviation on the sum of all rounds. A clip norm that adapts keeps its first value. All invited clients answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from privacy.entropy import SeededEntropy
from privacy.mechanisms import perturbed
from secure_fed.config import TrainingConfig
from secure_fed.learning.training.local import batch_sampler, optimizer_of, planned_steps, scheduled_lr
from secure_fed.methods.method import State
from secure_fed.rounds.protection import CorrelatedNoise, Protection
from secure_fed.rounds.server import Server
from secure_fed.rounds.server_optimizer import Tail
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Tensors


@dataclass(frozen=True)
class StepNoise:
    """The noise in one client's change where its steps are noised, measured on `_SAMPLE` numbers that take its steps.

    They go along the longest gradient that clipping admits, with its noise, and their spread is the noise. AdamW divides by the
    size of a gradient: without any gradient, noise would move a model equally far at every noise multiplier. Shorter gradients
    leave more noise than this. The spread is proportional to the learning rate, and beyond `_STEPS` steps to the square root of
    their number.

    units: the number of units at each client. last: the names of the head's last layer, whose steps have another length.
    """

    training: TrainingConfig
    rounds: int
    units: Sequence[int]
    last: tuple[str, ...] = ()

    def spread(self, protection: Protection, numbers: int) -> float:
        """The standard deviation on each of `numbers` coordinates in a round at the full rate, over all clients."""
        counts = sorted({int(count) for count in self.units if count}) or [1]
        some = counts[:: max(1, len(counts) // _CLIENTS)]
        return math.sqrt(float(np.mean([self._walked(count, protection, numbers) ** 2 for count in some])))

    def times(self, round_: int, name: str) -> float:
        """The length of this tensor's steps in a round, relative to the full rate."""
        share = scheduled_lr(self.training, min(round_ + 0.5, self.rounds - 0.5), self.rounds) / self.training.rate
        return share * (self.training.head_times if name in self.last else 1.0)

    def _walked(self, units: int, protection: Protection, numbers: int) -> float:
        settings, clip_norm = self.training, protection.clip_norm
        steps = planned_steps(units, settings)
        made = max(1, min(steps, _STEPS))
        std = protection.mechanism.std(clip_norm) / batch_sampler(units, settings).expected
        along, rng = clip_norm / math.sqrt(numbers), np.random.default_rng(_SEED)
        moved = torch.zeros(_SAMPLE, dtype=torch.float64, requires_grad=True)
        optimizer = optimizer_of([moved], settings, settings.rate)
        for _ in range(made):
            gradient = along + std * torch.from_numpy(rng.standard_normal(_SAMPLE))
            gradient += settings.proximal * moved.detach()
            if (most := settings.max_grad_norm) is not None:
                gradient *= most / max(math.sqrt(numbers * float(gradient.square().mean())), most)
            moved.grad = gradient
            optimizer.step()
        return float(moved.detach().std()) * math.sqrt(steps / made)


@dataclass(frozen=True)
class NoiseAlone:
    """The noise of a run of `rounds` rounds that starts at `initial`. steps: where clients add it to their steps."""

    server: Server
    initial: State
    rounds: int
    steps: StepNoise | None = None

    def ended(self, times: float = 1.0, rate: float | None = None) -> State:
        """The state after the last round, under noise `times` as large. rate: the server's, in place of its own."""
        protection, made = self.server.protection, self.made
        left = protection.noise_weights(self.rounds).cumsum()  # of each round's noise, at the end
        louder = math.sqrt(float(left @ left) / made) if made < self.rounds else 1.0
        correlated = None
        if protection.correlated is not None and made == self.rounds:
            correlated = CorrelatedNoise(protection.correlated.correlation, self.rounds).open(SeededEntropy(_SEED))
        public = _scaled(protection, times * (louder if self.steps is None else 1.0))
        server = replace(
            self.server,
            protection=replace(public, entropy=SeededEntropy(_SEED), correlated=correlated),
            optimizer=self.server.optimizer if rate is None else replace(self.server.optimizer, lr=rate),
            tail=Tail(made, max(1, round(self.server.tail.count * made / self.rounds))),
            scoring=None,
        )
        if self.steps is not None:
            trained = self.initial.tensors.select(server.plan(self.initial).trainable).without(server.personal)
            louder *= self.steps.spread(public, trained.numel) / math.sqrt(server.sampler.expected)
        state = self.initial
        for _ in range(made):
            means: dict[str, Tensors] = {}
            for pass_name in server.plan(state).passes:
                means[pass_name] = self._mean(server, state, pass_name, means, louder)
            state = replace(server.apply(state, means), clip_norm=self.initial.clip_norm)
        return state

    @property
    def made(self) -> int:
        """The number of rounds that stand for all rounds."""
        numbers = sum(self.server.layout(self.initial, name).size for name in self.server.plan(self.initial).passes)
        return min(self.rounds, _MOST, max(_FEWEST, _NUMBERS // max(1, numbers)))

    def _mean(
        self, server: Server, state: State, pass_name: str, means: Mapping[str, Tensors], spread: float
    ) -> Tensors:
        """The released mean of a pass to which nobody contributes. spread: of the change, where steps are noised."""
        protection, cohort = server.protection, server.sampler.expected
        layout = server.layout(state, pass_name)
        zeros = PlainSum(layout).total().parts()
        if protection.placement.server_noise:
            return Tensors(protection.noised(zeros, state.clip_norm, state.round, pass_name)) * (1 / cohort)
        if self.steps is None:
            std = protection.mean_noise_std(state.clip_norm, cohort, layout.size)
            stream = protection.entropy.stream("mean", state.round, pass_name)
            return Tensors({name: perturbed(part, std, stream) for name, part in sorted(zeros.items())})
        stream = protection.entropy.stream("change", state.round)  # the same change in all passes of a round
        moving = state.tensors.select(server.plan(state).trainable).without(server.personal)
        round_ = state.round * self.rounds // self.made
        after = Tensors(
            {
                name: perturbed(part, spread * self.steps.times(round_, name), stream)
                for name, part in sorted(moving.parts().items())
            }
        )
        return server.method.contribute(pass_name, state.tensors, after, means)


def _scaled(protection: Protection, times: float) -> Protection:
    """The protection with `times` the noise."""
    mechanism, shares = protection.mechanism, protection.shares
    return replace(
        protection,
        mechanism=replace(mechanism, noise_multiplier=times * mechanism.noise_multiplier),
        shares=None if shares is None else replace(shares, noise_multiplier=times * shares.noise_multiplier),
    )


_SEED = 54_054_054
_MOST, _FEWEST, _NUMBERS = 64, 4, 2**25  # rounds; noised numbers of all of them
_SAMPLE, _CLIENTS, _STEPS = 4096, 8, 256
