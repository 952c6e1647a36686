"""The one-run audit: its score for each kind of canary, leaks that it finds, and no false alarms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attacks import canary_cosine, loss, one_run
from attacks.adversary.case import Case, Inapplicable, Seen, Settings
from attacks.evidence.bounds import lower_bound
from privacy.entropy import SeededEntropy
from secure_fed.config import RunConfig
from secure_fed.runs import roc
from secure_fed.runs.membership import of_data
from tests.attacks import canaried
from tests.cells import chosen
from tests.secure_fed import toys

LEARNS: dict[str, Any] = {
    "evaluation.audit_fraction": 0.5,
    "method.rank": 8,
    "training.lr": 0.005,
    "training.steps": 20,
    "training.batch_size": 20,
    "federation.rounds": 8,
}
SIZES = canaried.MANY_EXAMPLES


def run(case: Case) -> Any:
    finding = one_run.run(case, Settings())
    assert finding.scores is not None
    assert finding.scores.shape == (len(case.units),)
    return finding


def test_wrong_labels_are_found_without_noise() -> None:
    case, epsilon = canaried.case({**LEARNS, "evaluation.canaries": "mislabelled"}, SIZES, "outsider")
    finding = run(case)
    assert epsilon is None
    assert canaried.auc(finding.scores, case) > 0.9
    np.testing.assert_array_equal(finding.scores, case.unit_confidences(case.seen.final))


@pytest.mark.nightly
def test_of_ordinary_units_it_is_the_loss_threshold_and_not_made_twice() -> None:
    planted, _ = canaried.case({**LEARNS, "evaluation.canaries": "mislabelled"}, SIZES, "outsider")
    ordinary, _ = canaried.case(LEARNS, SIZES, "outsider")
    with pytest.raises(Inapplicable, match=r"no canaries were planted \(evaluation.canaries\)"):
        one_run.run(ordinary, Settings())
    fits = loss.run(ordinary, Settings()).scores
    assert fits is not None
    assert canaried.auc(fits, ordinary) < canaried.auc(run(planted).scores, planted)


def test_the_confidence_is_in_the_planted_label() -> None:
    """Were it in the label that the data gave, who trained on a wrong one would score low."""
    case, _ = canaried.case({**LEARNS, "evaluation.canaries": "mislabelled"}, SIZES, "outsider")
    by_name = {f"client-{c}/{i}": item for c in range(3) for i, item in enumerate(canaried.examples(c + 1, 40))}
    assert all(unit.examples[0]["labels"] != by_name[unit.name]["labels"] for unit in case.units)
    given = case.confidences(case.seen.final, [by_name[unit.name] for unit in case.units])
    assert canaried.auc(given, case) < 0.5


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [(canaried.CLIENTS, canaried.MANY_CLIENTS), (canaried.EXAMPLES, canaried.MANY_EXAMPLES)],
    ids=["clients", "examples"],
)
def test_the_bound_holds_with_noise_and_shows_that_there_is_none(settings: dict[str, Any], sizes: list[int]) -> None:
    noised = {**settings, "privacy.noise_multiplier": 10.0}
    private, epsilon = canaried.case(noised, sizes, "outsider")
    broken, _ = canaried.case(noised, sizes, "outsider", noise=False)
    assert epsilon is not None
    assert bound(private) <= epsilon < bound(broken)


def test_noise_hides_wrong_labels() -> None:
    settings = {**canaried.EXAMPLES, "evaluation.canaries": "mislabelled", "privacy.noise_multiplier": 10.0}
    case, epsilon = canaried.case(settings, SIZES, "outsider")
    assert epsilon is not None
    assert bound(case) <= epsilon


def bound(case: Case) -> float:
    found = lower_bound(run(case).scores, case.assembly.audit_pool.members, 1e-3, 0.05).epsilon
    assert found is not None
    return found


@pytest.mark.nightly
def test_of_directions_it_reads_the_last_state_alone_whoever_asks() -> None:
    case, _ = canaried.case({**canaried.CLIENTS, "privacy.noise_multiplier": 10.0}, canaried.MANY_CLIENTS, noise=False)
    outside = Case(case.assembly, Seen("outsider", case.seen.final), canaried.never)
    np.testing.assert_array_equal(run(case).scores, run(outside).scores)
    fellow = canary_cosine.run(case, Settings()).scores
    assert fellow is not None
    assert not np.allclose(fellow, run(case).scores)


# The run's own figure.

DIRECTIONS: dict[str, Any] = {
    **canaried.CLIENTS,
    "federation.cohort": 20,
    "federation.rounds": 3,
    "method.rank": 2,
    "privacy.noise_multiplier": 0.5,
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
    told = of_data(federation.assembly, result.state)
    assert told is not None
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
