"""Steps explained by gradients: the coefficients by their definition, and leaks that cosines do not find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks import regression, update_score
from attacks.adversary.case import Case, Inapplicable, Seen, Settings
from attacks.regression import RIDGE, Sketch, needed
from secure_fed.federation import Federation
from secure_fed.runs import roc
from secure_fed.runs.recording import Recorded
from secure_fed.tensors.tensors import Tensors
from tests.attacks import overfitted
from tests.cells import chosen

LEARNS = {"federation.rounds": 8, "method.rank": 8}
Ran = tuple[Federation, Tensors, Recorded]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return overfitted.run(tmp_path_factory.mktemp("rounds") / "run", LEARNS, clients=4, each=20)


def alike(count: int, size: int, shared: int, seed: int) -> Tensor:
    """Gradients that lie mostly in a few common directions."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(shared, size, generator=torch.Generator().manual_seed(0))
    mixture = 0.5 * torch.randn(count, shared, generator=generator)
    return mixture @ common + torch.randn(count, size, generator=generator)


def test_coefficients_are_those_of_ridge_regression() -> None:
    """As least squares with RIDGE m added to the data, solved by numpy."""
    rows, steps = alike(7, 12, 3, 1).double(), alike(2, 12, 3, 2).double()
    x = -(rows / rows.norm(dim=1, keepdim=True)).numpy()
    d = (steps / steps.norm(dim=1, keepdim=True)).numpy()
    penalty = np.sqrt(RIDGE * np.mean(np.sum(x * x, axis=1)))
    extended = np.vstack([x.T, penalty * np.eye(7)])
    expected = np.linalg.lstsq(extended, np.vstack([d.T, np.zeros((7, 2))]), rcond=None)[0]
    np.testing.assert_allclose(needed(rows, steps), expected, atol=1e-10)


def test_what_all_gradients_share_says_nothing() -> None:
    """Members and others alike point where the step does; only what is a member's own tells it from the others."""
    asked, population = alike(200, 2000, 30, 1), alike(300, 2000, 30, 2)
    step = -asked[:100].sum(0, keepdim=True) - alike(300, 2000, 30, 3).sum(0, keepdim=True)
    found = needed(torch.cat([asked, population]), step)[:200, 0]
    cosine = -torch.nn.functional.cosine_similarity(asked, step).numpy()
    area, plain = (roc.auc(score[:100], score[100:]) for score in (found, cosine))
    assert plain < 0.65
    assert area > plain + 0.2


def test_without_any_part_in_it_everybody_is_at_chance() -> None:
    areas = []
    for seed in range(30):
        asked, population = alike(100, 200, 20, 10 + seed), alike(100, 200, 20, 1000 + seed)
        step = -alike(50, 200, 20, 2000 + seed).sum(0, keepdim=True)
        score = needed(torch.cat([asked, population]), step)[:100, 0]
        areas.append(roc.auc(score[:50], score[50:]))
    assert abs(float(np.mean(areas)) - 0.5) < 4 * 0.058 / np.sqrt(30)


def test_a_gradient_or_a_step_of_zero_is_no_number_out_of_nothing() -> None:
    rows = alike(5, 9, 2, 1)
    rows[2] = 0.0
    found = needed(rows, torch.stack([alike(1, 9, 2, 3)[0], torch.zeros(9)]))
    assert np.isfinite(found).all()
    assert found[2, 0] == 0
    assert not found[:, 1].any()


def test_a_sketch_keeps_inner_products() -> None:
    vectors = alike(20, 20_000, 5, 1)
    same = Sketch(20_000, 30_000)
    assert torch.equal(same(vectors), vectors)
    sketch = Sketch(20_000, 4_000)
    short = sketch(vectors)
    assert short.shape == (20, 4_000)
    lengths = vectors.norm(dim=1)
    off = ((short @ short.T - vectors @ vectors.T) / (lengths[:, None] * lengths)).abs()
    assert float(off.max()) < 6 / np.sqrt(4_000)  # six standard deviations of one


@pytest.mark.parametrize("vantage", chosen(["fellow_client", "secure_server", "server"], ["fellow_client"]))
def test_what_was_learned_by_heart_is_found_and_the_sign_is_right(ran: Ran, vantage: str) -> None:
    members = ran[0].assembly.audit_pool.members
    found = regression.run(overfitted.case(ran, vantage), Settings())
    assert overfitted.area(found.scores, members) > 0.8
    assert abs(overfitted.area_of_shuffled(found.scores, members) - 0.5) < 0.03
    assert found.measured == {"rounds": 8, "units_without": 0}


@pytest.mark.nightly
def test_a_server_that_sees_single_updates_finds_more_than_by_cosines(ran: Ran) -> None:
    members, case = ran[0].assembly.audit_pool.members, overfitted.case(ran, "server")
    by_cosine = overfitted.area(update_score.run(case, Settings()).scores, members)
    assert overfitted.area(regression.run(case, Settings()).scores, members) > by_cosine


def test_updates_credited_to_other_clients_tell_nothing(ran: Ran) -> None:
    """The first round, whose start knows nobody; everybody's updates in the name of the client before it."""
    case, members, first = overfitted.case(ran, "server"), ran[0].assembly.audit_pool.members, Settings(max_rounds=1)
    names = list(ran[0].assembly.problem.names)
    turned = [replace(one, client=names[names.index(one.client) - 1]) for one in case.seen.updates]
    wrong = replace(case, seen=replace(case.seen, updates=turned))
    assert overfitted.area(regression.run(case, first).scores, members) > 0.8
    assert overfitted.area(regression.run(wrong, first).scores, members) < 0.67  # 2.6 deviations of 40 against 40


EVERYBODY = ("fellow_client", "secure_server", "server")
AVERAGED: list[tuple[str, tuple[str, ...]]] = [
    ("fra_lora", ("fellow_client",)),
    *((method, EVERYBODY) for method in ("fra_lora", "fedsvd", "fedpower")),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "vantages"), AVERAGED)
def test_other_ways_of_averaging_are_seen_through(tmp_path: Path, method: str, vantages: tuple[str, ...]) -> None:
    settings = {**LEARNS, "federation.rounds": 12, "training.lr": 0.2, "method.name": method, "method.rank": 4}
    ran = overfitted.run(tmp_path / "run", settings, clients=4, each=20)
    for vantage in vantages:
        found = regression.run(overfitted.case(ran, vantage), Settings()).scores
        assert overfitted.area(found, ran[0].assembly.audit_pool.members) > 0.65, vantage


@pytest.mark.nightly
def test_a_sketch_finds_it_too(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "_NUMBERS", 180 * 400)
    found = regression.run(overfitted.case(ran, "server"), Settings()).scores
    assert overfitted.area(found, ran[0].assembly.audit_pool.members) > 0.7


def test_rounds_are_spaced_and_refused_where_none_were_kept(ran: Ran) -> None:
    case = overfitted.case(ran, "fellow_client")
    assert regression.run(case, Settings(max_rounds=3)).measured["rounds"] == 3
    outsider = Case(case.assembly, Seen("outsider", case.seen.final), case.references)
    with pytest.raises(Inapplicable, match=r"evaluation\.record"):
        regression.run(outsider, Settings())
