"""The similarity of two models on the same examples: linear centred kernel alignment (Kornblith et al., ICML 2019).

For features X (n, p) and Y (n, q) of the same n examples, with every column's mean subtracted,

    CKA(X, Y) = |Y^T X|_F^2 / (|X^T X|_F |Y^T Y|_F),

which is 1 for features equal up to rotation and scale, and near 0 for unrelated ones. C2A (section 2) computes it from the
logits of the global model and of a model in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secure_fed.errors import ConfigError
from secure_fed.learning.tasks.task import Batch, Loss

_ROWS_EACH = 4


def linear_cka(x: Tensor, y: Tensor) -> float:
    """CKA of (n, p) and (n, q) features; NaN where features are the same for all examples."""
    x, y = (features.double() - features.double().mean(dim=0) for features in (x, y))
    if x.shape[0] < max(x.shape[1], y.shape[1]):  # n x n Gram matrices are the smaller
        k, m = x @ x.T, y @ y.T
        cross, own_x, own_y = float((k * m).sum()), float(k.norm()), float(m.norm())
    else:
        cross, own_x, own_y = float((y.T @ x).square().sum()), float((x.T @ x).norm()), float((y.T @ y).norm())
    longest = own_x * own_y
    return min(1.0, cross / longest) if longest > 0 else math.nan


@torch.no_grad()
def features(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> Tensor:
    """(rows, p): the model's output for each example, or for its tokens that are not padding.

    A batch gives at most four rows an example, spread evenly, since a language model's output is large. It is captured where
    the model's output enters the task's loss, so that this works for any task and any batch.
    """
    seen: list[Tensor] = []
    rows: list[Tensor] = []
    model.eval()
    hook = model.register_forward_hook(lambda module, inputs, output: seen.append(_scores(output)))
    try:
        for batch in batches:
            seen.clear()
            examples = len(loss(model, batch))
            rows.append(_spread(_flat(seen[-1], batch), _ROWS_EACH * examples))
    finally:
        hook.remove()
    return torch.cat(rows)


def _scores(output: Any) -> Tensor:
    """The logits in a model's output, start and end logits side by side."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    start, end = getattr(output, "start_logits", None), getattr(output, "end_logits", None)
    if isinstance(start, Tensor) and isinstance(end, Tensor):
        return torch.stack([start, end], dim=-1)
    raise ConfigError(
        f"evaluation.diagnostics = 'drift' compares logits, and the model gives a {type(output).__name__} without any; "
        "leave it out"
    ).about("evaluation.diagnostics", "drift", "a model that gives logits")


def _flat(scores: Tensor, batch: Batch) -> Tensor:
    """(rows, p): the last axis holds features, and every place before it is a row."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if scores.ndim == 1:
        return scores[:, None]
    if isinstance(mask, Tensor) and scores.shape[:-1] == mask.shape:
        return scores[mask.bool()]
    return scores.reshape(-1, scores.shape[-1])


def _spread(rows: Tensor, most: int) -> Tensor:
    """At most `most` of the rows."""
    chosen = torch.linspace(0, len(rows) - 1, min(most, len(rows))).long()
    return rows[chosen.to(rows.device)].cpu()
