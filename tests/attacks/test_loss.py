"""The loss threshold: its scores are the final model's confidences, with the right sign, and depend on nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from attacks import loss
from attacks.adversary.case import Case, Settings
from tests.attacks import overfitted

MANY_ROUNDS = {"federation.rounds": 15, "method.rank": 8}


@pytest.fixture(scope="module")
def outsider(tmp_path_factory: pytest.TempPathFactory) -> Case:
    ran = overfitted.run(tmp_path_factory.mktemp("loss") / "run", MANY_ROUNDS, clients=4, each=20)
    return overfitted.case(ran, "outsider")


def scores(case: Case) -> np.ndarray:
    found = loss.run(case, Settings()).scores
    assert found is not None
    return found


def test_a_score_is_the_log_odds_of_the_right_label(outsider: Case) -> None:
    model = outsider.assembly.objective.load(outsider.seen.final).eval()
    for unit, score in zip(outsider.units, scores(outsider), strict=True):
        (example,) = unit.examples
        with torch.no_grad():
            p = torch.softmax(model(example["x"][None]).double(), 1)[0, example["labels"]]
        assert score == pytest.approx(float(torch.log(p / (1 - p))), abs=1e-5)


def test_what_was_learned_by_heart_is_found_and_the_sign_is_right(outsider: Case) -> None:
    members = outsider.assembly.audit_pool.members
    found = scores(outsider)
    assert overfitted.area(found, members) > 0.8
    assert overfitted.area(-found, members) < 0.2


def test_at_chance_before_training_and_under_shuffled_truth(outsider: Case) -> None:
    members = outsider.assembly.audit_pool.members
    assert abs(overfitted.area_of_shuffled(scores(outsider), members) - 0.5) < 0.03
    untrained = outsider.unit_confidences(outsider.assembly.initial.tensors)
    assert abs(overfitted.area(untrained, members) - 0.5) < 0.17  # more than two standard errors of 40 against 40


def test_a_run_without_any_recording_is_enough(tmp_path: Path) -> None:
    built, final, _ = overfitted.run(tmp_path / "run", {"federation.rounds": 1}, clients=2, each=10)
    from attacks.adversary.case import seen

    case = Case(
        built.assembly, seen("outsider", final, None), lambda count: pytest.fail("the loss needs no references")
    )
    assert len(scores(case)) == len(case.units) == 20
