"""Texts recovered from secure sums: exact for few clients, fewer with larger cohorts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attacks import sum_inversion
from attacks.adversary.case import Case, Inapplicable, Settings, Target
from attacks.audit import audited
from attacks.report import page
from attacks.report.words import texts
from secure_fed.methods.method import State
from secure_fed.runs.recording import Recorded
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


def test_an_audit_of_recorded_updates_shows_the_recall_by_cohort() -> None:
    """The server that reads single updates has the figures of the sum once more, with the recall by cohort beside them."""
    pair = case(clients=2, method__rank=32)
    recorded = Recorded(pair.seen.states, pair.seen.updates, lr=pair.seen.lr)
    final = State(pair.seen.final, round=2)
    audit = audited(Target(pair.assembly, final, recorded, {}), ["sum_inversion"], Settings(references=0))
    behind, single = (cell["measured"] for cell in audit["cells"] if cell["vantage"] in ("secure_server", "server"))
    assert single == behind | {"by_cohort": {"1": 1.0, "2": behind["recall"]}}
    html = page.page(audit.record)
    assert "recall with position, 1 client in a sum 100.0 %" in html
    assert "recall with position, 2 clients in a sum " in html
    assert texts(audit.record).count(" named ") == 1, "equal figures of two adversaries have one sentence"


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
