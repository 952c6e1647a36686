"""The number of examples of each class at a client, from its step of AdamW or SGD.

After Wainakh et al. 2022 (LLG: signs and sizes of the last layer's gradient). AdamW's first step is lr g / (|g| + eps), whose
size is lr unless g is tiny; so `label_counts` does not apply to it. A lying server makes g tiny. With W = 0, V = 0, c = 0 and
b = atanh(a), every hidden unit has the value a for every text, every class has probability 1 / k, and

    g_V[j, i] = a (1 / k - n_j / B),        step = -lr g / (|g| + eps)

With a far below eps the step is linear in g, and the counts are read exactly. This attack is the project's own; Shi et al. 2026
(NeuroImprint) avoid the same obstacle by moving each unit once. By the second step of AdamW the hidden layer has moved, and the
counts are lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.lying.head import Head
from secure_fed.tensors.tensors import Tensors

EPS = 1e-8  # of torch's AdamW
SMALL = {"adamw": 1e-10, "sgd": 0.5}  # a, by the optimiser


def flat(head: Head, optimizer: str) -> Tensors:
    """The tensors of a head with the same output for every text, and hidden units at a."""
    b = torch.full((head.hidden,), math.atanh(SMALL[optimizer]), dtype=torch.float64)
    v = torch.zeros(head.classes, head.hidden)
    return head.tensors(torch.zeros(head.hidden, head.width), b, v, torch.zeros(head.classes))


def counts(head: Head, update: Tensors, optimizer: str, lr: float, steps: float, examples: int) -> Tensor:
    """(classes,) integers that sum to `examples`, closest to the update's values.

    steps: the number of steps at rate `lr` with the same total length. Exact for one step; for several steps of SGD an
    approximation that neglects the movement of the last bias.
    """
    _, _, v, _ = head.changes(update)
    step = -v.mean(1) / (lr * steps)
    gradient = step * EPS / (1 - step.abs()).clamp_min(1e-3) if optimizer == "adamw" else step
    shares = 1 / head.classes - gradient / SMALL[optimizer]
    return whole(shares, examples)


def whole(shares: Tensor, examples: int) -> Tensor:
    """Shares as integer counts of `examples`: rounded down, the remaining ones to the largest remainders."""
    wanted = shares.clamp_min(0.0)
    wanted = examples * (wanted / wanted.sum() if wanted.sum() > 0 else torch.full_like(wanted, 1 / len(wanted)))
    low = wanted.floor()
    left = examples - int(low.sum())
    order = (wanted - low).argsort(descending=True)
    low[order[:left]] += 1
    return low.long()
