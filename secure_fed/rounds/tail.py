"""The mean of the last models of a run, with which the run ends (Polyak and Ruppert's averaging).

Rounds go on from a model that carries the noise of every round so far. A single model contains all noise of the last rounds,
and the mean of the last k models only a part. So where means are noised the mean is the better model. It is a function of
models that have been released already, so it costs no privacy. Clients never see it before the end, so the rounds are the same
as without it.

    mean_1 = x_(T - k + 1),    mean_j = mean_(j - 1) + (x_(T - k + j) - mean_(j - 1)) / j,    x_T becomes mean_k

for T rounds and the models x_1 .. x_T, entry by entry, or by the method's own rule (`method.Blending`). A lost round leaves the
model unchanged, and the model counts again.

A state's memory keeps the mean ("tail/...") and with it j and T ("tailed") while it is made. Nothing is kept for k = 1. A run
that is resumed with more rounds continues from the mean that it had ended with. If it had not ended, its mean is not of the
last rounds and is dropped; models that are gone by then are not in the new mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from secure_fed.config import FederationConfig
from secure_fed.errors import ConfigError
from secure_fed.methods.method import Blending, Method, Shrinking, State
from secure_fed.tensors.tensors import Tensors

_MEAN, _NOTED = "tail/", "tailed"


@dataclass(frozen=True)
class Tail:
    """The last `count` of `rounds` rounds."""

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
        kept = Tensors((name.removeprefix(_MEAN), part) for name, part in before.items() if name.startswith(_MEAN))
        already, rounds = before.tensor(_NOTED).tolist() if _NOTED in before else (0.0, self.rounds)
        already = already if rounds == self.rounds else 0.0
        # A copy at first, since a checkpoint holds no tensor twice.
        mean = _blended(method, kept, state.tensors, 1 / (already + 1)) if already else state.tensors * 1.0
        if state.round == self.rounds:
            return replace(state, tensors=mean, memory=memory)
        noted = {_MEAN + name: part for name, part in mean.items()}
        return replace(state, memory=memory | noted | {_NOTED: torch.tensor([already + 1, self.rounds])})


def _blended(method: Method, mean: Tensors, latest: Tensors, weight: float) -> Tensors:
    if isinstance(method, Blending):
        return method.blended(mean, latest, weight)
    return mean + (latest - mean) * weight
