"""FedTT+: the cores that train in each round, the tensors sent, and the paper's counts."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from transformers import RobertaConfig, RobertaForSequenceClassification

from secure_fed.config import MethodConfig, RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.loading import head_names
from secure_fed.methods import build
from secure_fed.methods.fedtt_plus import moving, turn
from secure_fed.methods.method import CHANGE, State
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen
from tests.contracts import runs
from tests.secure_fed import small_models
from tests.secure_fed.methods.rounds import means_of, one_round, trained
from tests.secure_fed.methods.test_fedtt import base, meta, trainable

METHOD = build(MethodConfig(name="fedtt_plus", rank=3, bottleneck=4))
PLACE = "roberta.encoder.layer.0.output.dense.tensor_train"
HEAD = {"classifier.dense.bias", "classifier.out_proj.weight", "classifier.out_proj.bias"}


def start() -> State:
    model = small_models.make("roberta")
    return State(METHOD.prepare(model, small_models.head_of(model), 7))


def test_the_cores_of_every_round() -> None:
    five = [(1, 2, 5), (1, 3, 5), (1, 4, 5), (1, 2, 5), (1, 3, 5), (1, 4, 5), (1, 2, 5)]
    six = [(1, 2, 6), (1, 3, 6), (1, 4, 6), (1, 5, 6), (1, 2, 6), (1, 3, 6), (1, 4, 6)]
    assert [turn(5, t) for t in range(7)] == five
    assert [turn(6, t) for t in range(7)] == six
    assert [turn(3, t) for t in range(3)] == [(1, 2, 3)] * 3
    assert [turn(2, t) for t in range(3)] == [(1, 2)] * 3
    assert [turn(1, t) for t in range(3)] == [(1,)] * 3


@pytest.mark.parametrize("cores", [4, 5, 6, 8])
def test_every_core_gets_its_turn(cores: int) -> None:
    """By the rule as printed in the paper, the last core but one would never train."""
    assert {core for t in range(cores - 2) for core in turn(cores, t)} == set(range(1, cores + 1))


def test_turns_go_by_each_trains_own_length() -> None:
    names = [f"a.tensor_train.down.core_{j}" for j in range(5)] + [f"b.tensor_train.core_{j}" for j in range(6)]
    tensors = Tensors((name, torch.zeros(1)) for name in [*names, "b.weight", "b.bias", "core_0"])
    found = set(moving(tensors, [3]))
    assert found == {
        *(f"a.tensor_train.down.core_{j}" for j in (0, 1, 4)),
        *(f"b.tensor_train.core_{j}" for j in (0, 4, 5)),
        "b.bias",
        "core_0",  # not a tensor train's core
    }


def test_up_go_three_cores_and_the_head() -> None:
    state = start()
    for r in (2, 3, 2):
        names = METHOD.plan(state).trainable
        assert METHOD.layout(state, CHANGE) == Layout.of(state.tensors.select(names))
        assert {name for name in names if name.startswith(PLACE)} == {
            f"{PLACE}.{side}.core_{j - 1}" for side in ("down", "up") for j in (1, r, 4)
        }
        head = {name for name in names if name.startswith("classifier.")}
        assert head == HEAD | {f"classifier.dense.tensor_train.core_{j - 1}" for j in (1, r, 4)}
        state = one_round(METHOD, state)


def test_down_goes_all_that_ever_moved() -> None:
    """The tensors sent down complete the initial state to the server's state, for a client drawn for the first time."""
    initial, state = start(), start()
    for t in range(5):
        plan = METHOD.plan(state)
        joined = initial.tensors | state.tensors.select(plan.down)
        assert joined.to_bytes() == state.tensors.to_bytes(), t
        assert set(plan.trainable) <= set(plan.down)
        everything = set(state.tensors) - {"classifier.dense.weight"}
        assert (set(plan.down) == everything) == (t >= 1), "trains of four cores have moved whole after two rounds"
        state = one_round(METHOD, state)


def test_the_plan_depends_on_the_round_and_names_alone() -> None:
    state = start()
    for t in (0, 1, 7, 10_000):
        moved = State(state.tensors * 3.0, t)
        assert METHOD.plan(State(state.tensors, t)) == METHOD.plan(moved)


def test_a_round_by_hand() -> None:
    state = one_round(METHOD, start())
    afters = [trained(METHOD, state, seed) for seed in range(3)]
    after = METHOD.apply(state, means_of(METHOD, state, afters)).tensors
    names = set(METHOD.plan(state).trainable)
    for name in state.tensors:
        old = state.tensors.tensor(name)
        if name in names:
            want = sum(one.tensor(name).double() for one in afters) / 3
            assert torch.allclose(after.tensor(name).double(), want, atol=1e-6)
        else:
            assert torch.equal(after.tensor(name), old)


def test_with_one_core_moving_the_mean_is_exact() -> None:
    state = one_round(METHOD, one_round(METHOD, start()))
    core = f"{PLACE}.down.core_1"

    def matrix(tensors: Tensors) -> torch.Tensor:
        product = torch.ones(1, dtype=torch.float64)
        for j in range(4):
            product = torch.tensordot(product, tensors.tensor(f"{PLACE}.down.core_{j}").double(), dims=1)
        return product.reshape(16, 4)

    def spread(names: list[str]) -> float:
        """The relative distance of the train of mean cores from the mean of trains, if these cores differ among clients."""
        ones = [state.tensors | trained(METHOD, state, seed, size=0.5).select(names) for seed in range(4)]
        mean = sum(matrix(one) for one in ones) / 4
        of_means = matrix(state.tensors | ((ones[0] + ones[1] + ones[2] + ones[3]) * 0.25).select(names))
        return float((of_means - mean).norm() / mean.norm())

    assert spread([core]) < 1e-6
    assert spread([core, f"{PLACE}.down.core_0", f"{PLACE}.down.core_3"]) > 0.01


def test_there_are_no_biases_in_the_adapters() -> None:
    assert not [name for name in start().tensors if re.search(r"tensor_train.*bias", name)]


@pytest.mark.parametrize("kind", chosen(["deberta", "roberta"], ["deberta"]))
def test_printed_count_a_round_on_base_models(kind: str) -> None:
    """The paper's 0.02M: the mean over rounds 0 to 2, with the head's tensor train and without the other head tensors."""
    rest = 768 + 2 * 769
    counts = [trainable("fedtt_plus", *base(kind), round_) - rest for round_ in range(3)]
    assert counts == [13_440 + 320, 18_240 + 320, 13_440 + 320]
    assert f"{sum(counts) / 3 / 1e6:.2f}M" == "0.02M"


def test_printed_count_a_round_on_a_large_model() -> None:
    """The 27K of Table 8 counts a round in which the widest of the cores [8, 8, 16, 8, 8] does not train."""
    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model = meta(RobertaConfig(num_labels=2, **shape), RobertaForSequenceClassification)
    count = trainable("fedtt_plus", model, head_names(model)) - (1024 + 2 * 1025)
    assert count == 96 * (40 + 200 + 40) + 80 + 200 + 80
    assert f"{count / 1e3:.0f}K" == "27K"


def test_means_are_not_remembered() -> None:
    config = RunConfig().replace(
        {("method", "name"): "fedtt_plus", ("federation", "server_optimizer"): "momentum"}  # type: ignore[dict-item]
    )
    with pytest.raises(ConfigError, match="each round moves other cores"):
        build(config)


def test_in_a_run_what_rests_is_neither_sent_nor_moved() -> None:
    built = runs.federation(runs.settings("fedtt_plus"))
    kept = runs.States()
    built.callbacks.append(kept)
    events = runs.watch(built)
    built.run()
    states = [built.assembly.initial, *kept.after]
    for before, after in pairwise(states):
        moved = {n for n in before.tensors if not torch.equal(before.tensors.tensor(n), after.tensors.tensor(n))}
        sent = {name for reply in events.replies[before.round, CHANGE].values() for name in reply.contribution}
        assert moved <= sent == set(built.assembly.method.plan(before).trainable) < set(before.tensors)
        assert any(".core_1" in name for name in moved) == (before.round == 0)
