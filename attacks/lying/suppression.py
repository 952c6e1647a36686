"""Eluding a secure sum: all clients but one get a model whose gradient is 0, so the sum is that client's contribution.

After Pasquini et al. 2022 (Eluding secure aggregation: gradient suppression by model inconsistency). Deviation: their dead ReLU
layer is a head with W = b = V = 0 here. Its hidden units are 0 and pass no gradient, so only the last bias moves, and nothing
else in the head or in the adapter below it.
"""

from __future__ import annotations

import torch

from attacks.lying.head import Head
from secure_fed.tensors.tensors import Tensors


def dead(head: Head) -> Tensors:
    """The tensors of a head under which every client's gradient is 0 except for the last bias."""
    w, v = torch.zeros(head.hidden, head.width), torch.zeros(head.classes, head.hidden)
    return head.tensors(w, torch.zeros(head.hidden), v, torch.zeros(head.classes))


def moved(head: Head, update: Tensors) -> float:
    """The largest change of any value except the last bias: 0 for a client that gets `dead`."""
    rest = update.without([f"{head.outer}.bias"])
    return max(float(rest.tensor(name).abs().max()) for name in rest)
