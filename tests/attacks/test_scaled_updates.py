"""Scaling by clipping hides nothing: recovery from an update does not depend on its length."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from attacks import gradient_inversion
from attacks.adversary.case import Case, Settings
from attacks.texts import factor_changes
from attacks.texts.factor_changes import Sent, families
from attacks.texts.recovery import Recovery, prior_knowledge, recover
from attacks.texts.span import Family
from secure_fed.runs.recording import Update
from secure_fed.tensors.tensors import Tensors
from tests.attacks.federations import case
from tests.cells import chosen

FACTORS = (1e-3, 0.3, 1e3)
METHODS = ("fedlora", "ffa_lora", "fra_lora")


@pytest.fixture(scope="module", params=METHODS)
def several(request: pytest.FixtureRequest) -> Case:
    """Two clients of three texts, so that the rank is not large enough to be careless."""
    return case(clients=2, each=3, method__name=request.param, method__rank=40)


def read(of: Case, factor: float) -> tuple[Recovery, Recovery]:
    """One client's second update, and one in which B moves alone."""
    at = prior_knowledge(of)
    found = [one for one in of.seen.updates if one.client == of.seen.updates[0].client]
    sent = [Sent(one.contribution * factor, at.before(one.round)) for one in found]
    first, second = recover([[one] for one in sent], at.first, at.scale, at.known, 3)
    return first, second


@pytest.mark.nightly
@pytest.mark.parametrize("factor", chosen(FACTORS, [1e-3, 1e3]))
def test_scaling_changes_nothing(several: Case, factor: float) -> None:
    for one, scaled in zip(read(several, 1.0), read(several, factor), strict=True):
        assert one.applies
        assert len(one.certain) > 20
        assert (scaled.certain, scaled.why, scaled.rank) == (one.certain, one.why, one.rank)


def test_the_factor_matters() -> None:
    """A has more rows than the space is wide; if rounding is taken for less than it is, every candidate would pass."""
    of = case(clients=1, each=3, method__rank=64)
    at, one = prior_knowledge(of), of.seen.updates[-1]

    def of_a(factor: float) -> Family:
        sent = Sent(one.contribution * factor, at.before(one.round))
        return families([sent], at.first, at.scale)[0]

    assert of_a(1.0).rank == of_a(1e3).rank < 128
    with patch.object(factor_changes, "scaled_by", lambda changes: None):
        assert not of_a(1.0).vacuous
        assert of_a(1e3).vacuous


@pytest.mark.parametrize("factor", FACTORS)
def test_products_whose_factors_do_not_show_are_read_at_any_scale(factor: float) -> None:
    of = case(clients=1, method__name="fra_lora", method__rank=4)
    at, one = prior_knowledge(of), of.seen.updates[-1]
    dense = one.contribution.dense()
    plain, scaled = (families([Sent(dense * f, at.before(one.round))], at.first, at.scale) for f in (1.0, factor))
    assert [(family.name, family.rank) for family in scaled] == [(family.name, family.rank) for family in plain]
    inputs = next(at.first.blocks())[1][:500]
    assert torch.allclose(scaled[0].distances(inputs), plain[0].distances(inputs), atol=1e-3)


def clipped(update: Update, factor: float) -> Update:
    return Update(update.round, update.client, update.pass_name, update.contribution * factor, update.weight)


@pytest.mark.nightly
def test_the_whole_attack_finds_the_same_in_clipped_updates() -> None:
    """Every client is clipped by a different factor."""
    of = case(clients=3, each=4, method__rank=32)
    short = [clipped(one, 0.5 / (2 + index)) for index, one in enumerate(of.seen.updates)]
    names = ("recall", "precision", "bag_recall", "bag_precision")
    plain = gradient_inversion.run(of, Settings()).measured
    found = gradient_inversion.run(replace(of, seen=replace(of.seen, updates=short)), Settings()).measured
    assert plain["exact_applicable"] == 3  # in the second round
    assert plain["bag_recall"] > 0.3
    assert {name: found[name] for name in names} == pytest.approx({name: plain[name] for name in names}, abs=0.01)
    assert found["all_rounds"]["bag_recall"] == pytest.approx(plain["all_rounds"]["bag_recall"], abs=0.01)


def test_noise_is_known_by_its_size_and_hides_the_factor() -> None:
    change = Tensors({"a": torch.randn(4, 8)})
    assert Sent(change, Tensors({"a": torch.randn(4, 8)}), noise_std=1.0).factor == 1.0
