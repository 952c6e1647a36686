"""Audits of canaries and dummies: they find leaks, flag broken noise under every kind of neighbours, and no other."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from attacks import loss, one_run
from attacks.adversary.case import Case, Inapplicable, Seen, Settings, Target
from attacks.audit import audited
from privacy.entropy import SeededEntropy
from privacy.mechanisms import Gaussian
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.runs import roc
from secure_fed.runs.membership import kept_scores, of_data
from secure_fed.runs.recording import Recorded
from tests.attacks import canaried
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import toys

LEARNS: dict[str, Any] = {
    **{"evaluation.audit_fraction": 0.5, "method.rank": 8, "federation.rounds": 4},
    **{"training.lr": 0.005, "training.steps": 20, "training.batch_size": 20},
}
SIZES = canaried.MANY_EXAMPLES


def run(case: Case) -> Any:
    finding: Any = one_run.run(case, Settings())
    assert finding.scores.shape == (len(case.units),)
    return finding


def test_wrong_labels_are_found_without_noise() -> None:
    """Were the confidence in the label that the data gave, who trained on a wrong one would score low."""
    case, epsilon = canaried.case({**LEARNS, "evaluation.canaries": "mislabelled"}, SIZES, "outsider")
    finding = run(case)
    assert epsilon is None
    assert canaried.auc(finding.scores, case) > 0.9
    np.testing.assert_array_equal(finding.scores, case.unit_confidences(case.seen.final))
    by_name = {f"client-{c}/{i}": item for c in range(3) for i, item in enumerate(canaried.examples(c + 1, 40))}
    assert all(unit.examples[0]["labels"] != by_name[unit.name]["labels"] for unit in case.units)
    given = case.confidences(case.seen.final, [by_name[unit.name] for unit in case.units])
    assert canaried.auc(given, case) < 0.5


@pytest.mark.nightly
def test_of_ordinary_units_it_is_the_loss_threshold_and_not_made_twice() -> None:
    planted, _ = canaried.case({**LEARNS, "evaluation.canaries": "mislabelled"}, SIZES, "outsider")
    ordinary, _ = canaried.case(LEARNS, SIZES, "outsider")
    with refused(Inapplicable):
        one_run.run(ordinary, Settings())
    fits: Any = loss.run(ordinary, Settings()).scores
    assert canaried.auc(fits, ordinary) < canaried.auc(run(planted).scores, planted)


# The run's own figure.

DIRECTIONS: dict[str, Any] = {
    **canaried.CLIENTS,
    **{"federation.cohort": 20, "federation.rounds": 3, "method.rank": 2, "privacy.noise_multiplier": 0.5},
}
FIGURES: dict[str, dict[str, Any]] = {
    "fedlora": {"method.name": "fedlora"},
    "a personal head": {"method.name": "fedlora", "method.personal": ["classifier.weight"]},
    "ffa_lora": {"method.name": "ffa_lora"},
    "bitfit": {"method.name": "bitfit", "method.rank": RunConfig().method.rank},
    "momentum": {"method.name": "fedlora", "federation.server_optimizer": "momentum"},
    "examples": {
        **{"privacy.unit": "example", "federation.cohort": 60, "federation.rounds": 1},
        "training.optimizer": "sgd",
    },
}


def ran(settings: dict[str, Any]) -> tuple[dict[str, Any], Case]:
    """The run's own measurements on its data, and an outsider's case."""
    federation = toys.federation({**DIRECTIONS, **settings}, sizes=[3] * 80, entropy=SeededEntropy(1))
    result = federation.run()
    told: Any = of_data(federation.assembly, result.state)
    return told, Case(federation.assembly, Seen("outsider", result.state.tensors), canaried.never)


@pytest.mark.parametrize("what", chosen(FIGURES, ["a personal head"]))
def test_a_run_and_its_audit_give_one_figure(what: str) -> None:
    told, case = ran(FIGURES[what])
    scores, members = run(case).scores, case.assembly.audit_pool.members
    found = roc.to_dict(roc.rank(scores[members], scores[~members]))
    assert told["attack"] == "one_run"
    assert told["auc"] == found["auc"]
    assert told["auc_interval"] == found["auc_interval"]
    assert told["tpr_at_fpr"] == found["tpr_at_fpr"]


@pytest.mark.parametrize("method", chosen(["fra_lora", "rolora", "fra_then_ffa", "fedask", "fedpower"], ["fra_lora"]))
def test_where_a_run_could_only_give_another_figure_it_gives_none(method: str) -> None:
    """What the change of the first round's tensors says would be no score of the audit's, and go by the same name."""
    told, case = ran({"method.name": method})
    assert told["attack"] == "one_run"
    assert told["auc"] is told["auc_interval"] is told["tpr_at_fpr"] is None
    assert told["why"].startswith(f"with {method} clients do not send ")
    assert "`secure-fed audit`" in told["why"]
    assert np.isfinite(run(case).scores).all(), "the audit has one"


# Dummies.


MASKED = {
    "secure_aggregation.enabled": True,
    "secure_aggregation.bits": 64,
    "secure_aggregation.corrupt": 0.0,
    "secure_aggregation.dropout": 0.0,
}
PLACES: dict[str, dict[str, Any]] = {
    "central": {},
    "fixed": {"federation.sampling": "fixed"},
    "local": {"privacy.noise": "local", "privacy.participations": 3},
    "distributed": {"privacy.noise": "distributed", **MASKED},
    "example": {**canaried.EXAMPLES, "privacy.unit": "example"},
}


def with_dummies(
    place: str, *, noise: bool, dummies: int | None = 120, clients: int = 6, rounds: int = 3
) -> tuple[Federation, Target]:
    """A run in which every client takes part in each round, and the target for its audit."""
    usual = {**canaried.CLIENTS, "federation.cohort": clients, "privacy.noise_multiplier": 10.0, **PLACES[place]}
    settings = usual | {"evaluation.dummies": dummies, "federation.rounds": rounds}
    for name in ("evaluation.audit_fraction", "evaluation.canaries"):
        del settings[name]
    sizes = [40] * 3 if place == "example" else [2] * clients
    states = canaried.States()
    built = Federation(
        toys.config(settings),
        model=canaried.wide(),
        train=[canaried.examples(client + 1, size) for client, size in enumerate(sizes)],
        test=canaried.examples(999, 20),
        entropy=SeededEntropy(0),
        callbacks=[states],
    )
    with ExitStack() as silent:
        if not noise:
            silent.enter_context(patch.object(Gaussian, "noised", canaried._clean))
            silent.enter_context(
                patch("privacy.distributed.discrete_gaussian", lambda _, size, __: np.zeros(size, np.int64))
            )
        result = built.run()
    summary = {**result.summary, "privacy": {**result.summary["privacy"], "private": True}}  # noise came from a seed
    recorded = Recorded({0: built.assembly.initial.tensors, **states.kept}, lr=dict.fromkeys(range(rounds), 0.05))
    return built, Target(built.assembly, result.state, recorded, summary)


@pytest.mark.nightly
@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_contradicts_its_guarantee_without_its_noise_alone_whoever_should_add_it(place: str, noise: bool) -> None:
    federation, target = with_dummies(place, noise=noise)
    audit = audited(target, ["canary_cosine", "one_run", "loss"], Settings(references=0))
    assert audit["audited_of"] == "dummies"
    cells = [one for one in audit["cells"] if one["applicable"] and one["epsilon_accounted"] is not None]
    assert cells
    kept = all((one["epsilon_lower"] or 0.0) <= one["epsilon_accounted"] for one in cells)
    assert kept is (target.result["membership"]["auc"] < 0.95) is noise
    pool = federation.assembly.audit_pool
    found = kept_scores(target.final, pool)
    assert noise or found[pool.members].mean() > found[~pool.members].mean()
    whys = [one["why"] for one in audit["cells"] if one["attack"] == "loss" and one["vantage"] == "fellow_client"]
    assert any("nobody's data" in why for why in whys)
    assert "no texts" in audit["baseline"]["why"]


@pytest.mark.parametrize("noise", chosen([True, False], [False]))
def test_the_audit_of_a_private_run_of_a_hundred_clients_says_something(noise: bool) -> None:
    """With the dummies that such a run has by default."""
    federation, target = with_dummies("central", noise=noise, dummies=None, clients=100, rounds=1)
    audit = audited(target, ["canary_cosine"], Settings(references=0))
    assert audit["members"] + audit["non_members"] == federation.assembly.protection.dummies.dummies == 100
    assert target.result["membership"]["auc"] is not None
    assert audit["verdict"]["level"] == ("none_found" if noise else "violation")
