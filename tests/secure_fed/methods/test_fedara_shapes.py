"""The shapes that FedARA's tensors may have in each round, the combinations of settings, and exports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.triplet import TripletAdapter, triplets
from secure_fed.methods import build
from secure_fed.methods.fedara import Budget
from secure_fed.methods.method import Shrinking, fits
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.cells import every
from tests.secure_fed import small_models, toys
from tests.secure_fed.methods.rounds import start
from tests.secure_fed.methods.test_fedara import CLIENT, method_of, one_round, ranks

# The shapes that a state may have.


def test_every_state_of_a_run_is_admitted_after_its_rounds_and_none_too_early() -> None:
    for masks in ("votes", "global"):
        method = method_of(**{"method.masks": masks})
        assert isinstance(method, Shrinking)
        first = start(method)
        state = first
        for _ in range(7):
            state = one_round(method, state)
            assert method.admits(state.round, first.tensors, state.tensors)
            assert fits(method, first.tensors, state)
            if sum(ranks(state.tensors)) < 16:
                assert not method.admits(1, first.tensors, state.tensors), "in the warm-up"
        assert not method.admits(7, first.tensors, first.tensors), "after the last"


def reshaped(tensors: Tensors, changes: dict[str, tuple[int, ...]]) -> Tensors:
    return tensors | {name: torch.zeros(shape) for name, shape in changes.items()}


def test_shapes_that_are_no_state_are_not_admitted() -> None:
    method = method_of()
    initial = start(method).tensors
    one, two, *_ = triplets(initial)
    honest = reshaped(initial, {one.a: (1, 16), one.e: (1,), one.b: (16, 1)})
    assert method.admits(2, initial, honest)
    assert not method.admits(0, initial, honest)
    assert method.admits(0, initial, initial)
    wrong: tuple[dict[str, tuple[int, ...]], ...] = (
        {one.a: (2, 16)},  # another number of ranks than E and B
        {one.e: (2,)},
        {one.b: (16, 2)},
        {one.a: (1, 15)},
        {one.e: (1, 1)},
        {one.e: ()},
        {two.a: (5, 16), two.e: (5,), two.b: (16, 5)},  # more ranks than at the start
        {"classifier.weight": (2, 16)},
    )
    for changes in wrong:
        assert not method.admits(2, initial, reshaped(honest, changes)), changes
    none: dict[str, tuple[int, ...]] = {}
    for t in triplets(initial):
        none |= {t.a: (0, 16), t.e: (0,), t.b: (16, 0)}
    assert not method.admits(6, initial, reshaped(initial, none)), "one always stays"
    assert not method.admits(2, initial, honest.without([one.e]))
    assert not method.admits(2, initial, honest | {"x": torch.zeros(1)})
    assert not method.admits(2, initial, honest | {one.e: LowRank(torch.zeros(1, 1), torch.zeros(1, 1))})


# Settings.


@pytest.mark.parametrize(
    ("rounds", "phases"), [(1, (0, 0)), (2, (0, 0)), (4, (1, 1)), (7, (1, 2)), (8, (2, 5)), (100, (2, 5))]
)
def test_a_run_of_any_length_has_phases_that_fit(rounds: int, phases: tuple[int, int]) -> None:
    unset = {"method.warmup_rounds": None, "method.final_rounds": None}
    budget = method_of(**{"federation.rounds": rounds, **unset}).budget
    assert (budget.warmup, budget.final) == phases
    assert budget.ranks(rounds, 3) == 3 * budget.last


@every(
    ("more", "said"),
    [
        (
            {"federation.rounds": 2},
            r"warmup_rounds = 1 and method\.final_rounds = 1 leave none of federation\.rounds = 2",
        ),
        ({"method.final_rank": 5}, r"final_rank = 5 is above method\.rank = 4"),
        ({"method.masks": "votes", **CLIENT}, r"'votes' is refused with privacy\.unit = 'client'.*'global'"),
        ({"federation.server_lr": 0.5}, r"server_lr = 0.5 would scale the votes.*'global'"),
        ({"federation.server_optimizer": "adam"}, r"server_optimizer = 'adam' .*'fedara': its tensors shrink"),
        ({"method.vote_threshold": 0.25, "method.masks": "global"}, r"vote_threshold = 0.25 has no effect"),
        ({"method.vote_threshold": 0.25, **CLIENT}, r"vote_threshold = 0.25 has no effect"),
        (
            {"secure_aggregation.enabled": True, "secure_aggregation.range": 0.5},
            r"range = 0.5 is below 1, the value of a vote.*'global'",
        ),
        ({"method.switch_round": 2}, r"switch_round = 2 has no effect with method\.name = 'fedara'"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        method_of(**more)


def test_settings_reach_the_method() -> None:
    method = method_of(**{"method.final_rank": 2, "method.rslora": True, "method.vote_threshold": 0.25})
    assert method.adapter == TripletAdapter(LoraAdapter(4, 8.0, True))
    assert method.budget == Budget(first=4, last=2, warmup=1, final=1, rounds=7)
    assert method.threshold == 0.25
    assert method_of(**CLIENT).threshold is None
    assert method_of(**{"privacy.unit": "example", "privacy.noise_multiplier": 1.0}).threshold == 0.5
    assert method_of(**{"method.masks": "global", "federation.server_lr": 0.5}).threshold is None
    assert [method_of(**{"method.rank": rank}).budget.last for rank in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert build(toys.config({"method.name": "fedara", "federation.rounds": 20})), "the usual settings go together"


def test_as_lora_has_live_ranks_alone_and_no_module_without() -> None:
    method = method_of()
    state = start(method)
    for _ in range(6):
        state = one_round(method, state)
    form = method.as_lora(start(method).tensors, state.tensors)
    assert {module: a.shape[0] for module, (a, _) in form.factors.items()} == {
        t.module: rank for t, rank in zip(triplets(state.tensors), ranks(state.tensors), strict=True) if rank
    }
    model = small_models.make("bert")
    method.prepare(model, small_models.head_of(model), 7)
    for name in state.tensors:
        model.get_parameter(name).data = state.tensors.tensor(name)
    plain = small_models.make("bert")
    for module, (a, b) in form.factors.items():
        plain.get_submodule(module).get_parameter("weight").data += form.adapter.scaling * b @ a
    for name in small_models.head_of(model):
        plain.get_parameter(name).data = state.tensors.tensor(name)
    assert torch.allclose(small_models.logits(plain), small_models.logits(model), atol=1e-5)
