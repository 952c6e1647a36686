"""The sanity tests of audits at a meaningful size: the built-in model, hundreds of units, several runs.

`make weekly` runs them and prints their figures; docs/audit_measured.md shows one such run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from attacks.adversary.case import Settings, Target, opened
from attacks.audit import audited
from privacy.mechanisms import Gaussian
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from tests.attacks import canaried
from tests.attacks.test_audit import with_coins

pytestmark = pytest.mark.weekly

SMALL: dict[str, Any] = {
    **{"data.examples": 800, "data.test_examples": 400, "federation.clients": 8, "federation.cohort": 8},
    **{"evaluation.audit_fraction": 1.0, "evaluation.every": 100},
}
BY_HEART = {
    **SMALL,
    **{"method.name": "fedlora", "method.rank": 16, "federation.rounds": 12, "training.epochs": 4, "training.lr": 5e-3},
}
CLIENTS = {
    **{"data.examples": 2400, "data.test_examples": 200, "method.name": "ffa_lora", "training.lr": 0.02},
    **{"federation.clients": 800, "federation.cohort": 160, "federation.rounds": 8, "federation.sampling": "poisson"},
    **{"evaluation.audit_fraction": 0.5, "evaluation.canaries": "direction", "evaluation.record": "models"},
    "evaluation.every": 100,
}


def audit_of(folder: Path, settings: Mapping[str, Any], names: list[str], references: int = 0) -> dict[str, Any]:
    config = RunConfig().replace({tuple(name.split(".", 1)): value for name, value in settings.items()})  # type: ignore[misc]
    Federation(config).run(folder)
    return audited(opened(folder), names, Settings(references=references))


def cell(audit: Mapping[str, Any], attack: str, vantage: str = "outsider") -> dict[str, Any]:
    found = next(one for one in audit["cells"] if (one["attack"], one["vantage"]) == (attack, vantage))
    tpr = (found["tpr_at_fpr"] or {}).get("0.01")
    low, high = found["auc_interval"]
    caught = "" if tpr is None else f", TPR {tpr['tpr']:.3f} at {tpr['fpr']:.3f} FPR"
    bound = found["epsilon_lower"]
    print(
        f"\n{attack}, {vantage}: AUC {found['auc']:.3f} ({low:.3f} to {high:.3f}){caught}, epsilon at least {bound}",
        end="",
    )
    return dict(found)


def test_learned_by_heart(tmp_path: Path) -> None:
    audit = audit_of(tmp_path / "run", BY_HEART, ["loss", "lira", "lira_offline", "rmia"], references=16)
    found = {name: cell(audit, name) for name in ("loss", "lira", "lira_offline", "rmia")}
    assert found["loss"]["auc_interval"][0] > 0.5
    assert found["lira"]["auc"] > found["loss"]["auc"]
    assert audit["verdict"]["level"] == "leak"
    assert audit["baseline"]["at_chance"]


def test_learned_by_heart_under_privacy(tmp_path: Path) -> None:
    private = {**BY_HEART, "privacy.unit": "example", "privacy.epsilon": 4.0, "privacy.clip_norm": 0.5}
    audit = audit_of(tmp_path / "run", private, ["loss"])
    found = cell(audit, "loss")
    assert found["epsilon_lower"] <= found["epsilon_accounted"] <= 4
    assert audit["verdict"]["level"] != "violation"


def test_wrong_labels_are_remembered(tmp_path: Path) -> None:
    longer = {**BY_HEART, "evaluation.canaries": "mislabelled", "federation.rounds": 20}  # wrong labels take their time
    audit = audit_of(tmp_path / "run", longer, ["one_run"])
    assert cell(audit, "one_run")["auc"] > 0.9
    assert cell(audit, "one_run")["epsilon_lower"] > 1


def test_models_that_never_trained_tell_nothing(tmp_path: Path) -> None:
    covered, leaks = 0, 0
    for seed in range(20):
        still = {**SMALL, "federation.rounds": 1, "training.lr": 1e-12, "federation.seed": seed}
        audit = audit_of(tmp_path / f"run-{seed}", still, ["loss"])
        low, high = cell(audit, "loss")["auc_interval"]
        covered += low <= 0.5 <= high
        leaks += audit["verdict"]["level"] == "leak"
    print(f"\n{covered} of 20 intervals cover a half, {leaks} leaks called", end="")
    assert covered >= 16  # 19 are due; fewer than 16 come in 3 of 1,000 nights
    assert leaks <= 3


def test_coins_drawn_anew_call_a_leak_as_seldom_as_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model that never saw any unit, and 300 draws of coins: at most 5 % of audits may report a leak."""
    still = {**SMALL, "federation.rounds": 1, "training.lr": 1e-12}
    config = RunConfig().replace({tuple(name.split(".", 1)): value for name, value in still.items()})  # type: ignore[misc]
    built = Federation(config)
    result = built.run(tmp_path / "run")
    monkeypatch.setattr("attacks.audit.baseline", lambda units, members, seed: "left out")
    leaks = 0
    for seed in range(300):
        coins = np.random.default_rng(seed).random(len(built.assembly.audit_pool.units)) < 0.5
        target = with_coins(Target(built.assembly, result.state, None, result.summary), coins)
        leaks += audited(target, ["loss"], Settings(references=0))["verdict"]["level"] == "leak"
    print(f"\n{leaks} of 300 deals called a leak", end="")
    assert leaks <= 26  # 15 are due; more than 26 come in 3 of 1,000 nights


@pytest.mark.parametrize("noise", [True, False], ids=["as it is", "its noise forgotten"])
def test_canaries_of_random_direction(tmp_path: Path, noise: bool) -> None:
    private = {**CLIENTS, "privacy.unit": "client", "privacy.epsilon": 1.0, "privacy.clip_norm": 3.1}
    with nullcontext() if noise else patch.object(Gaussian, "noised", canaried._clean):
        audit = audit_of(tmp_path / "run", private, ["canary_cosine"])
    found = cell(audit, "canary_cosine", "fellow_client")
    print(f", accounted {found['epsilon_accounted']:.2f}", end="")
    assert (found["epsilon_lower"] <= found["epsilon_accounted"]) is noise
    assert (audit["verdict"]["level"] == "violation") is not noise
