"""Rows, tables, drawings and total costs of run records made by hand, for cases that a short real run would not show."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from typing import Any

import pytest

from privacy import accounting
from privacy.composition import ORDERS
from secure_fed.commands.comparison.rows import Charge, Row, charge_of, row_of, totals
from secure_fed.commands.comparison.tables import (
    as_csv,
    cells,
    cost_ahead,
    cost_notes,
    drawn,
    heads,
    markdown,
    measured,
    notes,
    numbers,
)
from secure_fed.config import RunConfig
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.report.record import RunRecord


def record(accuracies: list[float | None], config: RunConfig | None = None, **result: Any) -> RunRecord:
    """The record of a finished run that sent 300 bytes up and 100 down in each round. With an `epsilon`, the run is private."""
    rounds = [
        {"round": number, "bytes_up": 300, "bytes_down": 100, **({} if value is None else {"accuracy": value})}
        for number, value in enumerate(accuracies, 1)
    ]
    said = {
        "rounds": len(rounds),
        "accuracy": accuracies[-1],
        "bytes_up": 300 * len(rounds),
        "bytes_down": 100 * len(rounds),
        "seconds": 2.0,
        "epsilon": None,
        "ended_early": None,
        "metrics": {},
        "diagnostics": None,
        **(_GUARANTEE if "epsilon" in result else {}),
        **result,
    }
    return RunRecord("seed", config or RunConfig(), {"partition": {"kind": "natural"}}, tuple(rounds), said)


_GUARANTEE = {
    "epsilon_participants": 9.0,
    "delta": 1e-5,
    "test": {"from": "test files"},
    "privacy": {"private": True, "unit": "a client", "adjacency": "one client more or less", "renyi": {}},
}
NAMED = RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "client"): "site"})


def row(*runs: RunRecord, name: str = "a", target: float | None = None) -> Row:
    return row_of(name, dict(enumerate(runs)), target)


def test_the_mean_and_the_sample_deviation() -> None:
    found = row(record([0.5, 0.6]), record([0.5, 0.8]))
    assert found.accuracy is not None
    assert found.accuracy.mean == pytest.approx(0.7)
    assert found.accuracy.deviation == pytest.approx(math.sqrt(0.02))
    assert "70.0 ± 14.1 %" in cells(found, [found])


def test_what_a_task_asks_for_first_stands_beside_accuracy() -> None:
    """The task's main metrics are in the table and in the numbers, also next to configurations of another task."""
    runs = [
        dataclasses.replace(
            record([None], metrics={"rmse": rmse, "pearson": 0.5}),
            config=RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "task"): "regression"}),
        )
        for rmse in (1.0, 2.0)
    ]
    rows = [row(*runs), row(record([0.5], macro_f1=0.25), name="b")]
    assert measured(rows) == ["rmse", "pearson", "macro_f1"]
    assert heads(rows)[2:7] == ["accuracy", "commonest label", "RMSE", "Pearson's r", "macro-F1"]
    assert cells(rows[0], rows)[2:7] == ["-", "-", "1.500 ± 0.707", "0.500 ± 0.000", "-"]
    assert cells(rows[1], rows)[2:7] == ["50.0 %", "-", "-", "-", "0.250"]
    first, second = csv.DictReader(io.StringIO(as_csv(rows)))
    assert (first["rmse_mean"], first["accuracy_mean"], second["rmse_mean"]) == ("1.5", "", "")
    assert float(second["macro_f1_mean"]) == 0.25


def test_accuracy_stands_beside_the_share_of_the_commonest_label() -> None:
    """A row that is no better has a note. If one of its runs lacks the share, as older runs do, a row shows none."""
    common = {"share": 0.5, "of": 400}
    good, bad = (row(record([value], commonest=common), record([value], commonest=common)) for value in (0.8, 0.52))
    assert heads([good, bad])[2:4] == ["accuracy", "commonest label"]
    assert cells(good, [good, bad])[2:4] == ["80.0 ± 0.0 %", "50.0 %"]
    assert not any("no better" in note for note in notes([good]))
    assert [note for note in notes([good, bad]) if "The accuracy of 52.0% is no better" in note]
    assert cells(old := row(record([0.5]), record([0.5], commonest=common)), [old])[3] == "-"
    assert (numbers(good)["commonest"], numbers(old)["commonest"]) == (0.5, None)


def test_entities_come_before_words() -> None:
    config = RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "task"): "tokens"})
    tags = row(record([0.9], config, metrics={"f1": 0.25}))
    words = row(record([0.9]))
    assert heads([tags])[2:5] == ["F1", "accuracy", "commonest label"]
    assert cells(tags, [tags])[2:4] == ["0.250", "90.0 %"]
    assert heads([tags, words])[2:4] == ["accuracy", "commonest label"]
    assert cells(tags, [tags, words])[2] == "90.0 %"


def test_the_target_and_the_curve_of_entities_are_of_f1() -> None:
    config = RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "task"): "tokens"})
    run = record([0.95, 0.97, 0.96], config, metrics={"f1": 0.5})
    scores = (0.0, 0.1, 0.5)
    run = dataclasses.replace(run, rounds=tuple({**one, "f1": f1} for one, f1 in zip(run.rounds, scores, strict=True)))
    found = row(run, target=0.45)
    assert (found.reached, found.rounds_to_target) == (1, 3)
    assert tuple(point.score.mean for point in found.curve) == scores
    assert "Rounds to the target F1: the mean over the runs that reached it, by evaluated rounds." in notes([found])
    assert ">F1<" in drawn([found])


def test_rounds_to_a_target_are_of_those_that_reached_it() -> None:
    runs = [record([0.2, 0.5, 0.4]), record([None, 0.6, 0.6]), record([0.1, 0.1, 0.1]), record([0.5, 0.5, 0.5])]
    found = row(*runs, target=0.5)
    assert (found.reached, found.rounds_to_target) == (3, pytest.approx(5 / 3))
    assert "1.66667 (3 of 4 reached it)" in cells(found, [found])


def test_what_one_seed_did_not_measure_has_no_mean() -> None:
    found = row(record([0.5]), record([0.7], accuracy=None))
    assert found.accuracy is None
    assert cells(found, [found])[2] == "-"
    assert numbers(found)["accuracy_mean"] is None


def test_the_auc_of_an_attack_is_told() -> None:
    runs = [record([0.5], membership={"auc": auc, "auc_interval": [0.5, 0.8]}) for auc in (0.6, 0.7)]
    found = row(*runs)
    assert found.membership_auc is not None
    assert found.membership_auc.mean == pytest.approx(0.65)
    assert cells(found, [found])[-1] == "0.650 ± 0.071"
    assert row(runs[0], record([0.5])).membership_auc is None


def test_a_run_that_ended_early_is_told_of_and_cuts_the_curve() -> None:
    found = row(record([0.1, 0.2, 0.3]), record([0.2, 0.4], ended_early="the budget was spent"))
    assert [point.round for point in found.curve] == [1, 2]
    assert [point.bytes for point in found.curve] == [400, 800]
    assert found.rounds == 2.5
    assert found.bytes_up_round == 300
    assert "a: 1 of 2 runs ended early." in notes([found])


def test_epsilon_of_one_run_is_the_largest_and_of_all_seeds_the_sum() -> None:
    found = row(record([0.5], NAMED, epsilon=2.991), record([0.5], NAMED, epsilon=2.9))
    assert (found.epsilon_one_run, found.delta_one_run) == (2.991, 1e-5)
    assert (found.epsilon_all_seeds, found.delta_all_seeds) == (pytest.approx(5.891), 2e-5)
    assert cells(found, [found])[-3:-1] == ["3 (delta 1e-05)", "5.9 (delta 2e-05)"]
    assert row(record([0.5], NAMED, epsilon=2.9), record([0.5])).epsilon_all_seeds is None
    assert any("private runs together: epsilon" in note for note in notes([found]))
    assert not any("epsilon" in note for note in notes([row(record([0.5]))]))


def test_rows_of_other_targets_share_a_column() -> None:
    rows = [row(record([0.5]), target=0.5), dataclasses.replace(row(record([0.5])), target=0.6)]
    assert "rounds to target" in heads(rows)
    assert "rounds to 50.0 %" in heads(rows[:1])
    assert len(heads(rows)) == len(cells(rows[0], rows))


def test_numbers_are_json_and_the_same_in_csv() -> None:
    found = row(record([0.5], NAMED, epsilon=1.5), record([0.7], NAMED, epsilon=1.4), target=0.6)
    flat = json.loads(json.dumps(numbers(found), allow_nan=False))
    assert flat["accuracy_mean"] == pytest.approx(0.6)
    assert flat["seeds"] == [0, 1]
    header, line = as_csv([found]).splitlines()
    assert dict(zip(header.split(","), line.split(","), strict=True))["epsilon_all_seeds"] == "2.9"


def test_names_cannot_break_the_tables() -> None:
    name = 'a, "b" | <i>$x$</i>\\'
    found = row(record([0.5]), name=name)
    (line,) = [line for line in markdown([found]).splitlines() if line.startswith("| a")]
    unescaped = line.replace("\\\\", "").replace("\\|", "")
    assert unescaped.count("|") == len(cells(found, [found])) + 1
    assert as_csv([found]).splitlines()[1].startswith('"a, ""b"" |')


@pytest.mark.nightly
def test_a_drawing_of_nothing_measured_and_of_many() -> None:
    assert "<svg" in drawn([row(record([None, None], accuracy=None))])
    many = [row(record([0.1 * place / 3, 0.5]), record([0.2, 0.6]), name=f"_run {place}") for place in range(25)]
    drawing = drawn(many)
    assert all(f"_run {place}<" in drawing for place in range(25)), "a name that begins with _ is a name"
    assert drawing == drawn(many)


def test_accuracies_of_different_test_rows_are_named() -> None:
    by_row, by_client, given = (
        record([0.5], test={"from": origin}) for origin in ("held out by row", "held out by client", "test files")
    )
    said = "not all of the same test rows"
    for rows in ([row(by_row, by_row)], [row(by_row), row(by_client)], [row(by_row), row(given)]):
        assert any(said in note for note in notes(rows))
    for rows in ([row(given, given)], [row(by_row), row(by_row)]):
        assert not any(said in note for note in notes(rows))


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
