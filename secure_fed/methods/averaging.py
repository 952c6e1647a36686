"""Parameters that are averaged: a client contributes how it changed them, the server adds the mean change.

This is federated averaging (McMahan et al., 2017) written in changes: with every client starting from the same
parameters p, p + mean(p_i - p) = mean(p_i).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import nn

from secure_fed.learning.models.adapters.parameters import read
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors.tensors import Layout, Tensors


class Adapter(Protocol):
    """Modules that are put into a model. Implementations are frozen dataclasses of settings."""

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> Sequence[str]:
        """Put the adapter into `model` in place and return the names of its parameters, which need not all train.

        Of the model's parameters those of the adapter and of the head are left to train. A pure function of its arguments.
        """


@dataclass(frozen=True)
class Averaged:
    """A method that trains its adapter and the head whole, and averages them."""

    card: Card
    adapter: Adapter

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        names = self.adapter.inject(model, head, seed)
        return read(model, dict.fromkeys([*names, *head]))

    def plan(self, state: State) -> RoundPlan:
        return RoundPlan(trainable=tuple(state.tensors), down=tuple(state.tensors))

    def layout(self, state: State, pass_name: str) -> Layout:
        return Layout.of(state.tensors)

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        return change(before, after)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        return next_state(state, moved(state.tensors, means[CHANGE]))


def change(before: Tensors, after: Tensors) -> Tensors:
    """after - before, for the names in `after`."""
    return after - before.select(after)


def moved(tensors: Tensors, mean: Tensors) -> Tensors:
    """`tensors` with the mean change added to the names it has; the others are the same objects."""
    return tensors | (tensors.select(mean) + mean)


def next_state(state: State, tensors: Tensors) -> State:
    """One round later, with these tensors."""
    return replace(state, tensors=tensors, round=state.round + 1)
