"""Rounds of any method on a small BERT, with random changes in place of training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from secure_fed.config import MethodConfig
from secure_fed.methods import build, card
from secure_fed.methods.method import Method, State
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Tensors
from tests.contracts.runs import OPTIONS
from tests.secure_fed import small_models

RANK = 3
HEAD_PREFIXES = ("classifier.", "bert.pooler.")


def method_of(name: str, **settings: object) -> Method:
    own = {"rank": RANK, "alpha": 6.0, "bottleneck": 4, **OPTIONS.get(name, {})}
    if name == "fra_then_ffa":
        own["switch_round"] = 2
    read = {option: value for option, value in own.items() if option in card(name).options}
    return build(MethodConfig(name=name, **{**read, **settings}))  # type: ignore[arg-type]


def start(method: Method, seed: int = 7) -> State:
    model = small_models.make("bert")
    return State(method.prepare(model, small_models.head_of(model), seed))


def trained(method: Method, state: State, seed: int, size: float = 0.1) -> Tensors:
    """The trainable tensors plus random changes, in place of local training."""
    generator = torch.Generator().manual_seed(seed)
    names = method.plan(state).trainable
    return Tensors(
        (n, state.tensors.tensor(n) + size * torch.randn(state.tensors[n].shape, generator=generator)) for n in names
    )


def means_of(method: Method, state: State, afters: Sequence[Tensors]) -> dict[str, Tensors]:
    """The mean of the clients' contributions in each pass."""
    means: dict[str, Tensors] = {}
    for pass_name in method.plan(state).passes:
        total = PlainSum(method.layout(state, pass_name))
        for after in afters:
            total.add(method.contribute(pass_name, state.tensors, after, means))
        means[pass_name] = total.total() * (1 / len(afters))
    return means


def nothing(method: Method, state: State) -> dict[str, Tensors]:
    """The means of all passes over one client that changed nothing."""
    return means_of(method, state, [state.tensors.select(method.plan(state).trainable)])


def one_round(method: Method, state: State, clients: int = 4) -> State:
    afters = [trained(method, state, 100 * state.round + client) for client in range(clients)]
    return method.apply(state, means_of(method, state, afters))


def head(tensors: Tensors) -> Tensors:
    """The classifier's tensors, which train in full in every method and every round."""
    return tensors.select(["classifier.bias", "classifier.weight"])
