"""Membership by a crafted model with hidden units that fire for one text only.

After Nguyen et al. 2023 (active membership inference, AMI: a unit whose gradient is not 0 if and only if the target is in the
batch). Deviation: their two ReLU layers are one window of tanh here, along Fisher's direction between the target and public
texts, so that other texts lie where tanh is flat.

The score is the squared distance that the update moved the units along the target. It is compared with the scores of `NULLS`
simulated clients with public texts only: the verdict is "member" if it is above all of them. A client without the target, whose
texts are like the public ones, gets this verdict with a probability of at most 1 / (NULLS + 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.lying.head import Head
from secure_fed.tensors.tensors import Tensors

NULLS = 19
LEVEL = 1 / (NULLS + 1)
_RIDGE = 1e-3
_FLAT = 12.0  # argument of tanh for a public text
_LOUD = 2.0


def alarm(head: Head, target: Tensor, public: Tensor, limit: float) -> Tensors:
    """The tensors of a head that moves for the target (d,) only. public: (n, d). limit: the largest magnitude of a value."""
    mean = public.mean(0)
    spread = torch.cov(public.T) + _RIDGE * torch.eye(head.width, dtype=torch.float64)
    u = torch.linalg.solve(spread, target - mean)
    u /= u.norm()
    gap = float(target @ u - (public @ u).quantile(0.99))
    slope = _FLAT / max(gap, 1e-3)
    slope = min(slope, 0.999 * limit / max(float(u.abs().max()), abs(float(target @ u))))
    w, b = torch.zeros(head.hidden, head.width, dtype=torch.float64), torch.zeros(head.hidden, dtype=torch.float64)
    w[:] = slope * u
    b[:] = -slope * float(target @ u)
    v = torch.zeros(head.classes, head.hidden, dtype=torch.float64)
    v[0], v[1:] = _LOUD / head.hidden, -_LOUD / head.hidden
    return head.tensors(w, b, v, torch.zeros(head.classes))


def score(head: Head, update: Tensors, target: Tensor) -> float:
    """The squared distance that the units moved along the target, in either direction."""
    w, b, _, _ = head.changes(update)
    return float(torch.cat([w @ target, b]).square().sum())


def is_member(score_: float, nulls: Sequence[float]) -> bool:
    """The verdict, at a false-positive rate of 1 / (len(nulls) + 1)."""
    return score_ > max(nulls)
