"""Rows, tables, drawings and total costs of run records made by hand, for cases that a short real run would not show."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import Any, cast

import pytest
from scipy.stats import ttest_rel

from privacy import accounting
from privacy.composition import ORDERS
from secure_fed.commands.comparison.rows import Charge, Row, charge_of, differences, row_of, totals
from secure_fed.commands.comparison.tables import (
    as_csv,
    cells,
    cost_ahead,
    cost_notes,
    drawn,
    heads,
    markdown,
    notes,
    numbers,
)
from secure_fed.config import RunConfig
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.report.record import RunRecord
from tests.cells import every
from tests.golden import golden


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


def of_task(task: str) -> RunConfig:
    return RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "task"): task})


def entities() -> RunRecord:
    """A run on entities, whose accuracy is high from the first round on."""
    run = record([0.95, 0.97, 0.96], of_task("tokens"), metrics={"f1": 0.5})
    rounds = zip(run.rounds, (0.0, 0.1, 0.5), strict=True)
    return dataclasses.replace(run, rounds=tuple({**one, "f1": f1} for one, f1 in rounds))


COMMON = {"share": 0.5, "of": 400}
WORDS = row(record([0.9]), name="words")
TABLES: dict[str, list[Row]] = {
    "accuracies": [
        row(record([0.5, 0.6], commonest=COMMON), record([0.5, 0.8], commonest=COMMON), name="spread"),
        row(record([0.52], commonest=COMMON), record([0.52], commonest=COMMON), name="no better"),
        row(record([0.5]), record([0.5], commonest=COMMON), name="an older run"),
        row(record([0.5]), record([0.7], accuracy=None), name="one unmeasured"),
        row(record([0.1, 0.2, 0.3]), record([0.2, 0.4], ended_early="the budget was spent"), name="early"),
        row(
            *(record([0.5], membership={"auc": auc, "auc_interval": [0.5, 0.8]}) for auc in (0.6, 0.7)), name="attacked"
        ),
        row(record([0.5], membership={"auc": 0.6, "auc_interval": [0.5, 0.8]}), record([0.5]), name="one attacked"),
    ],
    "numbers": [
        row(*(record([None], of_task("regression"), metrics={"rmse": rmse, "pearson": 0.5}) for rmse in (1.0, 2.0))),
        row(record([0.5], macro_f1=0.25), record([0.5], macro_f1=0.25), name="b"),
    ],
    "entities": [row(entities(), target=0.45)],
    "entities and words": [row(entities()), WORDS],
    "targets": [
        row(
            *(record([0.2, 0.5, 0.4]), record([None, 0.6, 0.6]), record([0.1, 0.1, 0.1]), record([0.5, 0.5, 0.5])),
            target=0.5,
        )
    ],
    "other targets": [row(record([0.5]), target=0.5), dataclasses.replace(WORDS, target=0.6)],
    "private": [
        row(record([0.5], NAMED, epsilon=2.991), record([0.5], NAMED, epsilon=2.9)),
        row(record([0.5], NAMED, epsilon=2.9), record([0.5]), name="one private"),
    ],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table(name: str) -> None:
    rows = TABLES[name]
    text = markdown(rows) + "\n" + as_csv(rows)
    golden(f"comparison/{name.replace(' ', '_')}.txt", text, hide=r"(?<=\.\d{8})\d+")
    assert len(heads(rows)) == len(cells(rows[0], rows))
    flat = json.loads(json.dumps([numbers(one) for one in rows], allow_nan=False))
    for line, told in zip(csv.DictReader(io.StringIO(as_csv(rows))), flat, strict=True):
        assert (line["accuracy_mean"] == "") == (told["accuracy_mean"] is None)


def test_a_curve_is_of_the_headline_metric_and_as_long_as_the_shortest_run() -> None:
    early = TABLES["accuracies"][4].curve
    assert [(point.round, point.bytes) for point in early] == [(1, 400), (2, 800)]
    found = TABLES["entities"][0]
    assert tuple(point.score.mean for point in found.curve) == (0.0, 0.1, 0.5)
    assert ">F1<" in drawn([found])


def test_differences_are_paired_over_seeds() -> None:
    """By scipy's paired test; a noise that both runs of a seed share does not widen the interval."""
    first, second = (0.2, 0.5, 0.8), (0.3, 0.62, 0.88)
    rows = [row(*(record([score]) for score in scores), name=str(scores)) for scores in (first, second)]
    rows.append(row(record([0.5]), record([None], accuracy=None), record([0.5]), name="unmeasured"))
    (found,) = differences(rows)
    assert (found.name, found.other, found.seeds) == (str(second), str(first), 3)
    interval = ttest_rel(second, first).confidence_interval()
    assert found.interval == pytest.approx((interval.low, interval.high))
    assert found.mean == pytest.approx(0.1)
    golden("comparison/differences.txt", "\n".join(note for note in notes(rows) if " less " in note) + "\n")
    assert [one.interval for one in differences([row(record([0.5])), row(record([0.7]), name="b")])] == [None]


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
    spent, rdp = settings.pop("spent", None), accounting.rdp(release, 1, ORDERS)
    spent = accounting.epsilon(release, 1, 1e-5) if spent is None else spent
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


@every(
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


SITES = FILES.replace({("data", "client"): "site"})
COSTS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "one run on public test rows": ([{}], ["plain"]),
    "runs about the same units": ([{}, {"name": "b"}], []),
    "no run": ([], ["plain"]),
    "drawn clients of two seeds": (
        [{"name": name, "seed": seed, "divided": "iid"} for name in ("a", "b", "c") for seed in (0, 1)],
        [],
    ),
    "notes of two seeds": ([{"seed": seed, "base": RunConfig(), "divided": "iid"} for seed in (0, 1)], []),
    "two divisions": (
        [
            {"base": RunConfig(), "divided": "dirichlet", "also": also}
            for also in cast(list[Any], [{}, {("data", "alpha"): 7.0}])
        ],
        [],
    ),
    "named and drawn clients": ([{"base": SITES}, {"base": SITES, "divided": "iid"}], []),
    "other units": ([{}, {"name": "b", "unit": "example"}], []),
    "other names of clients": ([{}, {"name": "b", "also": {("data", "client"): "ward"}}], []),
    "other neighbours": ([{}, {"name": "b", "adjacency": "replaced"}], []),
    "test rows held out": ([{}, {"tested": HELD_OUT["client"]}], []),
    "twenty seeds": ([{"seed": seed} for seed in range(20)], []),
}


def test_what_is_said_of_costs() -> None:
    """Runs of one seed are added up, and runs of several only where they have the same units."""
    said = {
        name: cost_notes([charged(spent=2.0, **one) for one in charges], plain)
        for name, (charges, plain) in COSTS.items()
    }
    golden("comparison/costs.txt", "\n".join(line for name, lines in said.items() for line in ["", name, *lines]))


def test_before_a_comparison_its_cost_is_said_from_the_settings() -> None:
    private = FILES.replace({("privacy", "unit"): "example", ("privacy", "epsilon"): 3.0})
    noisy = FILES.replace({("privacy", "unit"): "client", ("privacy", "noise_multiplier"): 1.0})
    assert cost_ahead({"plain": FILES}, 3) == []
    told = cost_ahead({"plain": FILES, "a": private, "b": private.replace({("privacy", "epsilon"): 1.0})}, 3)
    golden("comparison/costs_ahead.txt", "\n".join([*told, *cost_ahead({"a": private, "noisy": noisy}, 2)]))
