"""Traps: units that isolate single examples of a batch, and the texts that they identify.

After Fowl et al. 2022 (Robbing the Fed: bins of one linear measurement) and 2023 (Decepticons: the same for transformers),
Boenisch et al. 2023 (trap weights, Algorithm 1), Zhao et al. 2024 (LoKI: the same behind a sum), and Shi et al. 2026
(NeuroImprint: one unit a text, in adapters and under AdamW). Deviations: their differences of neighbouring ReLU bins are
windows of tanh here, because a head has tanh; a text is identified among candidates, not decoded.

Unit i is tanh(s_i (u x - q_i)), u a direction common to all units and q_i the quantiles of u x over public texts. It moves only
for texts whose u x is within about 1 / s_i of q_i. If this holds for one text x of the batch, row i moves along x: exactly
under SGD, along the signs of x under AdamW, whose steps keep signs and lose sizes. All columns of V are equal, so no unit's
delta is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.lying.head import Head
from secure_fed.tensors.tensors import Tensors

_NARROW = 3.0  # windows to a bin
_LOUDEST = 4.0  # the largest joint output of all traps


def traps(head: Head, public: Tensor, limit: float, seed: int = 0) -> Tensors:
    """The tensors of a head whose units are traps. public: (n, d) inputs of public texts. limit: the largest value allowed."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(head.width, generator=generator, dtype=torch.float64)
    u /= u.norm()
    along = (public @ u).sort().values
    at = (torch.arange(head.hidden, dtype=torch.float64) + 0.5) / head.hidden
    q = torch.quantile(along, at)
    bins = torch.gradient(torch.quantile(along, torch.linspace(0, 1, head.hidden + 2, dtype=torch.float64)))[0][1:-1]
    slopes = _NARROW / bins.clamp_min(1e-4)
    slopes = slopes.clamp_max(min(limit / float(u.abs().max()), limit / float(q.abs().max())) * 0.999)
    v = torch.randn(head.classes, generator=generator, dtype=torch.float64)
    v *= _LOUDEST / head.hidden / v.abs().max()
    outer = v[:, None].expand(-1, head.hidden)
    return head.tensors(slopes[:, None] * u, -slopes * q, outer, torch.zeros(head.classes))


def named(head: Head, update: Tensors, candidates: Tensor, most: int, *, signs: bool) -> list[int]:
    """Indices of the `most` candidates (m, d) closest in direction to rows of the update, the closest first.

    signs: the update is of AdamW, so a row is compared with the signs of a candidate.
    """
    w, b, _, _ = head.changes(update)
    rows = w * torch.sign(b)[:, None]
    heard = rows.norm(dim=1) > 0
    if not heard.any():
        return []
    targets = torch.sign(candidates) if signs else candidates
    cosines = _normed(rows[heard]) @ _normed(targets).T
    return _best(cosines, most)


def _best(cosines: Tensor, most: int) -> list[int]:
    """Each unit names its nearest candidate; returns the names with the highest cosines."""
    best, which = cosines.abs().max(dim=1)
    order = best.argsort(descending=True).tolist()
    return list(dict.fromkeys(int(which[row]) for row in order))[:most]


def _normed(rows: Tensor) -> Tensor:
    lengths = rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    return torch.div(rows, lengths)
