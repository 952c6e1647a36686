"""FFA-LoRA: A is frozen and the same for all clients; B trains.

Sun, Li, Li and Ding, "Improving LoRA in Privacy-preserving Federated Learning" (ICLR 2024, arXiv 2403.12313). With one A,
averaging B is averaging the product, B' A = mean(B_i A), and noise on B reaches the product only linearly: neither the
gap of eq. (1) nor the squared noise of eq. (2) in Trautmann et al. (2025) arises.

Every party makes the same A from the seed, so it is never sent. Its rows are orthonormal, or Gaussian with standard deviation
1/sqrt(n), which makes them orthonormal on average; with both, a step in B has the same length in B A.

Deviations: the paper initialises A as LoRA does, which is the Gaussian up to a constant factor on alpha; `double_rank` (the
comparison at equal trained size) keeps the scale alpha / r of the configured rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, pairs
from secure_fed.methods.averaged import AveragedLora
from secure_fed.methods.method import Card, State
from secure_fed.tensors.tensors import Tensors

CARD = Card(
    name="ffa_lora",
    paper="Sun et al., ICLR 2024, arXiv 2403.12313",
    travels="B, head",
    mean_exact=True,
    options=(*LORA_OPTIONS, "freeze_init", "double_rank", "ranks", "ranks_column"),
)


def build(run: RunConfig) -> FfaLora:
    adapter = LoraAdapter.of(run.method)
    return FfaLora(doubled(adapter) if run.method.double_rank else adapter, CARD, run.method.freeze_init)


def doubled(adapter: LoraAdapter) -> LoraAdapter:
    """Twice the rank at the same scale."""
    return replace(adapter, rank=2 * adapter.rank, alpha=adapter.alpha * (math.sqrt(2) if adapter.rslora else 2))


def orthonormal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """(r, n) with A A^T = I, uniform over such matrices."""
    q, r = torch.linalg.qr(torch.randn(shape[1], shape[0], dtype=torch.float64, generator=generator))
    a: Tensor = (q * r.diagonal().sign()).T
    return a.to(torch.float32, memory_format=torch.contiguous_format)


def gaussian(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """(r, n), independent N(0, 1/n), so that A A^T = I on average."""
    return torch.randn(shape, generator=generator) / math.sqrt(shape[1])


FREEZE_INITS = {"orthonormal": orthonormal, "gaussian": gaussian}


@dataclass(frozen=True)
class FfaLora(AveragedLora):
    """Averages B and the head beside a frozen A."""

    card: Card = CARD
    freeze_init: str = "orthonormal"

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        return self.adapter.prepare(model, head, seed, FREEZE_INITS[self.freeze_init])

    def trained(self, state: State) -> Tensors:
        return without_a(state.tensors)


def without_a(tensors: Tensors) -> Tensors:
    """Everything but the A of each adapted matrix."""
    return tensors.without(pair.a for pair in pairs(tensors))
