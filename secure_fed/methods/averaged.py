"""Averaged parameters: a client contributes its change of them, and the server adds the mean change.

This is federated averaging (McMahan et al., 2017) written in changes: with every client starting from the same
parameters p, p + mean(p_i - p) = mean(p_i).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from secure_fed.learning.models.adapters.lora import LoraAdapter, LoraForm, Pair, pairs
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors.layout import Layout
from secure_fed.tensors.low_rank import Svd, balanced, truncated
from secure_fed.tensors.tensors import LowRank, Member, Tensors


class Adapter(Protocol):
    """Modules that are put into a model. Implementations are frozen dataclasses of settings."""

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> Sequence[str]:
        """Put the adapter into `model` in place and return the names of its parameters, which need not all train.

        Only the parameters of the adapter and of the head remain trainable. A pure function of its arguments.
        """


@dataclass(frozen=True)
class Averaged:
    """A method that averages the trained tensors of its adapter and the head: by default all of them."""

    adapter: Adapter
    card: Card

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        names = self.adapter.inject(model, head, seed)
        return read(model, dict.fromkeys([*names, *head]))

    def trained(self, state: State) -> Tensors:
        """The tensors that clients train in the round and send."""
        return state.tensors

    def plan(self, state: State) -> RoundPlan:
        names = tuple(self.trained(state))
        return RoundPlan(trainable=names, down=names)

    def layout(self, state: State, pass_name: str) -> Layout:
        return Layout.of(self.trained(state))

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        return change(before, after)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        return next_state(state, moved(state.tensors, means[CHANGE]))


@dataclass(frozen=True)
class AveragedLora(Averaged):
    """An `Averaged` method whose adapter is LoRA's, so that PEFT can load its exports."""

    adapter: LoraAdapter

    def blended(self, mean: Tensors, latest: Tensors, weight: float) -> Tensors:
        """The best rank-r approximation of the weighted mean of the products B A; the rest entry by entry.

        The mean factors would not give the mean product, and are meaningless where a method refactors products in every round.
        If one factor is the same, the other is averaged, exactly. So is A if B is personal: the server's own B never changes.
        """
        found = mean + (latest - mean) * weight
        for pair in pairs(mean):
            (a, b), (a_2, b_2) = ((side.tensor(pair.a), side.tensor(pair.b)) for side in (mean, latest))
            if torch.equal(a, a_2) or torch.equal(b, b_2):
                continue
            product = LowRank(b * (1 - weight), a) + LowRank(b_2 * weight, a_2)
            found |= factored(pair, product, a, b, self.factors)
        return found

    def factors(self, product: Svd) -> tuple[Tensor, Tensor]:
        """B and A of a mean product, split as in the method's own rounds."""
        return balanced(product)

    def as_lora(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """A and B, or their change if they started as parts of W."""
        return self.adapter.form(initial, tensors)


def factored(
    pair: Pair, product: Member, a: Tensor, b: Tensor, split: Callable[[Svd], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """The factors of the best rank-r approximation of a product, by name, of the shapes and types of A (r, n) and B (m, r)."""
    new_b, new_a = split(truncated(product, a.shape[0]))
    return {pair.a: new_a.to(a.dtype).contiguous(), pair.b: new_b.to(b.dtype).contiguous()}


def change(before: Tensors, after: Tensors) -> Tensors:
    """after - before, for the names in `after`."""
    return after - before.select(after)


def moved(tensors: Tensors, mean: Tensors) -> Tensors:
    """`tensors` with the mean change added to those that it names; the others are the same objects."""
    return tensors | (tensors.select(mean) + mean)


def next_state(state: State, tensors: Tensors) -> State:
    """The state one round later, with these tensors."""
    return replace(state, tensors=tensors, round=state.round + 1)
