"""The protocol of a federated method: the tensors that train and travel, a client's contribution, and the step from means.

A method only ever sees **means of contributions**, never one client's, and a contribution is always a **change**, never a
parameter. So the same method runs on a plain sum, on a masked sum, and on a clipped and noised sum.

A round is a list of linear passes. Most methods have one, "change". A method with two (a sketch and its completion, say)
gets the means of earlier passes when it makes the contribution of a later one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import nn

from secure_fed.learning.models.adapters.lora import LoraForm
from secure_fed.learning.tasks.task import Loss
from secure_fed.tensors.tensors import Layout, Tensors

CHANGE = "change"


@dataclass(frozen=True)
class State:
    """The global state after `round` finished rounds.

    tensors: everything the method owns (adapter and head), frozen members included.
    memory: what the server remembers of earlier rounds, such as its optimiser's moments; clip_norm: what the next round's
    contributions are clipped to (public, and infinite without privacy). Neither is a method's business.
    """

    tensors: Tensors
    round: int = 0
    memory: Tensors = field(default_factory=Tensors)
    clip_norm: float = math.inf


@dataclass(frozen=True)
class RoundPlan:
    """The tensors and the passes of one round: every party can compute it from the state's round and the method alone.

    trainable: names that local training moves. down: names sent to clients (the rest of the state they
    have had since `prepare`). passes: names of the linear passes, in order.
    """

    trainable: tuple[str, ...]
    down: tuple[str, ...]
    passes: tuple[str, ...] = (CHANGE,)


@dataclass(frozen=True)
class Card:
    """The description of a method that `secure-fed methods` prints.

    mean_exact: whether the mean of the contributions is the mean of what the clients' models became, so that nothing
    is lost or made up by averaging. options: the keys of [method] that this method reads and others may not. units: whom
    differential privacy can protect; refusals: for every other unit, why it cannot. memoryless: why a server optimiser that
    adds up the means of several rounds cannot be used; empty where it can. needs_means: likewise, why a median of
    contributions, or a mean of some of them, cannot stand in for their mean. lr: see `lr_of`. head_factor: the learning
    rate of the head's last layer over that of the rest, where `training.head_factor` is not set.
    """

    name: str
    paper: str
    travels: str
    mean_exact: bool
    options: tuple[str, ...] = ()
    units: tuple[str, ...] = ("client", "example", "group")
    refusals: Mapping[str, str] = field(default_factory=dict)
    memoryless: str = ""
    needs_means: str = ""
    lr: float = 5e-3
    head_factor: float = 3.0

    def lr_of(self, width: int | None) -> float:
        """The learning rate of AdamW where `training.lr` is not set: `lr`, and lr 256 / width of a model wider than 256.

        A step of AdamW moves every weight by about lr, so what it adds to a layer's output grows with the layer's width.
        """
        return self.lr * min(1.0, _NARROW / width) if width else self.lr

    def head_factor_of(self, width: int | None) -> float:
        """The rate of the head's last layer over that of the rest where `training.head_factor` is not set: 1 up to width 256.

        Three times suits an encoder of width 384, and costs the built-in one of 128 two to nine points on few notes.
        """
        return self.head_factor if width and width > _NARROW else 1.0


class Method(Protocol):
    """A way to fine-tune in a federation: what trains, what travels, and how it is combined. Implementations are frozen
    dataclasses; nothing in them changes during a run.
    """

    @property
    def card(self) -> Card: ...

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


@runtime_checkable
class FromSums(Protocol):
    """A method that makes a state, where means are noised, from the start and the sum of all steps so far."""

    def from_sums(self, state: State) -> bool:
        """Whether the round after `state` is such a round: `apply` is then given the tensors of the start under that round's
        number, the sums of all steps, and the standard deviation of the noise on each coordinate of the sums."""


@runtime_checkable
class Settling(Protocol):
    """A method that settles settings of its own which were left open. They stand in the run's configuration from then on."""

    def settings(self, rounds: int) -> dict[str, Any]:
        """Those settings of [method], by name. Refuses what a run of so many rounds cannot have."""


@runtime_checkable
class Blending(Protocol):
    """A method whose tensors cannot be averaged over rounds entry by entry."""

    def blended(self, mean: Tensors, latest: Tensors, weight: float) -> Tensors:
        """The tensors of (1 - weight) of one model and `weight` of another, of one run."""


@runtime_checkable
class Filtering(Protocol):
    """A method that takes only a part of a noised release into the model, the same part whatever the noise is."""

    def taken_in(self, state: State) -> int:
        """Of how many numbers a round's noise can reach the next model: the dimension of that part."""


@runtime_checkable
class Shrinking(Protocol):
    """A method whose state holds tensors of fewer and fewer entries. It has one pass a round, and the same names in all."""

    def admits(self, round_: int, initial: Tensors, tensors: Tensors) -> bool:
        """Whether `tensors` may be the state after so many rounds, going by names and shapes."""


def fits(method: Method, initial: Tensors, state: State) -> bool:
    """Whether `state` may be one of a run that began with `initial`, going by names and shapes."""
    if isinstance(method, Shrinking) and Layout.of(state.tensors) != Layout.of(initial):
        return method.admits(state.round, initial, state.tensors)
    return Layout.of(state.tensors) == Layout.of(initial)


@runtime_checkable
class Contextual(Protocol):
    """A method in whose model a client puts something of its own data."""

    def context(self, initial: Tensors, examples: Sequence[Any]) -> Tensors:
        """The tensors that this client's model has, while it trains, in place of the state's of the same names.

        These do not train and never travel: everywhere else the state's own are used.
        """


@runtime_checkable
class OwnObjective(Protocol):
    """A method that trains on something else than the task's loss."""

    def objective(self, loss: Loss) -> Loss:
        """The loss (model, batch) -> (B,) to train on, of the task's."""


def loss_of(method: Method, loss: Loss) -> Loss:
    """The loss that clients train on, made of the task's."""
    return method.objective(loss) if isinstance(method, OwnObjective) else loss


@runtime_checkable
class LoraShaped(Protocol):
    """A method whose state is a LoRA adapter, so that an export is a folder that PEFT loads."""

    def as_lora(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """`tensors`, of a run that began with `initial`, as factors."""


_NARROW = 256  # LoRA: 0.005 suits the built-in encoder of width 128, and this makes it 0.0033 for one of 384, where 0.003 does
