"""The sum of all steps of a run, for methods that estimate from it, and the noise that it carries.

Noise. Round s releases its mean with the noise d_s sum_j w_j Z_(s - j) on each coordinate: Z_0, Z_1, ... independent, of
variance one, w the first column of C^-1 (`privacy.correlation`; 1, 0, 0, ... where rounds are independent). The step of the
server is lr m_s with m_s = b m_(s - 1) + mean_s (b = 0 without momentum). So a step, and the sum of all steps, carry known
combinations of the Z_j: the norm of the coefficients is the standard deviation. A lost round makes no step and adds no noise,
but later rounds subtract its Z_j nevertheless. Everything here is public: rates, clip norms, and which rounds were lost.

State. A state's memory keeps the tensors of the start ("start/..."), the sums ("sum/...") and every d_s ("noise", 0 for a lost
round). It is a function of releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from privacy.entropy import Floats
from secure_fed.methods.method import State
from secure_fed.tensors.tensors import Tensors

_NOISE, _START, _SUM = "noise", "start/", "sum/"


@dataclass(frozen=True)
class NoiseLevels:
    """The standard deviation of the noise on each coordinate of a round's step, and of the sum of all steps up to it."""

    step: float
    total: float


def noise_levels(deviations: Floats, weights: Floats, lr: float, momentum: float = 0.0) -> NoiseLevels:
    """The noise after the latest round. deviations: d_s of every round (T,), 0 for a lost one; weights: w (T,)."""
    from scipy.linalg import toeplitz
    from scipy.signal import lfilter

    rows = np.asarray(deviations)[:, None] * toeplitz(weights, np.zeros(len(weights)))  # of the means: (T, T)
    steps = lfilter([lr], [1.0, -momentum], rows[np.asarray(deviations) > 0], axis=0)
    if not len(steps):
        return NoiseLevels(0.0, 0.0)
    return NoiseLevels(float(np.linalg.norm(steps[-1])), float(np.linalg.norm(steps.sum(0))))


def deviations(memory: Tensors, round_: int, latest: float) -> Tensor:
    """d_0 ... d_(round_), float64: those in memory, zeros for rounds lost since, and the latest."""
    found = torch.zeros(round_ + 1, dtype=torch.float64)
    if _NOISE in memory:
        earlier = memory.tensor(_NOISE)
        found[: len(earlier)] = earlier
    found[round_] = latest
    return found


def noted(found: Tensor) -> dict[str, Tensor]:
    """The deviations, by their name in a state's memory."""
    return {_NOISE: found}


def added_up(state: State, steps: Mapping[str, Tensors]) -> tuple[Tensors, dict[str, Tensors], Tensors]:
    """The tensors of the start, the sums of all steps of each pass with these, and both as a state's memory keeps them.

    A run that keeps no sum yet starts here.
    """
    begun = any(name.startswith(_SUM) for name in state.memory)
    start = _part(state.memory, _START) if begun else state.tensors
    sums = {
        name: step.dense() + _part(state.memory, _SUM + f"{name}/") if begun else step.dense()
        for name, step in steps.items()
    }
    kept = {_START + name: member for name, member in start.items()}
    kept |= {f"{_SUM}{name}/{each}": member for name, total in sums.items() for each, member in total.items()}
    return start, sums, Tensors(kept)


def _part(memory: Tensors, prefix: str) -> Tensors:
    return Tensors((name.removeprefix(prefix), member) for name, member in memory.items() if name.startswith(prefix))
