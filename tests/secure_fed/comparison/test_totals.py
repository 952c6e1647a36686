"""The privacy cost of all runs of a comparison together: which costs add up, to what total, and the notes where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from privacy import accounting
from privacy.composition import ORDERS
from secure_fed.commands.comparison.rows import Charge, charge_of, totals
from secure_fed.commands.comparison.tables import cost_ahead, cost_notes
from secure_fed.config import RunConfig
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.report.page.record import RunRecord

FILES = RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "test"): "test.jsonl"})
Z = 2.0


def charged(
    name: str = "a", seed: int = 0, base: RunConfig = FILES, divided: str = "natural", **settings: Any
) -> Charge:
    """The charge of a run with one Gaussian release of noise multiplier Z. The privacy unit is a client by default."""
    unit, tested = settings.pop("unit", "client"), settings.pop("tested", "test files")
    changes = {("federation", "seed"): seed, ("privacy", "unit"): unit, ("privacy", "epsilon"): 8.0}
    release = accounting.unamplified(Z)
    spent, rdp = accounting.epsilon(release, 1, 1e-5), accounting.rdp(release, 1, ORDERS)
    result = {
        "epsilon": spent,
        "epsilon_participants": settings.pop("participants", spent),
        "delta": 1e-5,
        "test": {"from": tested},
        "privacy": {
            "private": settings.pop("private", True),
            "unit": unit,
            "adjacency": settings.pop("adjacency", "one more or less"),
            "renyi": {f"{order:g}": found for order, found in zip(ORDERS, rdp, strict=True)},
        },
    }
    config = base.replace(changes).replace(settings.pop("also", {}))
    assert not settings
    found = charge_of(name, RunRecord("", config, {"partition": {"kind": divided}}, (), result))
    assert found is not None or not result["privacy"]["private"]
    return found  # type: ignore[return-value]


def test_runs_about_one_unit_are_composed_and_never_below_the_exact_epsilon() -> None:
    """n Gaussian releases of noise multiplier z equal one of z / sqrt(n), whose epsilon is known exactly."""
    for runs in (2, 6, 40):
        (total,) = totals([charged(seed=seed) for seed in range(runs)])
        exact = accounting.epsilon(accounting.unamplified(Z), runs, runs * 1e-5)
        assert exact < total.epsilon < min(1.15 * exact, total.epsilon_basic)
        assert total.epsilon_basic == pytest.approx(runs * accounting.epsilon(accounting.unamplified(Z), 1, 1e-5))
        assert total.delta == pytest.approx(runs * 1e-5)
    (alone,) = totals([charged()])
    assert alone.epsilon == alone.epsilon_basic


def test_epsilons_against_participants_are_composed_only_where_they_are_the_same() -> None:
    (same,) = totals([charged(), charged("b")])
    (other,) = totals([charged(), charged("b", participants=60.0)])
    assert same.epsilon_participants == same.epsilon
    assert other.epsilon_participants == pytest.approx(60 + charged().epsilon)


@pytest.mark.parametrize(
    ("one", "other", "units"),
    [
        ({"seed": 0}, {"seed": 1}, 1),
        ({"seed": 0, "divided": "iid"}, {"seed": 1, "divided": "iid"}, 2),
        ({"seed": 0, "divided": "iid"}, {"seed": 0, "divided": "iid", "name": "b"}, 1),
        ({"divided": "iid"}, {"divided": "iid", "also": {("federation", "clients"): 7}}, 2),
        ({"divided": "iid"}, {"divided": "dirichlet", "also": {("data", "alpha"): 7.0}}, 2),
        ({"seed": 0, "divided": "iid", "unit": "example"}, {"seed": 1, "divided": "iid", "unit": "example"}, 1),
        ({"seed": 0, "base": RunConfig(), "unit": "example"}, {"seed": 1, "base": RunConfig(), "unit": "example"}, 2),
        ({"unit": "example"}, {"unit": "client"}, 2),
        ({"adjacency": "one replaced by another"}, {}, 2),
        ({"also": {("privacy", "ledger"): "shared", ("privacy", "unit_name"): "ward"}}, {}, 2),
    ],
)
def test_costs_add_up_for_one_unit_alone(one: dict[str, Any], other: dict[str, Any], units: int) -> None:
    assert len(totals([charged(**one), charged(**other)])) == units


def test_a_run_whose_guarantee_is_void_has_no_cost_to_add() -> None:
    assert charged(private=False) is None


def test_what_is_said_of_clients_that_every_seed_draws() -> None:
    """Runs of one seed are added up, runs of different seeds are not, and no sum over all runs is printed."""
    charges = [charged(name, seed, divided="iid") for name in ("a", "b", "c") for seed in (0, 1)]
    said = cost_notes(charges, [])
    assert said[0].startswith("The 3 private runs about the same units that cost most together: epsilon ")
    assert "no epsilon holds against observers of runs of several" in said[1]
    assert not any("6 private runs" in line for line in said)
    notes = cost_notes([charged(seed=seed, base=RunConfig(), divided="iid") for seed in (0, 1)], [])
    assert notes[0].startswith("Each seed makes its own notes")
    skewed = {("data", "alpha"): 7.0}
    two_ways = cost_notes([charged(base=RunConfig(), divided="dirichlet", also=also) for also in ({}, skewed)], [])
    assert "no epsilon holds against observers of runs of several" in two_ways[0]
    named = FILES.replace({("data", "client"): "site"})
    mixed = cost_notes([charged(base=named), charged(base=named, divided="iid")], [])
    assert "no epsilon holds against observers of runs of several" in mixed[0]


@pytest.mark.parametrize(
    "other", [{"unit": "example"}, {"also": {("data", "client"): "ward"}}, {"adjacency": "replaced"}]
)
def test_of_runs_with_other_promises_no_sum_is_stated(other: dict[str, Any]) -> None:
    said = " ".join(cost_notes([charged(), charged("b", **other)], []))
    assert "none is stated against observers of all runs" in said
    assert "together: epsilon" not in said
    assert "none is stated" not in " ".join(cost_notes([charged(), charged("b")], []))


def test_what_is_said_of_a_choice_goes_by_where_the_test_rows_are_from() -> None:
    assert "Choosing a row by its accuracy costs nothing on top" in " ".join(cost_notes([charged()], []))
    held_out = " ".join(cost_notes([charged(), charged(tested=HELD_OUT["client"])], []))
    assert "costs nothing" not in held_out
    assert "No epsilon covers these rows, nor a choice by their accuracy" in held_out
    assert "No guarantee limits what the models of plain reveal" in " ".join(cost_notes([charged()], ["plain"]))
    assert cost_notes([], ["plain"]) == []


def test_the_price_of_the_best_alone_is_said_where_it_is_less() -> None:
    said = "only the best of a random number of tries, 20 on average, would cost"
    assert any(said in line for line in cost_notes([charged(seed=seed) for seed in range(20)], []))
    assert not any("only the best" in line for line in cost_notes([charged()], []))


def test_before_a_comparison_its_cost_is_said_from_the_settings() -> None:
    private = FILES.replace({("privacy", "unit"): "example", ("privacy", "epsilon"): 3.0})
    noisy = FILES.replace({("privacy", "unit"): "client", ("privacy", "noise_multiplier"): 1.0})
    assert cost_ahead({"plain": FILES}, 3) == []
    (line,) = cost_ahead({"plain": FILES, "a": private, "b": private.replace({("privacy", "epsilon"): 1.0})}, 3)
    assert "6 private runs will cost at most epsilon 12 (delta 6e-05) together" in line
    stated, noise = cost_ahead({"a": private, "noisy": noisy}, 2)
    assert "2 private runs will cost at most epsilon 6 (delta 2e-05)" in stated
    assert noise.startswith("noisy: a noise multiplier without privacy.epsilon")
