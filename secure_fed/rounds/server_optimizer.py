"""Server optimisers: from a mean change to a step.

FedOpt (Reddi et al., Adaptive Federated Optimization, arXiv:2003.00295, algorithm 2). The mean change D acts as a negative
gradient, so the step is added:

    mean       step = lr D
    momentum   m <- b m + D                                      step = lr m
    adam       m <- b m + (1 - b) D,  v <- b2 v + (1 - b2) D^2   step = lr m / (sqrt(v) + tau)

with m = v = 0 at first, b2 = .99 and tau = 1e-3 as in the paper's experiments. Momentum and Adam form low-rank members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from secure_fed.config import FederationConfig
from secure_fed.tensors.tensors import Tensors

_BETA2 = 0.99
_TAU = 1e-3


@dataclass(frozen=True)
class ServerOptimizer:
    """A pure function from (means, memory) to (steps, memory): of memory it reads and returns the moments, at first none."""

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
