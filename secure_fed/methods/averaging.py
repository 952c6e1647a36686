"""Parameters that are averaged: a client contributes how it changed them, the server adds the mean change.

This is federated averaging (McMahan et al., 2017) written in changes: with every client starting from the same
parameters p, p + mean(p_i - p) = mean(p_i).
"""

from __future__ import annotations

from dataclasses import replace

from secure_fed.methods.method import State
from secure_fed.tensors import Tensors


def change(before: Tensors, after: Tensors) -> Tensors:
    """after - before, for the names in `after`."""
    return after - before.select(after)


def moved(tensors: Tensors, mean: Tensors) -> Tensors:
    """`tensors` with the mean change added to the names it has; the others are the same objects."""
    return tensors | (tensors.select(mean) + mean)


def next_state(state: State, tensors: Tensors) -> State:
    """One round later, with these tensors."""
    return replace(state, tensors=tensors, round=state.round + 1)
