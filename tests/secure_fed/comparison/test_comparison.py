"""`compare`: its rows compared with the files in the run directories, its refusals, and its state after a kill."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from privacy.composition import ORDERS
from privacy.composition import epsilon as epsilon_of
from privacy.errors import BudgetExhausted
from privacy.ledger import Ledger
from secure_fed.commands.comparison import compare
from secure_fed.commands.comparison.runs import Job
from secure_fed.commands.comparison.tables import as_csv, markdown
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.federation import Federation
from tests.cells import chosen
from tests.golden import refused

SEEDS = (0, 4)


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips reports and drawings, which take longer than these runs."""
    monkeypatch.setattr("secure_fed.report.page.write_report", lambda run_dir: run_dir / "report.html")
    monkeypatch.setattr("secure_fed.commands.comparison.tables.drawn", lambda rows: "<svg></svg>")


@pytest.fixture(scope="module")
def base(small_model: Path, small_data: Path) -> RunConfig:
    settings = {
        ("model", "name"): str(small_model),
        ("data", "train"): str(small_data / "train.jsonl"),
        ("data", "test"): str(small_data / "test.jsonl"),
        ("federation", "clients"): 4,
        ("federation", "cohort"): 2,
        ("federation", "rounds"): 3,
        ("training", "lr"): 0.02,
        ("training", "steps"): 2,
        ("training", "together"): 1,
    }
    return RunConfig().replace(settings)


def configs_of(base: RunConfig) -> dict[str, RunConfig]:
    """The private configuration's clients are named in the data, so they are the same with every seed."""
    private = {
        ("privacy", "unit"): "client",
        ("privacy", "noise_multiplier"): 1.0,
        ("privacy", "delta"): 1e-3,
        ("data", "client"): "site",
        ("federation", "clients"): None,
    }
    return {
        "plain": base.override(["method.name=fedlora", "evaluation.every=2"]),
        "private $x_1$ |b|": base.override(["method.name=ffa_lora"]).replace(private),
    }


@pytest.fixture(scope="module")
def compared(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A finished comparison, with short report pages because real ones take longer than these runs."""
    out = tmp_path_factory.mktemp("compared") / "all"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secure_fed.report.page.write_report", _short_page)
        return out, compare(configs_of(base), SEEDS, out, target=0.5)


def _short_page(run_dir: Path) -> Path:
    (run_dir / "report.html").write_text("<html></html>", encoding="utf-8")
    return run_dir / "report.html"


def held(out: Path, name: str) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Each seed's result and rounds, read from the files. A private run's result includes its withheld figures."""
    folders = [out / name / f"seed-{seed}" for seed in SEEDS]
    shown = [json.loads((folder / "result.json").read_text()) for folder in folders]
    withheld = [folder / "private" / "figures.json" for folder in folders]
    results = [
        one | (json.loads(file.read_text()) if file.exists() else {}) for one, file in zip(shown, withheld, strict=True)
    ]
    return results, [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]


@pytest.mark.nightly
def test_runs_are_ordinary_and_of_their_seeds(base: RunConfig, compared: tuple[Path, list[Any]]) -> None:
    out, rows = compared
    assert [row.name for row in rows] == list(configs_of(base))
    for name, config in configs_of(base).items():
        for seed in SEEDS:
            folder = out / name / f"seed-{seed}"
            written = RunConfig.from_dict(json.loads((folder / "config.json").read_text()))
            assert written == Federation(config.replace({("federation", "seed"): seed})).config
            assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    alone = Federation(configs_of(base)["plain"].override(["federation.seed=4"])).run()
    assert alone.summary["accuracy"] == held(out, "plain")[0][1]["accuracy"]
    assert alone.summary["loss"] == held(out, "plain")[0][1]["loss"]


def test_a_row_is_what_the_run_directories_say(base: RunConfig, compared: tuple[Path, list[Any]]) -> None:
    out, rows = compared
    for row in rows:
        results, rounds = held(out, row.name)
        accuracies = [result["accuracy"] for result in results]
        assert row.accuracy.mean == pytest.approx(sum(accuracies) / 2)
        assert row.accuracy.deviation == pytest.approx(statistics.stdev(accuracies))
        assert row.seeds == SEEDS
        assert row.rounds == 3
        assert row.bytes_up == pytest.approx(sum(result["bytes_up"] for result in results) / 2)
        assert row.bytes_down_round == pytest.approx(sum(result["bytes_down"] for result in results) / 6)
        assert row.seconds == pytest.approx(sum(result["seconds"] for result in results) / 2)
        reached = []
        for records in rounds:
            good = [record["round"] for record in records if record.get("accuracy", 0) >= 0.5]
            reached += good[:1]
        assert (row.target, row.reached) == (0.5, len(reached))
        assert row.rounds_to_target == (pytest.approx(statistics.mean(reached)) if reached else None)
        figures = [result["membership"]["auc"] for result in results]
        if None in figures:
            assert row.membership_auc is None
            assert row.no_membership == results[0]["membership"]["why"] != ""
        else:
            assert row.membership_auc.mean == pytest.approx(sum(figures) / 2)
        assert row.early == 0
    assert [row.membership_auc is None for row in rows] == [True, False], "a private run has dummies"
    assert rows[0].epsilon_one_run is None
    epsilons = [result["epsilon"] for result in held(out, rows[1].name)[0]]
    assert (rows[1].epsilon_one_run, rows[1].delta_one_run) == (max(epsilons), 1e-3)
    plan = Federation(configs_of(base)[rows[1].name]).assembly.protection.plan
    by_renyi = epsilon_of({order: 2 * plan.cost(orders=[order]).rdp[0] for order in ORDERS}, 2e-3)
    assert by_renyi < sum(epsilons)
    assert (rows[1].epsilon_all_seeds, rows[1].delta_all_seeds) == (pytest.approx(by_renyi), 2e-3)


def test_a_curve_holds_the_measured_rounds_and_the_bytes_until_them(compared: tuple[Path, list[Any]]) -> None:
    out, (plain, private) = compared
    assert [point.round for point in plain.curve] == [2, 3]
    assert [point.round for point in private.curve] == [1, 2, 3]
    _, rounds = held(out, "plain")
    second = [sum(record["bytes_up"] + record["bytes_down"] for record in records[:2]) for records in rounds]
    assert plain.curve[0].bytes == pytest.approx(sum(second) / 2)
    assert plain.curve[0].score.mean == pytest.approx(sum(records[1]["accuracy"] for records in rounds) / 2)
    assert plain.curve[-1].bytes == pytest.approx(plain.bytes_up + plain.bytes_down)
    assert plain.curve[-1].score == plain.accuracy


def test_tables_and_drawing_are_those_of_the_rows_and_have_the_names_as_they_are(
    compared: tuple[Path, list[Any]],
) -> None:
    out, rows = compared
    assert (out / "compare.csv").read_text(encoding="utf-8") == as_csv(rows)
    assert (out / "compare.md").read_text(encoding="utf-8") == markdown(rows)
    drawing = (out / "compare.svg").read_text(encoding="utf-8")
    texts = {element.text for element in ElementTree.fromstring(drawing).iter() if element.text}
    assert {"round", "accuracy", *(row.name for row in rows)} <= texts
    assert drawing.count('id="FillBetweenPolyCollection') + drawing.count('id="PolyCollection') == 4


@pytest.mark.usefixtures("never_drawn")
def test_what_is_finished_is_read_and_not_made_again(
    base: RunConfig, compared: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rows = compared
    drawing = (out / "compare.svg").read_text(encoding="utf-8")
    monkeypatch.setattr("secure_fed.commands.comparison.tables.drawn", lambda rows: drawing)
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file() and file.parent != out}
    (out / "compare.md").unlink()
    (out / "plain" / "seed-0" / "report.html").unlink()

    def never(job: Job) -> Any:
        raise AssertionError(job)

    assert compare(configs_of(base), SEEDS, out, 0.5, never) == rows
    assert (out / "compare.md").exists()
    after = {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file() and file.parent != out}
    assert [file.name for file in before if before[file] != after[file]] == ["report.html"]
    assert "<svg" in (out / "plain" / "seed-0" / "report.html").read_text(encoding="utf-8"), "a real page"
    fewer = compare(configs_of(base), (4,), out, None, never)
    assert fewer[0].accuracy.deviation is None
    assert fewer[0].target is None
    compare(configs_of(base), SEEDS, out, 0.5, never)


class StoppedError(Exception):
    pass


def two(base: RunConfig) -> dict[str, RunConfig]:
    """Two configurations of two rounds each."""
    return {name: base.override([f"method.name={name}", "federation.rounds=2"]) for name in ("fedlora", "fra_lora")}


@pytest.fixture(scope="module")
def whole(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secure_fed.report.page.write_report", lambda run_dir: run_dir / "report.html")
        return compare(two(base), [1], tmp_path_factory.mktemp("whole") / "out")


@pytest.mark.parametrize("rounds", chosen([1, 2, 3], [2]))
@pytest.mark.usefixtures("no_pages")
def test_killed_at_any_round_it_goes_on_to_the_same_numbers(
    base: RunConfig, rounds: int, whole: list[Any], tmp_path: Path
) -> None:
    """The kill comes in the first run, at its end, or in the second run."""
    configs = two(base)
    seen: list[tuple[str, int]] = []

    @contextmanager
    def watched(job: Job) -> Iterator[Any]:
        class Counting:
            def on_round_end(self, record: Any, state: Any) -> None:
                seen.append((job.name, record["round"]))
                if len(seen) == rounds:
                    raise StoppedError

        yield Counting()

    with pytest.raises(StoppedError):
        compare(configs, [1], tmp_path / "killed", progress=watched)
    assert not (tmp_path / "killed" / "compare.md").exists()
    found = compare(configs, [1], tmp_path / "killed", progress=watched)
    assert len(seen) == len(set(seen)) == 4, "no round is made twice"
    for one, other in zip(found, whole, strict=True):
        assert (one.accuracy, one.bytes_up, one.curve) == (other.accuracy, other.bytes_up, other.curve)


@pytest.mark.usefixtures("no_pages")
def test_another_configuration_may_join(base: RunConfig, tmp_path: Path) -> None:
    """Settings that changed since are refused by name, before anything is begun, and so is a comparison of fewer."""
    first, second = base.override(["federation.rounds=1"]), base.override(["federation.rounds=1", "method.rank=2"])
    compare({"a": first}, [0], tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with refused(RunDirectoryError):
        compare({"b": second, "a": first.override(["training.lr=0.5", "federation.rounds=2"])}, [0], tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before, "the new one was not begun either"
    assert [row.name for row in compare({"a": first, "b": second}, [0], tmp_path / "out")] == ["a", "b"]
    with refused(RunDirectoryError):
        compare({"a": first}, [0], tmp_path / "out")


@pytest.mark.usefixtures("no_pages")
def test_a_target_of_the_configuration_is_waited_for(base: RunConfig, tmp_path: Path) -> None:
    config = base.override(["federation.rounds=1", "evaluation.target_accuracy=0.01"])
    (row,) = compare({"a": config}, [0, 1], tmp_path / "out")
    assert (row.target, row.reached, row.rounds_to_target) == (0.01, 2, 1.0)
    (row,) = compare({"a": config}, [0, 1], tmp_path / "out", target=1.0)
    assert (row.target, row.reached, row.rounds_to_target) == (1.0, 0, None)


# Refusals: nothing is run, and nothing written.


def test_what_cannot_be_compared_is_refused(base: RunConfig, tmp_path: Path) -> None:
    cases: list[tuple[list[str], list[int], float | None]] = [
        ([], [0], None),
        (["a"], [], None),
        (["a", "A"], [0], None),
        *(([name], [0], None) for name in ("a/b", "..", "", "compare.md")),
        (["a"], [0, 1, 0], None),
        (["a"], [-1], None),
        *((["a"], [0], target) for target in (0.0, 1.5, math.nan)),
    ]
    for names, seeds, target in cases:
        with refused(ConfigError):
            compare(dict.fromkeys(names, base), seeds, tmp_path / "out", target)
    bad = base.override(["method.name=fedlora", "method.bottleneck=8"])
    with refused(ConfigError, "method.bottleneck"):
        compare({"good": base, "bad": bad}, [0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["file", "foreign", "inside"])
def test_a_place_that_holds_something_else_is_left_alone(base: RunConfig, what: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    foreign = {"file": out, "foreign": out / "thesis.txt", "inside": out / "a" / "seed-0" / "thesis.txt"}[what]
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text("years of work")
    with refused(RunDirectoryError):
        compare({"a": base}, [0], out)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [foreign]


@pytest.mark.usefixtures("no_pages")
def test_a_spent_budget_ends_the_comparison_and_leaves_what_finished(base: RunConfig, tmp_path: Path) -> None:
    """All runs share one ledger, whose budget does not suffice for the second seed."""
    budget = {
        ("privacy", "unit"): "client",
        ("privacy", "epsilon"): 4.0,
        ("privacy", "delta"): 1e-3,
        ("privacy", "ledger"): str(tmp_path / "ledger.sqlite"),
        ("privacy", "data_set"): "wards",
        ("data", "client"): "site",
        ("federation", "clients"): None,
    }
    Ledger.create(tmp_path / "ledger.sqlite", data_set="wards", epsilon=5.0, delta=1e-2)
    config = base.replace(budget)
    with pytest.raises(BudgetExhausted):
        compare({"a": config}, [0, 1], tmp_path / "out")
    assert (tmp_path / "out" / "a" / "seed-0" / "result.json").exists()
    assert not (tmp_path / "out" / "a" / "seed-1").exists()
    assert not (tmp_path / "out" / "compare.md").exists()
    assert compare({"a": config}, [0], tmp_path / "out")[0].epsilon_one_run == pytest.approx(4.0, rel=0.02)
