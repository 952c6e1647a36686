"""Texts recovered from secure sums: exact for few clients, fewer with larger cohorts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attacks import sum_inversion
from attacks.adversary.case import Case, Inapplicable, Settings
from tests.attacks.federations import case


@pytest.fixture(scope="module")
def several() -> Case:
    return case(clients=10, method__rank=16)


def test_the_sum_of_two_is_inverted_as_a_batch_of_two() -> None:
    """Its tokens are found, without their clients."""
    found = sum_inversion.run(case("secure_server", clients=2, method__rank=32), Settings()).measured
    assert found["sums"] == 2
    assert found["per_sum"][0]["bag_recall"] == 1.0
    assert "by_cohort" not in found  # behind masks single updates are not seen


@pytest.mark.nightly
def test_recall_fades_with_the_cohort(several: Case) -> None:
    by_cohort = sum_inversion.run(several, Settings()).measured["by_cohort"]
    assert list(by_cohort) == ["1", "2", "5", "10"]
    assert by_cohort["1"] == 1.0
    assert by_cohort["10"] < by_cohort["2"] <= 1.0
    assert by_cohort["10"] <= 0.2


def test_recall_is_of_those_who_are_in_a_sum() -> None:
    """Two of six clients are drawn in a round, by public coins: what comes back is of theirs."""
    of = case("secure_server", clients=6, federation__cohort=2, method__rank=32)
    found = sum_inversion.run(of, Settings()).measured
    assert found["cohorts_known"] is True
    assert found["per_sum"][0]["bag_recall"] == 1.0
    assert found["most_exposed"]["bag_recall"] == 1.0
    assert [row["clients"] for row in found["per_sum"]] == [2, 2]


def test_of_whom_is_left_open_where_one_of_the_cohort_is_missing() -> None:
    of = case("secure_server", clients=3, method__rank=32)
    short = replace(of, seen=replace(of.seen, sums=[replace(one, clients=2) for one in of.seen.sums]))
    finding = sum_inversion.run(short, Settings())
    assert finding.measured["cohorts_known"] is False
    assert "too low" in finding.note
    assert "too low" not in sum_inversion.run(of, Settings()).note


def test_groups_share_no_update(several: Case) -> None:
    own = [one for one in several.seen.updates if one.round == 0]
    groups = sum_inversion.groups_of(own, 3)
    names = [one.client for group in groups for one in group]
    assert [len(group) for group in groups] == [3, 3, 3]
    assert len(set(names)) == 9


def test_without_sums_it_is_inapplicable(several: Case) -> None:
    blind = replace(several, seen=replace(several.seen, sums=()))
    with pytest.raises(Inapplicable, match="sums"):
        sum_inversion.run(blind, Settings())
