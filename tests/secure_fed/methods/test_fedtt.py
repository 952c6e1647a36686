"""FedTT and FedTT+: the tensors that train and are sent in each round. The papers' counts: `test_parameter_table.py`."""

from __future__ import annotations

import re

import torch

from secure_fed.config import MethodConfig
from secure_fed.methods import build
from secure_fed.methods.fedtt_plus import moving, turn
from secure_fed.methods.method import CHANGE, Method, State
from secure_fed.tensors.tensors import Layout, Tensors
from tests.secure_fed import small_models
from tests.secure_fed.methods.rounds import one_round

FEDTT, PLUS = (build(MethodConfig(name=name, rank=3, bottleneck=4)) for name in ("fedtt", "fedtt_plus"))
PLACE = "roberta.encoder.layer.0.output.dense.tensor_train"
HEAD = {"classifier.dense.bias", "classifier.out_proj.weight", "classifier.out_proj.bias"}


def start(method: Method, architecture: str = "roberta") -> State:
    model = small_models.make(architecture)
    return State(method.prepare(model, small_models.head_of(model), 7))


def test_everything_trains_and_travels_but_the_weight_a_train_is_added_to() -> None:
    state = start(FEDTT)
    plan = FEDTT.plan(state)
    rest = {"classifier.dense.weight"}
    assert set(plan.trainable) == set(plan.down) == set(state.tensors) - rest
    assert FEDTT.layout(state, CHANGE) == Layout.of(state.tensors.without(rest))
    cores = [f"core_{j}" for j in range(4)]
    heads = {name for name in plan.trainable if name.startswith("classifier.")}
    assert heads == HEAD | {f"classifier.dense.tensor_train.{core}" for core in cores}
    inside = {name for name in plan.trainable if name.startswith(PLACE)}
    assert inside == {f"{PLACE}.{side}.{part}" for side in ("down", "up") for part in ("bias", *cores)}
    assert not [name for name in start(PLUS).tensors if re.search(r"tensor_train.*bias", name)]


def test_without_a_square_layer_the_head_trains_as_it_is() -> None:
    state = start(FEDTT, "llama")
    assert set(FEDTT.plan(state).trainable) == set(state.tensors)
    assert "score.weight" in state.tensors


def test_the_cores_of_every_round() -> None:
    """By the rule as printed in the paper, the last core but one would never train."""
    five = [(1, 2, 5), (1, 3, 5), (1, 4, 5), (1, 2, 5), (1, 3, 5), (1, 4, 5), (1, 2, 5)]
    six = [(1, 2, 6), (1, 3, 6), (1, 4, 6), (1, 5, 6), (1, 2, 6), (1, 3, 6), (1, 4, 6)]
    assert [turn(5, t) for t in range(7)] == five
    assert [turn(6, t) for t in range(7)] == six
    assert [turn(3, t) for t in range(3)] == [(1, 2, 3)] * 3
    assert [turn(2, t) for t in range(3)] == [(1, 2)] * 3
    assert [turn(1, t) for t in range(3)] == [(1,)] * 3
    for cores in (4, 5, 6, 8):
        assert {core for t in range(cores - 2) for core in turn(cores, t)} == set(range(1, cores + 1))


def test_turns_go_by_each_trains_own_length() -> None:
    names = [f"a.tensor_train.down.core_{j}" for j in range(5)] + [f"b.tensor_train.core_{j}" for j in range(6)]
    tensors = Tensors((name, torch.zeros(1)) for name in [*names, "b.weight", "b.bias", "core_0"])
    assert set(moving(tensors, [3])) == {
        *(f"a.tensor_train.down.core_{j}" for j in (0, 1, 4)),
        *(f"b.tensor_train.core_{j}" for j in (0, 4, 5)),
        "b.bias",
        "core_0",  # not a tensor train's core
    }


def test_up_go_three_cores_and_the_head_and_down_all_that_ever_moved() -> None:
    """The tensors sent down complete the initial state to the server's state, for a client drawn for the first time."""
    initial = state = start(PLUS)
    for t, r in enumerate((2, 3, 2, 3, 2)):
        plan = PLUS.plan(state)
        assert PLUS.layout(state, CHANGE) == Layout.of(state.tensors.select(plan.trainable))
        assert {name for name in plan.trainable if name.startswith(PLACE)} == {
            f"{PLACE}.{side}.core_{j - 1}" for side in ("down", "up") for j in (1, r, 4)
        }
        head = {name for name in plan.trainable if name.startswith("classifier.")}
        assert head == HEAD | {f"classifier.dense.tensor_train.core_{j - 1}" for j in (1, r, 4)}
        joined = initial.tensors | state.tensors.select(plan.down)
        assert joined.to_bytes() == state.tensors.to_bytes(), t
        everything = set(state.tensors) - {"classifier.dense.weight"}
        assert (set(plan.down) == everything) == (t >= 1), "trains of four cores have moved whole after two rounds"
        state = one_round(PLUS, state)
