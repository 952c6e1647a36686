"""The bound on what one client can change: its contribution, clipped to the clip norm, before any noise."""

from __future__ import annotations

from functools import cache, partial

import torch

from secure_fed.errors import ConfigError
from secure_fed.rounds.protection import Protection
from secure_fed.tensors.tensors import Layout, Tensors


def clipped(contribution: Tensors, clip_norm: float, protection: Protection, *, nothing: bool) -> Tensors:
    """The contribution clipped in its mechanism's norm, with the mechanism's counters.

    nothing: send zeros, because no budget is left. Where contributions are clipped, one that is not finite becomes zeros, too.
    ConfigError for a mechanism whose `scale` does not keep to the clip norm.
    """
    mechanism = protection.contribution_mechanism
    if protection.placement.bounds_contribution:
        contribution = protection.measurable(contribution)
    norm = cache(partial(_norm, contribution, mechanism.order))
    factor = mechanism.scale(norm, clip_norm)
    if protection.given and factor != 0.0 and not abs(factor) * norm() <= clip_norm:  # a NaN fails too
        raise ConfigError(
            f"{type(mechanism).__name__}.scale makes contributions longer than the clip norm, which bounds what one client can "
            "change: return privacy.mechanisms.clip_factor(norm(), clip_norm), or less"
        ).about("mechanism", type(mechanism).__name__, "a scale that keeps contributions below the clip norm")
    if factor == 0.0 or nothing:
        contribution = _zeros(contribution)
    elif factor != 1.0:
        contribution = contribution * factor
    return contribution | mechanism.counted(norm, clip_norm)


def _norm(contribution: Tensors, order: float) -> float:
    """The norm over all tensors together, in float64."""
    if order == 2:
        return contribution.norm()
    flat = Layout.of(contribution).flatten(contribution, torch.float64)
    return float(torch.linalg.vector_norm(flat, order))


def _zeros(like: Tensors) -> Tensors:
    return Tensors((name, torch.zeros(shape)) for name, shape in Layout.of(like).entries)
