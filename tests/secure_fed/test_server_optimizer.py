"""From mean changes to the next model, against naive versions: server optimisers, estimates from the sum of all means and the
noise of steps and of their sum, and the mean of the last models, also through lost rounds and kills.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from privacy.correlation import INDEPENDENT, Correlation, square_root
from privacy.denoise import shrunk
from privacy.entropy import SeededEntropy
from secure_fed import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import Pair, pairs
from secure_fed.methods import METHODS, build
from secure_fed.methods.method import Shrinking, State, fits
from secure_fed.rounds.server_optimizer import ServerOptimizer, Tail, noise_levels
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.low_rank import truncated
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.cells import chosen
from tests.contracts import runs
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.in_turn import BANDED, CLIP, IN_TURN, Killed, Matrix, federation, of_zeros, sums
from tests.secure_fed.methods.test_private_fra import best, close, product
from tests.secure_fed.private_toys import NOISE, Watched

CHANGES = np.random.default_rng(3).normal(size=(3, 5))


def steps_of(optimizer: ServerOptimizer) -> list[np.ndarray]:
    """The step of each of three rounds."""
    steps, memory = [], Tensors()
    for change in CHANGES:
        means = {"change": Tensors({"w": torch.tensor(change)})}
        stepped, memory = optimizer.step(means, memory)
        steps.append(stepped["change"].tensor("w").numpy())
    return steps


def test_mean_applies_the_mean_change_and_at_rate_one_hands_on_the_very_tensors() -> None:
    np.testing.assert_array_equal(steps_of(ServerOptimizer("mean", 1.0, 0.9)), CHANGES)
    np.testing.assert_allclose(steps_of(ServerOptimizer("mean", 0.25, 0.9)), 0.25 * CHANGES)
    means = {"change": Tensors({"w": torch.ones(2)})}
    steps, memory = ServerOptimizer("mean", 1.0, 0.9).step(means, Tensors())
    assert steps["change"]["w"] is means["change"]["w"]
    assert not memory


def test_momentum_adds_up_with_decay() -> None:
    first, second, third = CHANGES
    expected = [first, 0.8 * first + second, 0.64 * first + 0.8 * second + third]
    np.testing.assert_allclose(steps_of(ServerOptimizer("momentum", 0.5, 0.8)), 0.5 * np.array(expected), rtol=1e-12)


def test_adam_is_algorithm_two() -> None:
    expected = []
    for numbers in CHANGES.T:  # one coordinate at a time
        m = v = 0.0
        column = []
        for number in numbers:
            m = 0.7 * m + 0.3 * number
            v = 0.99 * v + 0.01 * number**2
            column.append(0.1 * m / (math.sqrt(v) + 1e-3))
        expected.append(column)
    np.testing.assert_allclose(steps_of(ServerOptimizer("adam", 0.1, 0.7)), np.array(expected).T, rtol=1e-12)


@pytest.mark.parametrize(("kind", "moments"), [("momentum", {"m"}), ("adam", {"m", "v"})])
def test_passes_have_memories_of_their_own_and_what_is_given_is_left_as_it_was(kind: str, moments: set[str]) -> None:
    means, optimizer = (
        {"a": Tensors({"w": torch.ones(2)}), "b": Tensors({"w": -torch.ones(2)})},
        ServerOptimizer(kind, 1.0, 0.9),
    )
    steps, memory = optimizer.step(means, Tensors())
    assert set(memory) == {f"{moment}/{name}/w" for moment in moments for name in ("a", "b")}
    assert torch.equal(steps["a"].tensor("w"), -steps["b"].tensor("w"))
    before = memory.to_bytes()
    optimizer.step(means, memory)
    assert memory.to_bytes() == before
    assert torch.equal(means["a"].tensor("w"), torch.ones(2))
    product = LowRank(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]]))
    steps, _ = ServerOptimizer("momentum", 1.0, 0.9).step({"change": Tensors({"w": product})}, Tensors())
    assert torch.equal(steps["change"].tensor("w"), torch.tensor([[3.0, 4.0], [6.0, 8.0]])), "low-rank means are formed"


ROUNDS = 7
MOMENTUM = {"federation.server_optimizer": "momentum", "federation.server_momentum": 0.5, "federation.server_lr": 0.3}
FRA = {"method.name": "fra_lora", "method.rank": 2, "method.denoise": "shrink"}


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the operating system's random numbers with a fixed stream, so that no test fails by chance."""
    stream = SeededEntropy(3).stream("os")
    monkeypatch.setattr("privacy.entropy.os.urandom", lambda count: stream.words(-(-count // 8)).tobytes()[:count])


def played(deviations: list[float], made: Correlation, lr: float, momentum: float) -> tuple[Matrix, Matrix]:
    """The factor of each Z_j in the server's last step, and in the sum of its steps, computed round by round."""
    weights = made.weights(len(deviations))
    moment = total = step = np.zeros(len(deviations))
    for round_, deviation in enumerate(deviations):
        if deviation:
            mean = np.zeros(len(deviations))
            for age in range(round_ + 1):
                mean[round_ - age] = deviation * weights[age]
            moment = momentum * moment + mean
            step = lr * moment
            total = total + step
    return step, total


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("made", [INDEPENDENT, square_root(3)], ids=["independent", "banded"])
@pytest.mark.parametrize("deviations", [[2.0] * ROUNDS, [1, 2, 3, 4, 5, 6, 7], [2, 0, 2, 2, 0, 0, 2], [0, 2]], ids=str)
def test_the_noise_of_a_step_and_of_the_sum(deviations: list[float], made: Correlation, momentum: float) -> None:
    found = noise_levels(np.array(deviations), made.weights(len(deviations)), 0.3, momentum)
    step, total = played(deviations, made, 0.3, momentum)
    assert found.step == pytest.approx(np.linalg.norm(step))
    assert found.total == pytest.approx(np.linalg.norm(total))
    if len(set(deviations)) == 1:
        assert found.total == pytest.approx(0.3 * 2 * made.errors(ROUNDS, momentum)[-1])


def given(settings: dict[str, Any], path: Path | None = None, dies_in: int | None = None) -> tuple[Federation, Matrix]:
    """Clients send zeros, and runs have equal noise: (federation, a row per round of stated deviation and noised sum)."""
    built = federation({**BANDED, **FRA, "method.rank": 6, **settings}, seed=5)
    _, watched = of_zeros(built, dies_in)
    if dies_in is None:
        built.run(path, resume=path is not None)
    else:
        with pytest.raises(Killed):
            built.run(path)
    told = np.array([std for _, std in watched.seen if std]) * built.assembly.sampler.expected
    return built, np.concatenate([told[:, None], sums(built, watched)], 1)


@pytest.mark.parametrize("more", chosen([{}, MOMENTUM], [MOMENTUM]), ids=["mean", "momentum"])
def test_under_correlated_noise_a_method_gets_the_sums_and_their_noise(more: dict[str, Any]) -> None:
    (built, steps), (_, totals) = given({**more, "method.denoise_over": "mean"}), given(more)
    np.testing.assert_allclose(totals[:, 1:], np.cumsum(steps[:, 1:], axis=0), atol=1e-6)
    for told, *rows in (steps.T, totals.T):
        assert np.abs(np.std(rows, axis=0) / told - 1).max() < 5 / math.sqrt(2 * len(rows))
    plan, (rate, momentum) = built.assembly.protection.plan, (0.3, 0.5) if more else (1.0, 0.0)
    assert plan is not None
    np.testing.assert_allclose(totals[:, 0], CLIP * rate * plan.correlation.errors(6, momentum))
    assert totals[-1, 0] < 0.8 * math.hypot(*steps[:, 0]), "less than single noises would add up to"


@pytest.mark.parametrize("more", chosen([{}, MOMENTUM], [{}]), ids=["mean", "momentum"])
def test_a_lost_round_and_a_resumed_run_leave_sum_and_noise_right(more: dict[str, Any], tmp_path: Path) -> None:
    """Later rounds subtract the lost round's noise, which was never released, so the sum carries more noise."""
    if not more:
        _, rows = given({"method.denoise_over": "mean"})
    _, before = given(more, tmp_path / "run", dies_in=2)
    built, after = given(more, tmp_path / "run")
    assert (len(before), len(after)) == (2, 3)
    plan, (rate, momentum) = built.assembly.protection.plan, (0.3, 0.5) if more else (1.0, 0.0)
    assert plan is not None
    _, total = played([CLIP, CLIP, 0, CLIP, CLIP, CLIP], plan.correlation, rate, momentum)
    assert after[-1, 0] == pytest.approx(np.linalg.norm(total))
    assert after[-1, 0] > 1.02 * CLIP * rate * plan.correlation.errors(6, momentum)[-1]
    if not more:
        np.testing.assert_allclose(after[-1, 1:], np.delete(rows[:, 1:], 2, 0).sum(0), atol=1e-6)


FEDERA = {"method.name": "federa", "method.rule": "fra_lora", "method.denoise": "shrink"}
SWITCHED = {"method.name": "fra_then_ffa", "method.switch_round": 6, "method.denoise": "shrink"}
SHRUNK: list[dict[str, Any]] = [FRA, FEDERA, {**SWITCHED, "federation.rounds": 7}]


@pytest.mark.parametrize("settings", chosen(SHRUNK, SHRUNK[2:]), ids=["fra", "federa", "switch"])
def test_a_model_is_made_of_the_start_and_the_shrunk_sum(settings: dict[str, Any]) -> None:
    """Clients train, and dense matrices are the reference. Shrinking by the noise of one mean gives another model."""
    settings = {**IN_TURN, "method.rank": 2, "privacy.noise_multiplier": 0.05, **settings}
    built, states = federation(settings, seed=5), list[State]()
    assembly, watched = built.assembly, Watched(built.assembly.server.method)
    built.assembly = replace(assembly, server=replace(assembly.server, method=watched))
    built.callbacks.append(watched)
    built.callbacks.append(SimpleNamespace(on_round_end=lambda record, state: states.append(state)))
    built.run()
    last, (totals, std) = states[5], watched.seen[5]
    assert std == pytest.approx(0.05 * CLIP / 2 * math.sqrt(6))
    for pair in pairs(last.tensors):
        right, wrong = (oracle(assembly.initial, totals["change"], level, pair, assembly) for level in (std, std / 3))
        assert close(product(last.tensors, pair), right)
        assert not close(product(last.tensors, pair), wrong)


def oracle(start: State, totals: Tensors, std: float, pair: Pair, assembly: Assembly) -> Tensor:
    """best(B A + shrunk(the sum)), as a dense matrix."""
    u, s, vt = torch.linalg.svd(totals.tensor(f"{pair.module}.delta").double(), full_matrices=False)
    kept = shrunk(s, (u.shape[0], vt.shape[1]), std)[:2]
    scaling = assembly.method.adapter.scaling  # type: ignore[attr-defined]
    return best(product(start.tensors, pair) + u[:, :2] * kept @ vt[:2] / scaling)


def test_no_sum_is_kept_where_none_is_needed() -> None:
    """The cases: two rounds of FRA before one of FFA, shrinking of each mean, sketches, and rounds without noise."""
    one = {"federation.rounds": 1}
    for settings in (
        {**NOISE, **SWITCHED, "method.switch_round": 2},
        {**NOISE, **FRA, **one, "method.denoise_over": "mean"},
        {**NOISE, **FRA, **one, "method.transport_form": "sketch", "method.sketch": 1},
        {"method.name": "fra_lora", "method.rank": 2, **one},
    ):
        assert set(private_toys.federation(settings).run().state.memory) <= {"noise"}
    assert "sum/change/query.delta" in private_toys.federation({**NOISE, **FRA, **one}).run().state.memory


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({**NOISE, **FRA, "federation.server_optimizer": "adam"}, "federation.server_optimizer"),
        ({**NOISE, **FRA, "method.denoise_over": "sum", "method.transport_form": "sketch"}, "method.denoise_over"),
        ({**NOISE, **FRA, "method.denoise_over": "sum", "method.denoise": "none"}, "method.denoise_over"),
        ({"method.name": "fra_lora", "method.denoise_over": "mean"}, "method.denoise_over"),
        ({"method.name": "fra_lora", "method.denoise": "none"}, "method.denoise"),
        ({**NOISE, "method.denoise_over": "mean"}, "method.denoise_over"),
        ({**BANDED, **FRA, "method.transport_form": "sketch"}, "method.transport_form"),
        ({**BANDED, "method.name": "fedask"}, "privacy.correlation"),
    ],
)
def test_noise_of_no_known_level_is_refused(settings: dict[str, Any], about: str) -> None:
    with refused(ConfigError, about):
        private_toys.federation(settings)


class Seen:
    """A callback that keeps the state after every round, and raises Killed after round `dies_in`."""

    def __init__(self, dies_in: int | None = None) -> None:
        self.states: list[State] = []
        self.dies_in = dies_in

    def on_round_end(self, record: object, state: State) -> None:
        self.states.append(state)
        if state.round == self.dies_in:
            raise Killed


def last_models(count: int, seen: Seen, out: Path | None = None, **more: Any) -> State:
    """The last state of a run of four rounds without privacy, which a second run repeats to the bit."""
    built = toys.federation({"federation.rounds": 4, "federation.average_last": count, **more})
    built.callbacks.append(seen)
    return built.run(out, resume=out is not None and out.exists()).state


def mean(states: list[State]) -> Tensors:
    """The plain mean, entry by entry."""
    tensors = [state.tensors for state in states]
    total = tensors[0]
    for one in tensors[1:]:
        total = total + one
    return total * (1 / len(tensors))


@pytest.mark.parametrize(
    "settings", [{"method.name": "ffa_lora"}, {"method.name": "fedlora", "method.personal": ("*lora_B*",)}]
)
def test_the_run_ends_with_the_mean_of_its_last_models(settings: dict[str, Any]) -> None:
    """Clients never see the mean: all earlier rounds equal those of a run without one.

    Where one factor is personal the other is averaged: the server's own B stays zero, so the product B A would be zero.
    """
    alone, beside = Seen(), Seen()
    last, averaged = (last_models(count, seen, **settings) for count, seen in ((1, alone), (3, beside)))
    assert [state.tensors.to_bytes() for state in alone.states[:-1]] == [
        state.tensors.to_bytes() for state in beside.states[:-1]
    ]
    want = mean(alone.states[1:])
    assert (averaged.tensors - want).norm() < 1e-6 * want.norm()
    assert (averaged.tensors - last.tensors).norm() > 1e-3
    assert not any(name.startswith("tail/") for name in averaged.memory)
    assert averaged.round == last.round == 4


@pytest.mark.parametrize("method", chosen(["fedlora", "fra_lora", "fedsvd"], ["fedlora", "fedsvd"]))
def test_where_factors_turn_products_are_averaged(method: str) -> None:
    alone = Seen()
    last_models(1, alone, **{"method.name": method})
    averaged = last_models(2, Seen(), **{"method.name": method})
    for pair in pairs(averaged.tensors):
        both = [s.tensors.tensor(pair.b).double() @ s.tensors.tensor(pair.a).double() for s in alone.states[-2:]]
        a, b = averaged.tensors.tensor(pair.a), averaged.tensors.tensor(pair.b)
        want = truncated((both[0] + both[1]) / 2, a.shape[0])
        assert torch.allclose(b.double() @ a.double(), want.u * want.s @ want.vt, atol=1e-5)
        if method == "fedsvd":
            assert torch.allclose(a @ a.T, torch.eye(len(a)), atol=1e-5), "A as its own rounds make it"


def test_a_killed_run_ends_in_the_same_mean(tmp_path: Path) -> None:
    """The kills are before the tail and within it."""
    whole = last_models(2, Seen(), tmp_path / "whole")
    for dies_in in (2, 3):
        out = tmp_path / str(dies_in)
        with pytest.raises(Killed):
            last_models(2, Seen(dies_in), out)
        assert last_models(2, Seen(), out).tensors.to_bytes() == whole.tensors.to_bytes()


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
    with refused(ConfigError, "federation.average_last"):
        toys.config({"federation.average_last": 9})
    with refused(ConfigError, "federation.average_last"):
        toys.config({"federation.average_last": 2, "evaluation.patience": 1})
    with refused(ConfigError, "federation.average_last"):
        toys.federation({"federation.average_last": 2, "method.name": "fedara"})


@pytest.mark.parametrize("name", chosen(list(METHODS), ["bitfit"]))
def test_every_method_ends_with_a_mean_that_fits(name: str) -> None:
    if isinstance(build(RunConfig().replace({("method", "name"): name})), Shrinking):
        return
    built = runs.federation(runs.settings(name, **{"federation.average_last": 2}))
    result = built.run()
    assert result.state.tensors.is_finite()
    assert fits(built.assembly.method, built.assembly.initial.tensors, result.state)


@pytest.mark.parametrize("rounds", chosen([5, 6], [5]))
def test_a_tail_that_was_begun_for_other_rounds_is_dropped(rounds: int, tmp_path: Path) -> None:
    """Killed after 3 of 4 rounds and resumed with 5 or 6: only models after round 3 are averaged."""
    frozen, seen = {"method.name": "ffa_lora", "training.lr_schedule": "constant"}, Seen(3)
    with pytest.raises(Killed):
        last_models(3, seen, tmp_path / "run", **frozen)
    last = last_models(3, seen, tmp_path / "run", **{"federation.rounds": rounds, **frozen})
    alone = Seen()
    last_models(1, alone, **{"federation.rounds": rounds, **frozen})
    want = mean(alone.states[3:])
    assert (last.tensors - want).norm() < 1e-6 * want.norm()


def test_a_run_that_goes_on_begins_a_new_mean(tmp_path: Path) -> None:
    """It starts from the mean of the finished run. A tail longer than the new rounds averages the new rounds alone."""
    frozen = {"method.name": "ffa_lora"}
    first = last_models(3, Seen(), tmp_path / "run", **{"federation.rounds": 4, **frozen})
    more = Seen()
    last = last_models(3, more, tmp_path / "run", **{"federation.rounds": 6, **frozen})
    assert [state.round for state in more.states] == [5, 6]
    alone = Seen()
    built = toys.federation({"federation.rounds": 6, **frozen})
    built.assembly = replace(built.assembly, initial=replace(first, round=4))
    built.callbacks.append(alone)
    built.run()
    want = mean(alone.states)
    assert (last.tensors - want).norm() < 1e-6 * want.norm()
