"""What a federated method is: which tensors train and travel, what a client contributes, how a mean becomes a state.

A method only ever sees **means of contributions**, never one client's, and a contribution is always a **change**, never a
parameter. So the same method runs on a plain sum, on a masked sum, and on a clipped and noised sum.

A round is a list of linear passes. Most methods have one, "change". A method with two (a sketch and its completion, say)
gets the means of earlier passes when it makes the contribution of a later one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from secure_fed.adapters.lora import LoraAdapter
from secure_fed.tensors import Layout, Tensors

CHANGE = "change"


@dataclass(frozen=True)
class State:
    """The global state after `round` finished rounds.

    tensors: everything the method owns (adapter and head), frozen members included.
    memory: what the server optimiser remembers; clip_norm: what the next round's contributions are clipped to (public, and
    infinite without privacy). Neither is a method's business.
    """

    tensors: Tensors
    round: int = 0
    memory: Tensors = field(default_factory=Tensors)
    clip_norm: float = math.inf


@dataclass(frozen=True)
class RoundPlan:
    """What one round does: every party can compute it from the state's round and the method alone.

    trainable: names that local training moves. down: names sent to clients (the rest of the state they
    have had since `prepare`). passes: names of the linear passes, in order.
    """

    trainable: tuple[str, ...]
    down: tuple[str, ...]
    passes: tuple[str, ...] = (CHANGE,)


@dataclass(frozen=True)
class Card:
    """What `secure-fed methods` says about a method.

    mean_exact: whether the mean of the contributions is the mean of what the clients' models became, so that nothing
    is lost or made up by averaging. options: the keys of [method] that this method reads and others do not. units: whom
    differential privacy can protect; refusals: for every other unit, why it cannot.
    """

    name: str
    paper: str
    travels: str
    mean_exact: bool
    options: tuple[str, ...] = ()
    units: tuple[str, ...] = ("client", "example", "group")
    refusals: Mapping[str, str] = field(default_factory=dict)


class Method(Protocol):
    """One federated method. Implementations are frozen dataclasses; nothing in them changes during a run."""

    @property
    def card(self) -> Card: ...

    @property
    def adapter(self) -> LoraAdapter: ...

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        """Put the adapter into `model` in place and return every tensor of the initial state.

        head: names of the task head's parameters, which train and travel with the adapter. A pure function of its
        arguments: every party that calls it gets the same tensors.
        """

    def plan(self, state: State) -> RoundPlan: ...

    def layout(self, state: State, pass_name: str) -> Layout:
        """The layout of that pass's contribution, known before any client trained."""

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """A client's change in that pass.

        before: what the client started from (all of the state). after: the trainable tensors, trained. means: the means
        of this round's earlier passes.
        """

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        """The next state from the means of all passes; `round` grows by one.

        noise_std: the standard deviation of the noise that every coordinate of these means carries, independently; 0 is none.
        """


@runtime_checkable
class Reporting(Protocol):
    """A method that has something to say of a round's means, such as what it could not keep of them."""

    def reported(self, means: Mapping[str, Tensors]) -> dict[str, float]:
        """Numbers by name, for the round's record. Of means alone, so that under privacy nothing leaves that had not."""
