"""References repeat the federation's procedure: compared with a run of it, and common passes with one client at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.adversary import shadows
from attacks.adversary.shadows import Reference, coins, lots, references, trained
from privacy.distributed import DistributedGaussian
from privacy.entropy import SeededEntropy
from privacy.errors import BudgetExhausted
from privacy.ledger import Ledger
from secure_fed.errors import UsageError
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.learning.training.local import Trained, scheduled_lr
from secure_fed.rounds.placement import SUM
from secure_fed.rounds.sums import OpenSum
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.contracts import runs
from tests.golden import refused

CLIENTS = 24
HALF = {"evaluation.audit_fraction": 0.6}
SMALL = {**HALF, "training.optimizer": "sgd", "training.lr": 0.05, "training.steps": None, "training.epochs": 1}
CENTRAL = {"privacy.unit": "client", "privacy.noise_multiplier": 0.3, "privacy.clip_norm": 0.5, "privacy.delta": 1e-3}


def few(method: str = "ffa_lora", **more: Any) -> Federation:
    """Four clinics; their examples are the units."""
    return runs.federation(runs.settings(method, **{**SMALL, **more}))


def many(method: str = "ffa_lora", **more: Any) -> Federation:
    """Twenty-four clients, which are the units; three or four take part in a round."""
    usual = {"federation.cohort": 4, **SMALL, **CENTRAL, **more}
    train = [runs.examples(seed + 1, 2 + seed % 5) for seed in range(CLIENTS)]
    config = runs.settings(method, **usual)
    return Federation(config, model=runs.model(), train=train, test=runs.examples(99, 12), entropy=SeededEntropy(3))


def drawn(federation: Federation, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return coins(count, lots(federation.assembly.audit_pool), np.random.default_rng(0))


def same(left: Tensors, right: Tensors) -> bool:
    return left.to_bytes() == right.to_bytes()


def require_close(found: Sequence[Tensors], expected: Sequence[Tensors], start: Tensors) -> None:
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        assert (other - start).norm() > 1e-2
        for name in one:
            torch.testing.assert_close(one.tensor(name), other.tensor(name), rtol=0, atol=2e-5)


def products(states: Sequence[Tensors]) -> list[Tensors]:
    """With each B A in place of its factors, whose singular vectors hang on the last bits where singular values are close."""
    found = []
    for tensors in states:
        both = {pair.module: tensors.tensor(pair.b) @ tensors.tensor(pair.a) for pair in pairs(tensors)}
        found.append(tensors.without(name for pair in pairs(tensors) for name in (pair.a, pair.b)) | both)
    return found


# Stacked.


HIDDEN = {
    **{"privacy.noise": "distributed", "privacy.hidden_cohort": True, "privacy.noise_multiplier": 1.0},
    "secure_aggregation.enabled": True,
}
REPEATED: list[tuple[Any, str, dict[str, Any]]] = [
    *((few, method, {}) for method in ("fedlora", "fra_lora", "rolora")),
    # Shrunk: a rank-r part hangs on the last bits where the r-th and the next singular value are close, as those of noise are.
    (many, "fra_lora", {"method.transport_form": "sketch", "method.sketch": 4, "method.denoise": "shrink"}),
    (many, "ffa_lora", {"evaluation.canaries": "direction", "method.personal": ("classifier",)}),
    (many, "ffa_lora", {"federation.vanishing": 0.5}),
    (many, "ffa_lora", {"privacy.noise": "local", "privacy.participations": 1}),
    (many, "ffa_lora", {"privacy.clip_quantile": 0.5}),
    (many, "ffa_lora", HIDDEN),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("make", "method", "more"), REPEATED)
def test_references_in_common_passes_are_those_trained_one_client_at_a_time(
    make: Any, method: str, more: dict[str, Any]
) -> None:
    federation = make(method, **more)
    inside = drawn(federation, 2)
    together, alone = trained(federation.assembly, inside, 1), trained(federation.assembly, inside, 1, common=False)
    assert (together.why_not_together == "") is (alone.why_not_together != "") is True
    start = products([federation.assembly.initial.tensors])[0]
    require_close(products(together.states), products(alone.states), start)
    assert (alone.states[1] - alone.states[0]).norm() > 1e-3, "other coins, another reference"


# The same procedure.


WEIGHED = {"federation.cohort": 3, "federation.weighting": "examples"}
RANKS = {"method.rank": 3, "method.ranks": [f"client-{client}={1 + client % 3}" for client in range(4)]}
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("fedlora", RANKS),
    ("ffa_lora", WEIGHED),
    ("fra_lora", {}),
    ("rolora", WEIGHED),
]


@pytest.mark.parametrize(("method", "more"), chosen(RUNS, [RUNS[0], RUNS[3]]))
def test_with_the_coins_of_the_run_it_is_the_run(method: str, more: dict[str, Any]) -> None:
    """Also where clients have ranks of their own."""
    rates = {"training.lr_schedule": "linear", "training.head_factor": 3.0}
    federation = few(method, **more, **rates, **{"training.together": 1})
    run = federation.run().state.tensors
    members = federation.assembly.audit_pool.members
    assert 0 < members.sum() < len(members)
    found = trained(federation.assembly, np.stack([members, ~members]), 1, common=False)
    assert same(found.states[0], run)
    assert not same(found.states[1], run)


NOISED: list[dict[str, Any]] = [
    {"privacy.noise": "central", "evaluation.canaries": "direction"},
    {"privacy.noise": "local", "privacy.participations": 1},
    {"privacy.clip_quantile": 0.5},
    {"federation.sampling": "schedule", "privacy.correlation": "banded", "privacy.band": 2},
]


@pytest.mark.parametrize("more", chosen(NOISED, NOISED[:1]))
def test_with_coins_and_noise_of_a_run_it_is_the_run(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "_seed_of", lambda seed, number: 3)  # the run's
    federation = many(**more, **{"training.together": 64})
    run = federation.run().state.tensors
    found = trained(federation.assembly, federation.assembly.audit_pool.members[None], 1)
    assert same(found.states[0], run), "in common passes of its own, whose shapes are public"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("canaries", ["none", "direction"])
def test_with_noise_in_the_steps_it_is_the_run(canaries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "_seed_of", lambda seed, number: 3)
    federation = few(
        **{**CENTRAL, "privacy.unit": "example", "privacy.noise_multiplier": 1.0, "evaluation.canaries": canaries}
    )
    run = federation.run().state.tensors
    found = trained(federation.assembly, federation.assembly.audit_pool.members[None], 1)
    assert same(found.states[0], run)
    assert found.why_not_together != ""


def test_a_run_that_ended_early_is_repeated_as_far_as_it_came() -> None:
    federation = few(**{"training.lr_schedule": "linear"})
    members = federation.assembly.audit_pool.members
    reference = Reference.of(federation.assembly, members, shadows._seed_of(1, 0))
    reference.round(scheduled_lr(federation.assembly.config.training, 0, runs.ROUNDS))
    part = trained(federation.assembly, members[None], 1, common=False, rounds=1)
    assert same(part.states[0], reference.state.tensors)


def test_a_few_at_a_time_are_the_same_and_noise_is_new_for_each_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, told = many(**{"federation.cohort": 3}), []
    inside = np.stack([federation.assembly.audit_pool.members] * 2)
    whole, other = (trained(federation.assembly, inside, seed, rounds=1).states for seed in (1, 2))
    monkeypatch.setattr(shadows, "_HELD", 1)
    parts = trained(federation.assembly, inside, 1, lambda *done: told.append(done), rounds=1).states
    require_close(parts, whole, federation.assembly.initial.tensors)
    assert told == [(1, 2), (2, 2)]
    assert not same(whole[0], whole[1])
    assert not same(whole[0], other[0])


def test_asking_other_clients_the_second_time_is_an_error() -> None:
    """Clients sit out what they would sit out in a run."""
    federation = few()
    reference = Reference.of(federation.assembly, federation.assembly.audit_pool.members, 0)
    jobs = reference.jobs(0.1)
    assert [job.examples for job in jobs.values()] == [client.examples for client in reference.clients]
    results = {client: Trained(job.before.select(job.trainable), 0.0) for client, job in jobs.items()}
    with refused(RuntimeError):
        reference.round(0.1, {**results, len(results): results[0]})
    held = many(**{"privacy.noise": "local", "privacy.participations": 1, "federation.cohort": CLIENTS // 2}).assembly
    allowance = Reference.of(held, np.ones(len(held.audit_pool.units), dtype=bool), 0).clients[0]._setup.allowance
    assert [allowance("a", 2, round_) for round_ in (0, 0, 1)] == [2, 2, 0]
    assert allowance("b", 2, 1) == 2


@pytest.mark.parametrize("more", [{}, {"federation.weighting": "examples", "secure_aggregation.most_examples": 4}])
def test_a_masked_federation_is_repeated_without_masks(more: dict[str, Any]) -> None:
    federation = few(**{"secure_aggregation.enabled": True, **more})
    run = federation.run().state.tensors
    (found,) = trained(federation.assembly, federation.assembly.audit_pool.members[None], 1).states
    for name in run:
        torch.testing.assert_close(found.tensor(name), run.tensor(name), rtol=0, atol=2e-5)


def test_shares_of_noise_become_noise_of_the_same_size_on_the_sum() -> None:
    masks = {"secure_aggregation.enabled": True, "secure_aggregation.dropout": 0.3}
    drawn = {"federation.sampling": "fixed", "federation.cohort": 8}
    federation = many(**{"privacy.noise": "distributed", **masks, **drawn})
    shares = federation.assembly.protection.shares
    assert isinstance(shares, DistributedGaussian)
    reference = Reference.of(federation.assembly, federation.assembly.audit_pool.members, 0)
    protection = reference.server.protection
    assert (protection.placement, protection.hidden) == (SUM, False)
    assert isinstance(reference.server.summing, OpenSum)
    total = {"a": torch.zeros(100, 100), "b": torch.zeros(2000)}
    noised = protection.mechanism.noised(total, 0.5, SeededEntropy(0).stream("x"))
    expected = shares.std(0.5, 12_000, shares.contributors)
    assert torch.cat([tensor.flatten() for tensor in noised.values()]).std() == pytest.approx(expected, rel=0.03)
    assert expected > 1.02 * federation.assembly.protection.mechanism.std(0.5), "more shares than are counted on"
    assert protection.mean_noise_std(0.5, 8, 12_000) == pytest.approx(expected / 8)


@pytest.mark.parametrize("cohort", [4, CLIENTS])
def test_clients_that_are_outside_are_not_in_the_federation(cohort: int) -> None:
    federation = many(**{"federation.cohort": cohort})
    units = federation.assembly.audit_pool.units
    for members in drawn(federation, 3):
        reference = Reference.of(federation.assembly, members, 0)
        names = [client.name for client in reference.clients]
        assert set(names).isdisjoint(unit.name for unit, is_in in zip(units, members, strict=True) if not is_in)
        assert len(names) == CLIENTS - int((~members).sum())
        assert list(reference.server.names) == names
        sampler = reference.server.sampler  # as of all clients, whoever is outside
        assert (sampler.expected, sampler.rate) == (pytest.approx(cohort), pytest.approx(cohort / CLIENTS))


# Nothing is charged.


@pytest.mark.slow
def test_no_ledger_is_made_or_touched_even_where_the_budget_is_spent(tmp_path: Path) -> None:
    ledger = tmp_path / "shared.sqlite"
    Ledger.create(ledger, data_set="wards", epsilon=2.0, delta=1e-3)
    coins = {"federation.sampling": "poisson", "privacy.noise_multiplier": 1.0}
    federation = many(**coins, **{"privacy.ledger": str(ledger)})
    federation.run(tmp_path / "run")
    with pytest.raises(BudgetExhausted):
        federation.run(tmp_path / "another")
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    assert ledger in before
    references(federation.assembly, 2, 0)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    assert federation.assembly.charges.budget is None


# Coins.


@every("count", [2, 7, 16])
def test_every_unit_is_inside_of_half_the_references(count: int) -> None:
    inside = coins(count, range(2000), np.random.default_rng(0))
    assert inside.shape == (count, 2000)
    assert set(inside.sum(0).tolist()) == {count // 2, (count + 1) // 2}
    share = inside.mean(1)  # 2,000 fair coins each: five standard deviations are 0.056
    assert np.abs(share - 0.5).max() < 0.056
    alike = (inside[:, :-1] == inside[:, 1:]).mean(1)
    assert np.abs(alike - 0.5).max() < 0.056, "units' coins are independent within a reference"


def test_coins_depend_on_the_seed_and_equal_examples_share_theirs() -> None:
    federation = few(**{"federation.rounds": 1})
    found = [references(federation.assembly, 2, seed).inside for seed in (0, 0, 1)]
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    units = federation.assembly.audit_pool.units
    copied = replace(federation.assembly.audit_pool, units=(*units, replace(units[0], name="copy", client="elsewhere")))
    inside = coins(8, lots(copied), np.random.default_rng(0))
    assert np.array_equal(inside[:, 0], inside[:, -1])
    texts = {unit.examples[0]["input_ids"].tobytes() for unit in units}
    assert len(set(lots(federation.assembly.audit_pool))) == len(texts)
    with refused(UsageError):
        references(federation.assembly, 1, 0)
    with refused(UsageError):
        references(few(**{"evaluation.audit_fraction": 0.0}).assembly, 2, 0)
