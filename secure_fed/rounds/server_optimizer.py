"""From a round's mean changes to the next model: the optimiser's step, the sum of all steps with its noise, and the mean of
the last models, with which a run ends.

All three keep what they need in a state's memory, and are functions of releases and public numbers.

The step (FedOpt: Reddi et al., Adaptive Federated Optimization, arXiv:2003.00295, algorithm 2). The mean change D acts as a
negative gradient, so the step is added:

    mean       step = lr D
    momentum   m <- b m + D                                      step = lr m
    adam       m <- b m + (1 - b) D,  v <- b2 v + (1 - b2) D^2   step = lr m / (sqrt(v) + tau)

with m = v = 0 at first, b2 = .99 and tau = 1e-3 as in the paper's experiments. Momentum and Adam form low-rank members.

The noise. Round s releases its mean with the noise d_s sum_j w_j Z_(s - j) on each coordinate: Z_0, Z_1, ... independent, of
variance one, w the first column of C^-1 (`privacy.correlation`; 1, 0, 0, ... where rounds are independent). The step of the
server is lr m_s with m_s = b m_(s - 1) + mean_s (b = 0 without momentum). So a step, and the sum of all steps, carry known
combinations of the Z_j: the norm of the coefficients is the standard deviation. A lost round makes no step and adds no noise,
but later rounds subtract its Z_j nevertheless. Everything here is public: rates, clip norms, and which rounds were lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from privacy.entropy import Floats
from secure_fed.config import FederationConfig
from secure_fed.errors import ConfigError
from secure_fed.methods.method import Blending, Method, Shrinking, State
from secure_fed.tensors.tensors import Tensors

_BETA2 = 0.99
_TAU = 1e-3
_NOISE, _START, _SUM, _MEAN, _NOTED = "noise", "start/", "sum/", "tail/", "tailed"  # in a state's memory


@dataclass(frozen=True)
class ServerOptimizer:
    """A pure function from (means, memory) to (steps, memory): of memory it reads and returns the moments, at first none.

    kind: "mean", "momentum" or "adam". beta: b.
    """

    kind: str
    lr: float
    beta: float

    @property
    def momentum(self) -> float:
        """b where a step is a sum of the means so far with weights lr b^age; 0 for Adam, whose step is no such sum."""
        return self.beta if self.kind == "momentum" else 0.0

    @classmethod
    def of(cls, config: FederationConfig) -> ServerOptimizer:
        return cls(config.optimizer, config.server_rate, config.server_beta)

    def step(self, means: Mapping[str, Tensors], memory: Tensors) -> tuple[dict[str, Tensors], Tensors]:
        """The steps for the means of all passes, and the memory for the next round."""
        if self.kind == "mean":
            return {name: mean if self.lr == 1.0 else mean * self.lr for name, mean in means.items()}, Tensors()
        steps: dict[str, dict[str, Tensor]] = {}
        kept: dict[str, Tensor] = {}
        for pass_name, mean in means.items():
            steps[pass_name] = {}
            for name in mean:
                slots = {moment: f"{moment}/{pass_name}/{name}" for moment in ("m", "v")}
                old = {moment: memory.tensor(slot) for moment, slot in slots.items() if slot in memory}
                steps[pass_name][name], new = self._advance(mean.tensor(name), old)
                kept |= {slots[moment]: value for moment, value in new.items()}
        return {name: Tensors(step) for name, step in steps.items()}, Tensors(kept)

    def _advance(self, change: Tensor, old: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """One tensor's step and its new moments."""
        m = self.beta * old.get("m", torch.zeros_like(change))
        if self.kind == "momentum":
            m = m + change
            return self.lr * m, {"m": m}
        m = m + (1 - self.beta) * change
        v = _BETA2 * old.get("v", torch.zeros_like(change)) + (1 - _BETA2) * change.square()
        return self.lr * m / (v.sqrt() + _TAU), {"m": m, "v": v}


@dataclass(frozen=True)
class NoiseLevels:
    """The standard deviation of the noise on each coordinate of a round's step, and of the sum of all steps up to it."""

    step: float
    total: float


def noise_so_far(
    state: State, std: float, weights: Floats, optimizer: ServerOptimizer
) -> tuple[NoiseLevels, dict[str, Tensor]]:
    """The noise after the round of `state`, and what the next state's memory keeps of it: d_s of every round, 0 for a lost one.

    std: d_s of this round, 0 where means are not noised. weights: w, one for every round up to this one.
    """
    if not std:
        return NoiseLevels(0.0, 0.0), {}
    deviations = torch.zeros(state.round + 1, dtype=torch.float64)
    if _NOISE in state.memory:
        earlier = state.memory.tensor(_NOISE)
        deviations[: len(earlier)] = earlier
    deviations[state.round] = std
    return noise_levels(deviations.numpy(), weights, optimizer.lr, optimizer.momentum), {_NOISE: deviations}


def noise_levels(deviations: Floats, weights: Floats, lr: float, momentum: float = 0.0) -> NoiseLevels:
    """The noise after the latest round. deviations: d_s of every round (T,), 0 for a lost one; weights: w (T,)."""
    from scipy.linalg import toeplitz
    from scipy.signal import lfilter

    rows = np.asarray(deviations)[:, None] * toeplitz(weights, np.zeros(len(weights)))  # of the means: (T, T)
    steps = lfilter([lr], [1.0, -momentum], rows[np.asarray(deviations) > 0], axis=0)
    if not len(steps):
        return NoiseLevels(0.0, 0.0)
    return NoiseLevels(float(np.linalg.norm(steps[-1])), float(np.linalg.norm(steps.sum(0))))


def added_up(state: State, steps: Mapping[str, Tensors]) -> tuple[Tensors, dict[str, Tensors], Tensors]:
    """The tensors of the start, the sums of all steps of each pass with these, and both as a state's memory keeps them.

    A run that keeps no sum yet starts here.
    """
    begun = any(name.startswith(_SUM) for name in state.memory)
    start = _part(state.memory, _START) if begun else state.tensors
    sums = {
        name: step.dense() + _part(state.memory, _SUM + f"{name}/") if begun else step.dense()
        for name, step in steps.items()
    }
    kept = {_START + name: member for name, member in start.items()}
    kept |= {f"{_SUM}{name}/{each}": member for name, total in sums.items() for each, member in total.items()}
    return start, sums, Tensors(kept)


@dataclass(frozen=True)
class Tail:
    """The last `count` of `rounds` rounds: the run ends with the mean of their models (Polyak and Ruppert's averaging).

    Rounds go on from a model that carries the noise of every round so far. A single model contains all noise of the last
    rounds, and the mean of the last k models only a part. So where means are noised the mean is the better model. It is a
    function of models that have been released already, so it costs no privacy. Clients never see it before the end, so the
    rounds are the same as without it.

        mean_1 = x_(T - k + 1),    mean_j = mean_(j - 1) + (x_(T - k + j) - mean_(j - 1)) / j,    x_T becomes mean_k

    for T rounds and the models x_1 .. x_T, entry by entry, or by the method's own rule (`method.Blending`). A lost round leaves
    the model unchanged, and the model counts again.

    A state's memory keeps the mean and with it j and T while it is made. Nothing is kept for k = 1. A run that is resumed with
    more rounds continues from the mean that it had ended with. If it had not ended, its mean is not of the last rounds and is
    dropped; models that are gone by then are not in the new mean.
    """

    rounds: int
    count: int

    @classmethod
    def of(cls, settings: FederationConfig) -> Tail:
        return cls(settings.rounds, settings.averaged)

    def require_steady(self, method: Method) -> None:
        """Refuse a mean of tensors whose shapes change."""
        if self.count > 1 and isinstance(method, Shrinking):
            raise ConfigError(
                f"federation.average_last = {self.count} cannot be used with {method.card.name}, whose tensors shrink: use 1"
            ).about("federation.average_last", self.count, "1")

    @property
    def said(self) -> str:
        """Its effect in a sentence; empty where it has none."""
        if self.count == 1:
            return ""
        return f"the run ends with the mean of the models of its last {self.count} rounds (federation.average_last)"

    def taken_in(self, method: Method, before: Tensors, state: State) -> State:
        """The state after a round, with its tensors in the mean; after the last round they are the mean.

        before: the memory of the state before that round.
        """
        memory = state.memory.without(name for name in state.memory if name.startswith(_MEAN) or name == _NOTED)
        if self.count == 1 or state.round <= self.rounds - self.count:
            return replace(state, memory=memory)
        already, rounds = before.tensor(_NOTED).tolist() if _NOTED in before else (0.0, self.rounds)
        already = already if rounds == self.rounds else 0.0
        earlier, weight = _part(before, _MEAN), 1 / (already + 1)
        if not already:
            mean = state.tensors * 1.0  # a copy, since a checkpoint holds no tensor twice
        elif isinstance(method, Blending):
            mean = method.blended(earlier, state.tensors, weight)
        else:
            mean = earlier + (state.tensors - earlier) * weight
        if state.round == self.rounds:
            return replace(state, tensors=mean, memory=memory)
        noted = {_MEAN + name: part for name, part in mean.items()}
        return replace(state, memory=memory | noted | {_NOTED: torch.tensor([already + 1, self.rounds])})


def _part(memory: Tensors, prefix: str) -> Tensors:
    return Tensors((name.removeprefix(prefix), member) for name, member in memory.items() if name.startswith(prefix))
