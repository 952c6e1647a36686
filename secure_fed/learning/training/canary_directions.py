"""Random directions that an audited unit pulls the model along (Andrew et al. 2023, arXiv 2302.03098).

A direction u is uniform on the unit sphere over all trained tensors together, d numbers in the order of their names. It is
computed from a hash of the unit's name and a seed and stored nowhere; a resumed run and an audit compute it again. If a unit
did not train, nothing depends on its u, so the cosine of u with any release is a coordinate of a uniform point on the sphere:
of mean 0 and variance 1 / d, and almost normal.

A client of direction u ends its training at its start plus L u. An example of direction u has the gradient -L u, from the loss
-L <u, w>, so that descent moves the model along u. With L above the clip norm C the unit changes a sum by C, the most that any
unit can. Sampling, clipping, noise and masks are the same as for all other units.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence

import numpy as np
import torch

from privacy.entropy import Stream
from secure_fed.config import TrainingConfig
from secure_fed.learning.training.local import Job, Train, Trained
from secure_fed.learning.training.objective import Objective
from secure_fed.tensors.tensors import Layout, Tensors


def direction(unit: str, seed: int, layout: Layout) -> Tensors:
    """The direction of a unit: float32, of unit norm over all tensors of the layout together. Each layout has its own."""
    key = hashlib.sha256(json.dumps(["direction of a canary", seed, unit, layout.digest]).encode()).digest()
    normal = Stream(key).normal((layout.size,))
    # Not numpy.linalg.norm: its dot product wakes threads of BLAS, which wait for the cores that train.
    length = math.sqrt(np.square(normal).sum())
    return layout.unflatten(torch.from_numpy(normal / length).to(torch.float32))


def direction_of(job: Job, unit: str, seed: int) -> Tensors:
    """The direction of a unit over the tensors that the job trains, of unit norm.

    At a client of few ranks it is its part of the direction over all ranks, by which scores are computed.
    """
    layout = layout_of(job.before, job.trainable)
    if job.whole is None:
        return direction(unit, seed, layout)
    full = direction(unit, seed, job.whole)
    found = Tensors((name, full.tensor(name)[tuple(map(slice, shape))]) for name, shape in layout.entries)
    return found * (1 / found.norm())


def layout_of(tensors: Tensors, trained: Sequence[str]) -> Layout:
    """The layout of a direction: the tensors that train, in the order of their names."""
    return Layout.of(tensors.select(trained))


def trains_towards(unit: str, seed: int, length: float | None = None) -> Train:
    """Local training of a client of this direction, in place of `local.train`: a step of `length` along it, without examples.

    length: None for the length of the local steps (`length_of_steps`), which bounds the changes of other clients.
    """

    def towards(objective: Objective, job: Job) -> Trained:
        layout = layout_of(job.before, job.trainable)
        far = length_of_steps(layout, job.last, len(job.examples), job.settings, job.lr) if length is None else length
        start = job.before.select(job.trainable).dense()
        return Trained(start + direction_of(job, unit, seed) * far, math.nan)

    return towards


def length_of_steps(layout: Layout, last: Sequence[str], examples: int, settings: TrainingConfig, lr: float) -> float:
    """lr sqrt(d) steps: the distance of AdamW in a client's local training if all steps, near lr a coordinate, agree.

    A coordinate of the head's last layer, whose steps are longer by a factor, counts as the square of this factor.
    """
    numbers = sum(
        math.prod(shape) * (settings.head_times**2 if name in last else 1.0) for name, shape in layout.entries
    )
    steps = settings.epochs * math.ceil(examples / settings.batch) if settings.steps is None else settings.steps
    return lr * math.sqrt(numbers) * max(1, steps)
