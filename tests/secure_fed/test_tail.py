"""The mean of the last models: against the naive mean, through lost rounds and kills, and of products B A."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods import METHODS, build
from secure_fed.methods.method import Shrinking, State, fits
from secure_fed.rounds.server_optimizer import Tail
from secure_fed.tensors.low_rank import truncated
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.contracts import runs
from tests.secure_fed import toys
from tests.secure_fed.in_turn import Killed


class Seen:
    """A callback that keeps the state after every round, and raises Killed after round `dies_in`."""

    def __init__(self, dies_in: int | None = None) -> None:
        self.states: list[State] = []
        self.dies_in = dies_in

    def on_round_end(self, record: object, state: State) -> None:
        self.states.append(state)
        if state.round == self.dies_in:
            raise Killed


def played(count: int, seen: Seen, out: Path | None = None, **more: Any) -> State:
    """The last state of a run without privacy, which a second run repeats to the bit."""
    built = toys.federation({"federation.rounds": 6, "federation.average_last": count, **more})
    built.callbacks.append(seen)
    return built.run(out, resume=out is not None and out.exists()).state


def mean(states: list[State]) -> Tensors:
    """The plain mean, entry by entry."""
    tensors = [state.tensors for state in states]
    total = tensors[0]
    for one in tensors[1:]:
        total = total + one
    return total * (1 / len(tensors))


def test_the_run_ends_with_the_mean_of_its_last_models() -> None:
    """Clients never see the mean: all earlier rounds equal those of a run without one."""
    alone, beside = Seen(), Seen()
    last, averaged = (played(count, seen, **{"method.name": "ffa_lora"}) for count, seen in ((1, alone), (4, beside)))
    assert [state.tensors.to_bytes() for state in alone.states[:-1]] == [
        state.tensors.to_bytes() for state in beside.states[:-1]
    ]
    want = mean(alone.states[2:])
    assert (averaged.tensors - want).norm() < 1e-6 * want.norm()
    assert (averaged.tensors - last.tensors).norm() > 1e-3
    assert not any(name.startswith("tail/") for name in averaged.memory)
    assert averaged.round == last.round == 6


@pytest.mark.parametrize("method", ["fedlora", "fra_lora", "fedsvd"])
def test_where_factors_turn_products_are_averaged(method: str) -> None:
    alone = Seen()
    played(1, alone, **{"method.name": method})
    averaged = played(2, Seen(), **{"method.name": method})
    for pair in pairs(averaged.tensors):
        both = [s.tensors.tensor(pair.b).double() @ s.tensors.tensor(pair.a).double() for s in alone.states[-2:]]
        a, b = averaged.tensors.tensor(pair.a), averaged.tensors.tensor(pair.b)
        want = truncated((both[0] + both[1]) / 2, a.shape[0])
        assert torch.allclose(b.double() @ a.double(), want.u * want.s @ want.vt, atol=1e-5)
        if method == "fedsvd":
            assert torch.allclose(a @ a.T, torch.eye(len(a)), atol=1e-5), "A as its own rounds make it"


def test_where_one_factor_is_personal_the_other_is_averaged() -> None:
    """The server's own B stays zero, so the product B A would be zero."""
    alone, personal = Seen(), {"method.name": "fedlora", "method.personal": ("*lora_B*",)}
    played(1, alone, **personal)
    averaged = played(3, Seen(), **personal)
    want = mean(alone.states[-3:])
    assert (averaged.tensors - want).norm() < 1e-6 * want.norm()


def test_a_killed_run_ends_in_the_same_mean(tmp_path: Path) -> None:
    """The kills are before the tail, at its beginning and within it."""
    whole = played(3, Seen(), tmp_path / "whole")
    for dies_in in (3, 4, 5):
        out = tmp_path / str(dies_in)
        with pytest.raises(Killed):
            played(3, Seen(dies_in), out)
        assert played(3, Seen(), out).tensors.to_bytes() == whole.tensors.to_bytes()


def test_a_lost_round_counts_as_the_model_that_it_left() -> None:
    built = toys.federation({"federation.rounds": 4, "federation.average_last": 3, "method.name": "ffa_lora"})
    server, states = built.assembly.server, [built.assembly.initial]
    method = built.assembly.method
    assert server.tail == Tail(4, 3)
    changed = built.assembly.initial.tensors
    for round_ in range(4):
        if round_ == 3:
            states.append(server.unmoved(states[-1], server.plan(states[-1])))
        else:
            step = changed.select(method.plan(states[-1]).trainable) * (0.1 * (round_ + 1))
            states.append(server.apply(states[-1], {"change": step}))
    assert (states[4].tensors - mean([states[2], states[3], states[3]])).norm() < 1e-6
    assert not list(states[4].memory)


def test_a_mean_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"average_last is 9, more than federation\.rounds = 3"):
        toys.config({"federation.average_last": 9})
    with pytest.raises(ConfigError, match=r"average_last = 2 is refused with evaluation\.patience = 1"):
        toys.config({"federation.average_last": 2, "evaluation.patience": 1})
    with pytest.raises(ConfigError, match=r"average_last = 2 cannot be used with fedara, whose tensors shrink: use 1"):
        toys.federation({"federation.average_last": 2, "method.name": "fedara"})


@pytest.mark.parametrize("name", chosen(list(METHODS), ["fedask", "c2a"]))
def test_every_method_ends_with_a_mean_that_fits(name: str) -> None:
    if isinstance(build(RunConfig().replace({("method", "name"): name})), Shrinking):
        return
    built = runs.federation(runs.settings(name, **{"federation.average_last": 2}))
    result = built.run()
    assert result.state.tensors.is_finite()
    assert fits(built.assembly.method, built.assembly.initial.tensors, result.state)


@pytest.mark.parametrize("rounds", [7, 9])
def test_a_tail_that_was_begun_for_other_rounds_is_dropped(rounds: int, tmp_path: Path) -> None:
    """Killed after 5 of 6 rounds and resumed with 7 or 9: only models after round 5 are averaged."""
    frozen, seen = {"method.name": "ffa_lora", "training.lr_schedule": "constant"}, Seen(5)
    with pytest.raises(Killed):
        played(4, seen, tmp_path / "run", **frozen)
    last = played(4, seen, tmp_path / "run", **{"federation.rounds": rounds, **frozen})
    alone = Seen()
    played(1, alone, **{"federation.rounds": rounds, **frozen})
    want = mean(alone.states[max(5, rounds - 4) :])
    assert (last.tensors - want).norm() < 1e-6 * want.norm()


def test_a_run_that_goes_on_begins_a_new_mean(tmp_path: Path) -> None:
    """It starts from the mean of the finished run. A tail longer than the new rounds averages the new rounds alone."""
    frozen = {"method.name": "ffa_lora"}
    first = played(3, Seen(), tmp_path / "run", **{"federation.rounds": 4, **frozen})
    more = Seen()
    last = played(3, more, tmp_path / "run", **frozen)
    assert [state.round for state in more.states] == [5, 6]
    alone = Seen()
    built = toys.federation({"federation.rounds": 6, **frozen})
    built.assembly = replace(built.assembly, initial=replace(first, round=4))
    built.callbacks.append(alone)
    built.run()
    want = mean(alone.states)
    assert (last.tensors - want).norm() < 1e-6 * want.norm()
