"""The protocol of a federated method: the tensors that train and are sent, a client's contribution, and the server's step.

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
    memory: the server's tensors from earlier rounds, such as its optimiser's moments; clip_norm: the norm to which the next
    round's contributions are clipped (public, and infinite without privacy). Methods use neither.
    """

    tensors: Tensors
    round: int = 0
    memory: Tensors = field(default_factory=Tensors)
    clip_norm: float = math.inf


@dataclass(frozen=True)
class RoundPlan:
    """The tensors and the passes of one round: every party can compute it from the state's round and the method alone.

    trainable: names of the tensors that train locally. down: names of the tensors sent to clients (they have the rest of the
    state since `prepare`). passes: names of the linear passes, in order.
    """

    trainable: tuple[str, ...]
    down: tuple[str, ...]
    passes: tuple[str, ...] = (CHANGE,)


@dataclass(frozen=True)
class Card:
    """The description of a method that `secure-fed methods` prints.

    mean_exact: whether the mean of the contributions gives the mean of the clients' trained models, without an averaging
    error. options: the keys of [method] that this method reads and others may not. units: the units that differential privacy
    can protect; refusals: for every other unit, why it cannot. memoryless: why a server optimiser that adds up the means of
    several rounds cannot be used; empty where it can. needs_means: likewise, why a median of contributions, or a mean of some
    of them, cannot replace their mean. lr: see `lr_of`. head_factor: the learning rate of the head's last layer divided by the
    rest's, where `training.head_factor` is not set. reach: the least product of rate and local steps of a run, see `lr_of`.
    decoders: the rate of a model that continues texts, divided by that of an encoder of its width. from_nothing: the least rate
    of a module without a configuration.
    """

    name: str
    paper: str
    travels: str
    mean_exact: bool
    options: tuple[str, ...] = ()
    units: tuple[str, ...] = ("client", "example", "person")
    refusals: Mapping[str, str] = field(default_factory=dict)
    memoryless: str = ""
    needs_means: str = ""
    lr: float = 5e-3
    head_factor: float = 3.0
    reach: float = 0.0
    decoders: float = 1.0
    from_nothing: float = 0.0

    def lr_of(self, width: int | None, steps: float | None = None, *, decoder: bool = False) -> float:
        """The learning rate of AdamW where `training.lr` is not set: `lr`, and lr 256 / width of a model wider than 256.

        A step of AdamW moves every weight by about lr, so the change of a layer's output grows with the layer's width, and in a
        run a weight moves by rate times steps at most. Where a run of so many local `steps` is too short for the method's
        `reach`, the rate is raised to reach / steps, at most fourfold. None: an unknown number of steps. decoder: whether the
        model continues texts, with `decoders` times the rate. A width of 0 is that of the user's own module, which most likely
        is not pre-trained: the rate is `from_nothing` at least, since rates that keep pre-trained weights barely move it.
        """
        rate = self.lr * (self.decoders if decoder else 1.0) * (min(1.0, _NARROW / width) if width else 1.0)
        if width == 0:
            rate = max(rate, self.from_nothing)
        return min(max(rate, self.reach / steps), _MOST_RAISED * rate) if steps else rate

    def head_factor_of(self, width: int | None) -> float:
        """The rate of the head's last layer divided by the rest's, if `training.head_factor` is not set: 1 up to width 256.

        A factor of 3 suits an encoder of width 384, and costs the built-in one of width 128 two to nine points on few notes.
        """
        return self.head_factor if width and width > _NARROW else 1.0


class Method(Protocol):
    """A method of federated fine-tuning: which tensors train, which are sent, and how they are combined. Implementations are
    frozen dataclasses; nothing in them changes during a run.
    """

    @property
    def card(self) -> Card: ...

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        """Put the adapter into `model` in place and return every tensor of the initial state.

        head: names of the task head's parameters, which train and are sent with the adapter. A pure function of its arguments:
        every party that calls it gets the same tensors.
        """

    def plan(self, state: State) -> RoundPlan: ...

    def layout(self, state: State, pass_name: str) -> Layout:
        """The layout of a contribution to this pass, known before any client has trained."""

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """A client's change in this pass.

        before: the state that the client started from. after: the trainable tensors, trained. means: the means of this round's
        earlier passes.
        """

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        """The next state; `round` grows by one.

        means: for each pass the server optimizer's step, which is `server_lr` times the mean of the contributions, or a step of
        momentum or Adam by it. noise_std: the standard deviation of the independent noise on every coordinate of these steps; 0
        without noise.
        """


@runtime_checkable
class Reporting(Protocol):
    """A method that reports figures of a round, such as the share of the means that it lost."""

    def reported(self, means: Mapping[str, Tensors], following: State) -> dict[str, float]:
        """Numbers by name, for the round's record. following: the state after the round.

        They depend on the means and earlier states alone, so under privacy they reveal nothing new.
        """


@runtime_checkable
class FromSums(Protocol):
    """A method that, where means are noised, computes a state from the initial state and the sum of all steps so far."""

    def from_sums(self, state: State) -> bool:
        """Whether the round after `state` is such a round. `apply` then gets the initial tensors with that round's number, the
        sums of all steps, and the standard deviation of the noise on each coordinate of the sums."""


@runtime_checkable
class Settling(Protocol):
    """A method that chooses values for its unset settings. The run's configuration contains them from then on."""

    def settings(self, rounds: int) -> dict[str, Any]:
        """The chosen settings of [method], by name. Refuses values that do not fit a run of `rounds` rounds."""


@runtime_checkable
class Rewriting(Protocol):
    """A method whose server does more to some tensors than to add a mean, so that no client can have its own of these."""

    def rewritten(self, tensors: Tensors) -> Sequence[str]:
        """The names of these tensors in a state with `tensors`."""


@runtime_checkable
class Blending(Protocol):
    """A method whose tensors cannot be averaged over rounds entry by entry."""

    def blended(self, mean: Tensors, latest: Tensors, weight: float) -> Tensors:
        """The weighted mean of two models of one run: (1 - weight) of `mean` and `weight` of `latest`."""


@runtime_checkable
class Filtering(Protocol):
    """A method that uses only a part of a noised release, the same part whatever the noise is."""

    def taken_in(self, state: State) -> int:
        """The dimension of this part: the number of entries of a round's noise that can reach the next model."""


@runtime_checkable
class Shrinking(Protocol):
    """A method whose tensors lose entries over the rounds. It has one pass a round, and the same names in all rounds."""

    def admits(self, round_: int, initial: Tensors, tensors: Tensors) -> bool:
        """Whether `tensors` may be the state after `round_` rounds, judging by names and shapes."""


def fits(method: Method, initial: Tensors, state: State) -> bool:
    """Whether `state` may belong to a run that began with `initial`, judging by names and shapes."""
    if isinstance(method, Shrinking) and Layout.of(state.tensors) != Layout.of(initial):
        return method.admits(state.round, initial, state.tensors)
    return Layout.of(state.tensors) == Layout.of(initial)


@runtime_checkable
class Contextual(Protocol):
    """A method whose model contains tensors computed from the client's own data while it trains."""

    def context(self, initial: Tensors, examples: Sequence[Any]) -> Tensors:
        """The tensors that replace the state's tensors of the same names in this client's model while it trains.

        They do not train and are never sent: everywhere else the state's tensors are used.
        """


@runtime_checkable
class OwnObjective(Protocol):
    """A method that trains on another loss than the task's."""

    def objective(self, loss: Loss) -> Loss:
        """The training loss (model, batch) -> (B,), built from the task's loss."""


def loss_of(method: Method, loss: Loss) -> Loss:
    """The loss that clients train on, built from the task's loss."""
    return method.objective(loss) if isinstance(method, OwnObjective) else loss


@runtime_checkable
class LoraShaped(Protocol):
    """A method whose state is a LoRA adapter, so that an export is a folder that PEFT loads."""

    def as_lora(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """`tensors`, of a run that began with `initial`, as factors."""


_NARROW = 256  # LoRA: 0.005 suits the built-in encoder of width 128; width 384 then gets 0.0033, where 0.003 suits
_MOST_RAISED = 4.0
