"""Losses over the rounds: the score by hand, and what it finds."""

from __future__ import annotations

import numpy as np
import pytest

from attacks import round_losses
from attacks.adversary.case import Case, Inapplicable, Settings
from attacks.adversary.steps import spaced
from tests.attacks import overfitted

LEARNS = {"federation.rounds": 15, "method.rank": 8}


@pytest.fixture(scope="module")
def fellow(tmp_path_factory: pytest.TempPathFactory) -> Case:
    ran = overfitted.run(tmp_path_factory.mktemp("rounds") / "run", LEARNS, clients=4, each=20)
    return overfitted.case(ran, "fellow_client")


def test_a_trajectory_counts_rounds_by_how_far_above_the_population() -> None:
    phi = np.array([[1.0, 2.0], [10.0, 70.0]])
    population = np.array([[0.0, 2.0], [20.0, 60.0]])  # means 1 and 40, deviations 1 and 20
    assert round_losses.trajectory(phi, population) == pytest.approx([(0 - 1.5) / 2, (1 + 1.5) / 2])
    assert not round_losses.trajectory(phi, np.ones((2, 2))).any()


def test_what_was_learned_by_heart_is_found_and_the_sign_is_right(fellow: Case) -> None:
    members = fellow.assembly.audit_pool.members
    found = round_losses.run(fellow, Settings())
    assert overfitted.area(found.scores, members) > 0.8
    assert abs(overfitted.area_of_shuffled(found.scores, members) - 0.5) < 0.03
    assert found.measured["rounds"] == 15


def test_rounds_are_spaced_evenly(fellow: Case) -> None:
    assert spaced(list(range(10)), None) == list(range(10))
    assert spaced(list(range(10)), 4) == [0, 3, 6, 9]
    assert spaced([4, 5], 4) == [4, 5]
    assert spaced([4, 5, 6], 1) == [4]
    assert round_losses.run(fellow, Settings(max_rounds=3)).measured["rounds"] == 3


def test_who_saw_no_rounds_is_told_what_to_set(fellow: Case) -> None:
    outsider = Case(fellow.assembly, type(fellow.seen)("outsider", fellow.seen.final), fellow.references)
    with pytest.raises(Inapplicable, match=r"evaluation\.record"):
        round_losses.run(outsider, Settings())
