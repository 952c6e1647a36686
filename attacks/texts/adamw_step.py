"""The gradient behind a step of AdamW, recovered from the step although AdamW divides the gradient by its size.

AdamW's first step from fresh memory, without weight decay, changes every parameter by

    -lr g / (|g| + EPS)          EPS = 1e-8

so all changes have a size of about lr, but each is smaller by a share that reveals |g|: with r = |change| / lr,

    |g| = EPS r / (1 - r)

r is known up to the rounding of the parameter, u |after| / lr, and of the step itself, a few u, with u = 2^-24. The resulting
error of |g| is g^2 / EPS times as large: some per cent of a gradient of 0.001, and all of a gradient of 0.1. So the small
gradients of the lower layers are recovered, and the gradients of the head's bias are not. This method is the project's own. A
client restarts AdamW in each round, so in a round with one local step, that step is a first step.

In an update that was multiplied by f, as by clipping, f lr replaces lr. If the head's gradients are large, the update's largest
change equals f lr, up to EPS / |g|.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from attacks.texts.span import UNIT_ROUNDOFF

EPS = 1e-8  # of torch's AdamW
_ROUNDINGS = 1.0  # of the step's arithmetic, in u of its length
_ALIKE = 1e-5
_TRIED = 4096


def factor_of(changes: Iterable[Tensor], lr: float) -> float:
    """f of an update, from its largest change; 1 if that is the size of a step with a large gradient."""
    longest = max((float(change.abs().max()) for change in changes if change.numel()), default=0.0)
    factor = longest / _longest_steps(lr)[1]
    return 1.0 if abs(factor - 1) < _ALIKE else factor


@cache
def _longest_steps(lr: float) -> tuple[float, float]:
    """The mean and the largest step of gradients for which EPS is negligible: lr, up to the rounding of AdamW's constants."""
    parameter = nn.Parameter(torch.zeros(_TRIED))
    parameter.grad = 1e3 * torch.rand(_TRIED, generator=torch.Generator().manual_seed(0)) + 1e3
    AdamW([parameter], lr, weight_decay=0.0).step()
    steps = parameter.detach().abs().double()
    return float(steps.mean()), float(steps.max())


def undone(change: Tensor, before: Tensor, lr: float, factor: float = 1.0) -> tuple[Tensor, float]:
    """f times the gradient, and the standard deviation of its error on a coordinate, from f times a step's change."""
    step = change.double() / factor
    length = _longest_steps(lr)[0]
    share = step.abs() / length
    doubt = UNIT_ROUNDOFF * ((before.double() + step).abs() / length + _ROUNDINGS * share)
    size = (
        EPS * share / (1 - share).clamp_min(doubt)
    )  # if the remaining share is mere rounding, the size is at least this
    error = factor * size.square() / EPS * doubt
    return -factor * step.sign() * size, float(torch.sqrt(error.square().mean())) if error.numel() else 0.0
