"""The contract of every method: under each privacy unit that it supports, with plain and masked sums, and in common passes."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from privacy.mechanisms import Gaussian
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.federation import Federation
from secure_fed.learning.models.loading import digest_of
from secure_fed.methods import METHODS, build, card
from secure_fed.methods.method import State
from secure_fed.rounds.client import Together
from secure_fed.runs.membership import kept_scores
from secure_fed.runs.run import Result
from secure_fed.tensors.tensors import Layout, Tensors
from tests.attacks.canaried import _clean
from tests.cells import chosen, every
from tests.contracts import runs
from tests.contracts.runs import CELLS, ROUNDS, SIZES, SUMS, Events, KilledAfter, KilledError, States
from tests.golden import refused

torch.set_num_threads(1)

# Methods whose random directions are seeded by a digest of the state: states that differ by rounding alone give different
# directions, and so keep different parts of a noised mean.
SKETCHING = ("fedask", "fedpower")
SUPPORTED = [cell for cell in CELLS if runs.supported(*cell[:2])]
QUICK = [cell for cell in SUPPORTED if runs.quick(*cell)]
# Killed and resumed on every change: a method with more state than averages, and a masked run.
ENDED = [("fra_then_ffa", "client", "plain"), ("fra_lora", "client", "masked")]
# At night: every method under every privacy unit, alternately plain and masked.
AT_NIGHT = [cell for cell in SUPPORTED if cell[2] == runs.turn(*cell[:2])]


def settings(name: str, unit: str, how: str) -> RunConfig:
    """Without dummies, whose changes move the means: masks have room for fewer of them."""
    return runs.settings(name, unit, how, **({"evaluation.dummies": 0} if unit == "client" else {}))


class Run:
    """A run of two rounds, with its states, events and result."""

    def __init__(self, name: str, unit: str, how: str) -> None:
        kept = States()
        self.built: Federation = runs.federation(settings(name, unit, how), callbacks=[kept])
        self.base = digest_of(self.built.assembly.problem.model, self.built.assembly.initial.tensors)
        self.events: Events = runs.watch(self.built)
        self.result: Result = self.built.run()
        self.states: list[State] = [self.built.assembly.initial, *kept.after]


@cache
def run_of(name: str, unit: str, how: str) -> Run:
    """The run of a cell, made once for all its tests: they are adjacent, so one process runs them all."""
    return Run(name, unit, how)


def flat(tensors: Tensors) -> np.ndarray:
    vector: np.ndarray = Layout.of(tensors).flatten(tensors, torch.float64).numpy()
    return vector


@pytest.mark.parametrize(("name", "unit", "how"), chosen(SUPPORTED, QUICK))
class TestContract:
    def test_what_travels_is_what_was_planned(self, name: str, unit: str, how: str) -> None:
        run = run_of(name, unit, how)
        method, protection = run.built.assembly.method, run.built.assembly.protection
        for before in run.states[:-1]:
            plan = method.plan(before)
            for pass_name in plan.passes:
                layout = protection.layout(method, before, pass_name, ())
                place = before.round, pass_name
                assert len(run.events.replies[place]) == len(SIZES)
                for reply in run.events.replies[place].values():
                    assert Layout.of(reply.contribution) == layout
                for request in run.events.requests[place].values():
                    down = plan.down if pass_name == plan.passes[0] else ()
                    assert set(request.tensors) == set(down)
                    assert Layout.of(request.tensors) == Layout.of(before.tensors.select(down))
                    assert list(request.means) == list(plan.passes[: plan.passes.index(pass_name)])
        assert len(run.states) == ROUNDS + 1

    def test_what_neither_trains_nor_comes_down_never_moves(self, name: str, unit: str, how: str) -> None:
        run = run_of(name, unit, how)
        method, initial = run.built.assembly.method, run.built.assembly.initial.tensors
        moving: set[str] = set()
        for before, after in zip(run.states[:-1], run.states[1:], strict=True):
            plan = method.plan(before)
            moving |= set(plan.trainable) | set(plan.down)
            for frozen in set(initial) - moving:
                assert torch.equal(after.tensors.tensor(frozen), initial.tensor(frozen))
        assert digest_of(run.built.assembly.problem.model, initial) == run.base, "the base model"
        last = run.states[-1].tensors
        moved = [
            n
            for n in moving
            if n in last and last[n].shape == initial[n].shape and not torch.equal(last.tensor(n), initial.tensor(n))
        ]
        assert moved

    def test_the_budget_is_charged_once_for_each_release_and_before_it(self, name: str, unit: str, how: str) -> None:
        run = run_of(name, unit, how)
        planned = [
            (before.round, p) for before in run.states[:-1] for p in run.built.assembly.method.plan(before).passes
        ]
        log = run.events.log
        if unit == "client":
            assert run.events.of("charge") == planned
            assert run.result.summary["releases"] == len(planned)
            for round_, pass_name in planned:
                asked = [i for i, event in enumerate(log) if event[0] == "ask" and event[2:] == (round_, pass_name)]
                assert log.index(("charge", round_, pass_name)) < min(asked)
        if unit == "example":
            steps = run.built.config.training.steps
            clients = range(len(SIZES))
            assert sorted(run.events.of("allow")) == [(c, r, steps) for c in clients for r in range(ROUNDS)]
        if unit == "none":
            assert run.events.of("allow") == []
            assert run.result.summary["epsilon"] is None


@pytest.mark.parametrize(("name", "unit", "how"), chosen(SUPPORTED, ENDED, nightly=AT_NIGHT))
def test_a_run_that_was_killed_goes_on_to_the_same_end(name: str, unit: str, how: str, tmp_path: Path) -> None:
    config = settings(name, unit, how)
    with pytest.raises(KilledError):
        runs.federation(config, callbacks=[KilledAfter(1)]).run(tmp_path / "run")
    resumed = runs.federation(config).run(tmp_path / "run", resume=True)
    assert resumed.state.tensors.to_bytes() == run_of(name, unit, how).states[-1].tensors.to_bytes()
    assert [record["round"] for record in resumed.records] == [1, 2]


@pytest.mark.parametrize(
    ("name", "unit", "how"),
    chosen((one for one in SUPPORTED if one[1] != "client"), (one for one in QUICK if one[1] != "client")),
)
def test_a_mean_is_that_of_the_contributions(name: str, unit: str, how: str) -> None:
    """Behind masks, up to half a step of the codec's grid; the step is 2^-25 for four clients and values up to 8."""
    run = run_of(name, unit, how)
    for before, means in zip(run.states[:-1], run.events.means, strict=True):
        for pass_name, mean in means.items():
            replies = run.events.replies[before.round, pass_name].values()
            want = np.mean([flat(reply.contribution) for reply in replies], 0)
            assert np.abs(want).max() > 1e-6
            allowed = (0.5 / 2**25 if how == "masked" else 0) + 1e-6 * np.abs(want).max()
            assert np.abs(flat(mean) - want).max() <= allowed


@pytest.mark.parametrize(
    ("name", "unit"),
    chosen((one[:2] for one in SUPPORTED if one[2] == "plain"), (one[:2] for one in QUICK if one[2] == "masked")),
)
def test_behind_masks_a_run_ends_where_it_does_in_the_open(name: str, unit: str) -> None:
    """With the same noise and coins, compared by the models' logits, since factors may differ while their products agree."""
    plain, masked = (run_of(name, unit, how) for how in SUMS)
    rounds = 1 if name in SKETCHING and unit == "client" else ROUNDS
    start, open_, hidden = (
        runs.logits(run.built, run.states[after].tensors)
        for run, after in ((plain, 0), (plain, rounds), (masked, rounds))
    )
    moved, apart = float((open_ - start).norm()), float((hidden - open_).norm())
    assert moved > 1e-4
    if apart < 2e-3 * moved:
        return
    # A method that keeps the leading directions of a mean amplifies rounding where two singular values are nearly equal.
    built = runs.federation(settings(name, unit, "plain"))
    built.assembly = replace(built.assembly, transport=Rounding(built.assembly.transport))
    carried = float((runs.logits(built, built.run().state.tensors) - open_).norm())
    assert apart < 4 * carried < 0.1 * moved


class Rounding:
    """A plain transport that rounds every number of a contribution to the masks' grid, up or down at random."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rng = inner, np.random.default_rng(0)

    def exchange(self, requests: Any) -> Any:
        for reply in self.inner.exchange(requests):
            parts = reply.contribution.dense().parts().items()
            yield replace(reply, contribution=Tensors((name, self.rounded(part)) for name, part in parts))

    def rounded(self, part: torch.Tensor) -> torch.Tensor:
        words = np.floor(part.double().numpy() * 2**25 + self.rng.uniform(size=part.shape))
        return torch.from_numpy(np.asarray(words) / 2**25).float()


def test_one_of_every_class_is_held_on_every_change() -> None:
    methods = {name: build(runs.settings(name)) for name in METHODS}
    classes = {name: (type(method), getattr(method, "split", None)) for name, method in methods.items()}
    chosen_ones = [classes[name] for name in runs.OF_A_CLASS]
    assert len(set(chosen_ones)) == len(chosen_ones)
    assert set(chosen_ones) == set(classes.values())


@every("name", METHODS)
def test_every_unit_is_supported_or_refused_with_a_reason(name: str) -> None:
    of = card(name)
    assert set(of.units) | set(of.refusals) == {"client", "example", "person"}
    assert not set(of.units) & set(of.refusals)
    assert all(len(reason.split()) > 3 for reason in of.refusals.values())


def test_a_server_that_adds_up_means_is_refused_with_the_reason() -> None:
    names = [name for name in METHODS if card(name).memoryless]
    for name in names:
        with refused(ConfigError, "federation.server_optimizer") as said:
            runs.federation(runs.settings(name, **{"federation.server_optimizer": "momentum"}))
        assert card(name).memoryless in str(said.value)
    assert names


@pytest.mark.nightly
@pytest.mark.parametrize("name", METHODS)
def test_a_run_learns(name: str) -> None:
    """The loss in training falls by a tenth in eight rounds of four steps; with prompts, which move little at first, a bit."""
    more: dict[str, Any] = {
        "federation.rounds": 8,
        "training.steps": 4,
        "training.optimizer": "adamw",
        "training.lr": 0.03,
    }
    share = 0.97 if name in ("prompt_tuning", "p_tuning") else 0.9
    built = runs.federation(runs.settings(name, **more, **{"training.lr_schedule": "constant", "evaluation.every": 8}))
    records = built.run().records
    assert records[-1]["train_loss"] < share * records[0]["train_loss"]


IN_TURN = {"federation.sampling": "schedule", "federation.cohort": 2}
BANDED = {**IN_TURN, "privacy.correlation": "banded", "privacy.band": 2, "evaluation.dummies": 0}
# Methods whose rounds do not all sum the same quantities, so that no round can cancel noise of an earlier one.
NOT_CORRELATED = {*(name for name in METHODS if card(name).memoryless), "fra_then_ffa"}


def test_noise_is_correlated_where_means_add_up_and_else_refused_with_the_reason() -> None:
    for name in sorted(NOT_CORRELATED):  # as the kept sentences are
        with refused(ConfigError) as said:
            runs.federation(runs.settings(name, "client", **BANDED))
        assert card(name).memoryless in str(said.value)


@pytest.mark.parametrize("name", chosen([name for name in METHODS if name not in NOT_CORRELATED], ["fra_lora"]))
def test_a_round_in_turn_takes_back_noise_of_the_round_before(name: str) -> None:
    """With the same streams, the second round's noise is Z_1 - c_1 / c_0 Z_0, up to scale; each sum has the clients in turn."""
    built = runs.federation(runs.settings(name, "client", **BANDED))
    events = runs.watch(built)
    said = built.run().summary
    asked = {round_: {client for client, at, _ in events.of("ask") if at == round_} for round_ in range(ROUNDS)}
    assert sorted(asked[0] | asked[1]) == list(range(len(SIZES)))
    assert said["epsilon"] == said["epsilon_participants"]
    protection = built.assembly.protection
    assert protection.correlated is not None
    c = protection.correlated.correlation.column
    layout = built.assembly.server.layout(built.assembly.initial, "change")
    noise = []
    for round_ in range(ROUNDS):
        stream = built.assembly.protection.entropy.stream("sum", round_, "change")
        noise.append(np.concatenate([stream.normal(shape).ravel() for _, shape in layout.entries]))
    sums = [sum(flat(reply.contribution) for reply in events.replies[round_, "change"].values()) for round_ in (0, 1)]
    std = protection.mechanism.std(protection.clip_norm)
    expected = [sums[0] + std / c[0] * noise[0], sums[1] + std / c[0] * (noise[1] - c[1] / c[0] * noise[0])]
    for round_ in range(ROUNDS):
        np.testing.assert_allclose(2 * flat(events.means[round_]["change"]), expected[round_], atol=1e-5)


TURNS = [("rolora", "*.lora_*"), ("rolora", "*.lora_A.*"), ("fedtt_plus", "*.core_*"), ("fedlora", "*.lora_B.*")]


@pytest.mark.parametrize(
    ("name", "pattern", "how"),
    chosen([(*turn, how) for turn in TURNS for how in SUMS], [(*TURNS[0], "masked")]),
)
def test_personal_tensors_never_travel(name: str, pattern: str, how: str, tmp_path: Path) -> None:
    """Also after the first round, in which some of the tensors do not train, a run directory has each client's own."""
    built = runs.federation(runs.settings(name, "none", how, **{"method.personal": [pattern], "federation.rounds": 3}))
    events = runs.watch(built)
    built.run(tmp_path / "run")
    up = [reply.contribution for replies in events.replies.values() for reply in replies.values()]
    down = [request.tensors for requests in events.requests.values() for request in requests.values()]
    sent = {tensor for tensors in (*up, *down) for tensor in tensors}
    assert sent
    assert not [tensor for tensor in sent if fnmatchcase(tensor, pattern)]
    kept = {name for client in built.assembly.clients for name in client.kept or ()}
    assert kept
    assert all(fnmatchcase(name, pattern) for name in kept)


def test_what_leaves_in_a_product_in_some_round_is_no_clients_own() -> None:
    config = runs.settings("fra_then_ffa", **{"method.personal": ["*.lora_B.*"], "federation.rounds": 3})
    with refused(MethodError):
        runs.federation(config)


PRIVATE = [(name, unit) for name, unit, how in SUPPORTED if unit != "none" and how == "plain"]
SENDING = [("fedask", "client")]  # several sums; of changes: `tests/secure_fed/test_dummies.py`


@pytest.mark.parametrize(
    ("name", "unit"), chosen(PRIVATE, SENDING, nightly=[cell for cell in PRIVATE if cell[0] in runs.OF_A_CLASS])
)
def test_every_private_run_gives_a_figure_of_dummies(name: str, unit: str) -> None:
    """It finds the dummies where there is no noise."""
    built = runs.federation(runs.settings(name, unit, **{"evaluation.dummies": 20, "evaluation.every": 9}))
    with patch.object(Gaussian, "noised", _clean):
        result = built.run()
    assert result.summary["membership"]["why"] == ""
    assert np.isfinite(kept_scores(result.state, built.assembly.audit_pool)).all()
    assert result.summary["membership"]["auc"] > (0.99 if unit == "client" else 0.5)


# Common passes: training several clients in one gives the same state as training them one after the other.

TOGETHER = [
    (name, unit, how) for name, unit, how in SUPPORTED if (unit, how) != ("example", "masked") or name == "ffa_lora"
]
TOGETHER_QUICK = [("fedlora", "none", "plain"), ("fedtt", "none", "plain"), ("prefix_tuning", "none", "plain")]
# Methods that train one client after the other, with a part of the reason; fedft's embeddings have no rule for common passes.
NOT_TOGETHER = {"adamix": "draws random numbers beyond dropout", "fedft": "not each has its part"}


def after_a_round(name: str, unit: str, how: str, together: int) -> tuple[State, State, str]:
    """The states before and after, and the reason for training one client after the other; empty with common passes."""
    rounds = {"fra_then_ffa": 2, "fedara": 3}.get(name, 1)
    more = {"federation.rounds": rounds, "training.together": together, "training.batch_size": 3}
    built = runs.federation(runs.settings(name, unit, how, **more))
    training = getattr(built.assembly.transport, "prepare", None)
    result = built.run()
    return built.assembly.initial, result.state, training.ways.why_not if isinstance(training, Together) else "asked to"


@pytest.mark.parametrize(("name", "unit", "how"), chosen(TOGETHER, TOGETHER_QUICK))
def test_common_passes_end_where_one_client_after_the_other_does(name: str, unit: str, how: str) -> None:
    initial, together, why_not = after_a_round(name, unit, how, 64)
    _, alone, _ = after_a_round(name, unit, how, 1)
    assert NOT_TOGETHER.get(name, "") in why_not
    assert bool(why_not) == (name in NOT_TOGETHER)
    start = initial.tensors.select(
        name for name in alone.tensors if alone.tensors[name].shape == initial.tensors[name].shape
    )
    moved = (alone.tensors.select(start) - start).norm()
    assert moved > 0
    assert (together.tensors - alone.tensors).norm() <= 1e-5 * max(moved, alone.tensors.norm())
