"""Estimates from the sum of all means, and the noise of a server's steps and of their sum, against naive versions."""

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
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import Pair, pairs
from secure_fed.methods.method import State
from secure_fed.rounds.server_optimizer import noise_levels
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import private_toys
from tests.secure_fed.in_turn import BANDED, CLIP, IN_TURN, Killed, Matrix, federation, of_zeros, sums
from tests.secure_fed.methods.test_private_fra import best, close, product
from tests.secure_fed.private_toys import NOISE, Watched

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


@pytest.mark.parametrize("more", [{}, MOMENTUM], ids=["mean", "momentum"])
def test_under_correlated_noise_a_method_gets_the_sums_and_their_noise(more: dict[str, Any]) -> None:
    (built, steps), (_, totals) = given({**more, "method.denoise_over": "mean"}), given(more)
    np.testing.assert_allclose(totals[:, 1:], np.cumsum(steps[:, 1:], axis=0), atol=1e-6)
    for told, *rows in (steps.T, totals.T):
        assert np.abs(np.std(rows, axis=0) / told - 1).max() < 5 / math.sqrt(2 * len(rows))
    plan, (rate, momentum) = built.assembly.protection.plan, (0.3, 0.5) if more else (1.0, 0.0)
    assert plan is not None
    np.testing.assert_allclose(totals[:, 0], CLIP * rate * plan.correlation.errors(6, momentum))
    assert totals[-1, 0] < 0.8 * math.hypot(*steps[:, 0]), "less than single noises would add up to"


@pytest.mark.parametrize("more", [{}, MOMENTUM], ids=["mean", "momentum"])
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


@pytest.mark.parametrize(
    "settings", [FRA, FEDERA, {**SWITCHED, "federation.rounds": 7}], ids=["fra", "federa", "switch"]
)
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
    for settings in (
        {**NOISE, **SWITCHED, "method.switch_round": 2},
        {**NOISE, **FRA, "method.denoise_over": "mean"},
        {**NOISE, **FRA, "method.transport_form": "sketch", "method.sketch": 1},
        {"method.name": "fra_lora", "method.rank": 2},
    ):
        assert set(private_toys.federation(settings).run().state.memory) <= {"noise"}
    assert "sum/change/query.delta" in private_toys.federation({**NOISE, **FRA}).run().state.memory


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**NOISE, **FRA, "federation.server_optimizer": "adam"},
            r"denoise = 'shrink' needs one noise level.*'adam'",
        ),
        (
            {**NOISE, **FRA, "method.denoise_over": "sum", "method.transport_form": "sketch"},
            r"denoise_over = 'sum' is refused with method\.transport_form = 'sketch'",
        ),
        ({**NOISE, **FRA, "method.denoise_over": "sum", "method.denoise": "none"}, r"denoise_over.*no effect"),
        ({"method.name": "fra_lora", "method.denoise_over": "mean"}, r"denoise_over.*no effect"),
        (
            {"method.name": "fra_lora", "method.denoise": "none"},
            r"denoise = 'none' has no effect here.*unit = 'client'",
        ),
        ({**NOISE, "method.denoise_over": "mean"}, r"denoise_over.*no effect"),
        ({**BANDED, **FRA, "method.transport_form": "sketch"}, r"transport_form = 'sketch' is refused.*'banded'"),
        (
            {**BANDED, "method.name": "fedask"},
            r"'banded' is refused with fedask: the basis .* in every round",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)
def test_noise_of_no_known_level_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        private_toys.federation(settings)
