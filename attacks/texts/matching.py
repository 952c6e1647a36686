"""Texts recovered by optimisation, where the exact test does not apply: dummy embeddings are fitted until their gradient points
in the direction of the update.

As in LAMP (Balunović et al. 2022) and its forerunners, without their language-model prior: embeddings e (L, n) of one
text minimise

    1 - cos(g(e), -update) + PULL mean_i (|e_i| - mean |embedding|)^2

(cos: the mean of the cosines of all tensors) with Adam, keeping the best of a few random starts; each position then takes the
nearest token. Length and label are given. Attention must be differentiable twice, so its plain kernel is used. This is far
weaker than the exact test: it recovers short texts, one at a time, and mostly loses the order of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PULL = 0.1


@dataclass(frozen=True)
class Budget:
    """The effort of a search: the number of starts, and of steps for each."""

    starts: int = 2
    steps: int = 150
    lr: float = 0.15
    seed: int = 0


def match(
    model: nn.Module,
    trained: Mapping[str, Tensor],
    update: Mapping[str, Tensor],
    length: int,
    label: int,
    budget: Budget,
) -> list[int]:
    """The tokens of one text of that length and label whose gradient step is most similar to the update.

    trained: the trained tensors before the step. update: their change by the step. model: a classifier whose
    `get_input_embeddings()` is a table of tokens.
    """
    table: Tensor = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    names = [name for name in trained if name in update and bool(update[name].any())]
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in trained.items()}
    loss = _loss(model, leaves, label)
    target = [-update[name].to(table.dtype) for name in names]
    generator = torch.Generator().manual_seed(budget.seed)
    ended = [
        _optimised(loss, [leaves[name] for name in names], target, _start(table, length, generator), table, budget)
        for _ in range(budget.starts)
    ]
    best, _ = min(ended, key=lambda one: one[1])
    far = torch.cdist(F.normalize(best, dim=1), F.normalize(table, dim=1))
    return [int(token) for token in far.argmin(1)]


def _loss(model: nn.Module, leaves: Mapping[str, Tensor], label: int) -> Callable[[Tensor], Tensor]:
    """The loss of one text given by its embeddings (L, n)."""
    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]

    def loss(dummy: Tensor) -> Tensor:
        put = embeddings.register_forward_hook(lambda module, args, output: dummy[None])
        ids = torch.ones(1, len(dummy), dtype=torch.long)
        try:
            out: Any = functional_call(model, dict(leaves), kwargs={"input_ids": ids, "attention_mask": ids})
        finally:
            put.remove()
        return F.cross_entropy(getattr(out, "logits", out), torch.tensor([label]))

    return loss


def _start(table: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Embeddings of random tokens, as a start that is a valid text."""
    drawn = torch.randint(len(table), (length,), generator=generator)
    return table[drawn].clone()


def _optimised(
    loss: Callable[[Tensor], Tensor],
    leaves: Sequence[Tensor],
    target: Sequence[Tensor],
    start: Tensor,
    table: Tensor,
    budget: Budget,
) -> tuple[Tensor, float]:
    """The optimised embeddings, and the final distance of their gradient from the update."""
    dummy = start.requires_grad_()
    optimizer = torch.optim.Adam([dummy], budget.lr)
    usual, value = table.norm(dim=1).mean(), 2.0
    for step in range(budget.steps):
        optimizer.param_groups[0]["lr"] = budget.lr * (1 - step / budget.steps)
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            gradients = torch.autograd.grad(loss(dummy), leaves, create_graph=True)
            apart = 1 - _cosine(gradients, target)
            (apart + PULL * (dummy.norm(dim=1) - usual).square().mean()).backward()
        optimizer.step()
        value = float(apart.detach())
    return dummy.detach(), value


def _cosine(found: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """The mean of the cosines of tensor pairs, so that large tensors do not dominate small ones."""
    return torch.stack(
        [F.cosine_similarity(f.flatten(), t.flatten(), dim=0) for f, t in zip(found, target, strict=True)]
    ).mean()
