"""What a run measured, in words and numbers: in the report, on a terminal of 80 columns, and in a notebook."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

import secure_fed
from secure_fed.config import RunConfig
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.learning.tasks import TASKS
from secure_fed.report import formatting
from secure_fed.report.measured import how_good, key_numbers
from secure_fed.report.page import write_report
from secure_fed.report.record import RunRecord
from secure_fed.report.result import Result
from secure_fed.report.terminal import show_methods, show_result
from tests.golden import golden
from tests.secure_fed import private_toys, toys
from tests.secure_fed.conftest import make_private
from tests.secure_fed.masked_edit import CASES, masked
from tests.secure_fed.pages import Edit, RunFolder, changed, compared, reports

pytestmark = pytest.mark.usefixtures("never_drawn")


def record(task: str, row: dict[str, Any], **result: Any) -> RunRecord:
    config = RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "task"): task})
    facts = {"label_names": ["a", "b", "c"], "clients": []}
    return RunRecord("run", config, facts, ({"round": 1, **row},), {**row, **result} if result else None)


OWN: dict[str, dict[str, float]] = {
    **{"classification": {"macro_f1": 0.5}, "multi_label": {"micro_f1": 0.4}, "tokens": {"f1": 0.3}},
    **{"regression": {"rmse": 1.5, "pearson": 0.7}, "question_answering": {"f1": 0.3}},
    **{"causal_lm": {"perplexity": 33.0}, "chat": {"perplexity": 33.0}, "multiple_choice": {}},
}


def test_every_task_is_told_of_in_its_own_words() -> None:
    """The metrics in a sentence and as key numbers; accuracy beside the commonest label, and what was not measured."""
    found = {
        task: record(task, {**OWN[task], "loss": 1.0} | ({} if task == "regression" else {"accuracy": 0.25}))
        for task in TASKS
    }
    common = {"commonest": {"share": 0.5, "of": 400}}
    found |= {
        "no learning": record("classification", {"accuracy": 0.52}, **common, no_learning="It learned nothing."),
        "better than the commonest label": record("classification", {"accuracy": 0.8}, **common),
        "tags beside the commonest": record("tokens", {"f1": 0.3, "accuracy": 0.9}, **common),
        "tokens, nothing measured": record("tokens", {}),
        "classification, loss alone": record("classification", {"loss": 0.5}),
    }
    lines = [f"{name}: {how_good(one)} {dict(key_numbers(one))}" for name, one in found.items()]
    golden("secure_fed/report_tasks.txt", "\n".join(lines) + "\n")


def measured(**changes: Any) -> Edit:
    """An edit that gives a run a membership result."""
    rate = {"tpr": 0.034, "tpr_interval": [0.023, 0.048], "fpr": 0.01, "fpr_interval": [0.0046, 0.0189]}
    found = {
        **{"attack": "loss", "unit": "example", "auc": 0.5312, "auc_interval": [0.5047, 0.5577], "why": ""},
        **{"members": 900, "non_members": 903, "tpr_at_fpr": {"0.01": rate, "0.001": None}},
    }
    return lambda run: run["result"].update(membership={**found, **changes})


def of_dummies(mu: float) -> Edit:
    """An edit that makes a run private with this mu, and gives it a figure of dummy clients."""
    figure = measured(of="dummies", attack="dummies", unit="client", auc=0.803, auc_interval=[0.762, 0.838])
    return changed({"result.privacy.gaussian_mu": mu}, make_private, figure)


NONE = measured(auc=None, auc_interval=None, tpr_at_fpr=None, why="the pool is <empty>")
INTERVALS = ([0.49, 0.55], [0.46, 0.52], [0.42, 0.56], [0.41, 0.47])


def test_membership_stands_beside_accuracy_and_has_a_section(run_folder: RunFolder) -> None:
    """Nothing found is never called privacy, the unit is named, and no figure has its reason."""
    cases: dict[str, dict[str, Any]] = {
        "no membership": {},
        "membership": {"edit": measured()},
        **{f"in {low} to {high}": {"edit": _within(low, high)} for low, high in INTERVALS},
        **{unit: {"edit": measured(unit=unit)} for unit in ("client", "person")},
        "no figure": {"edit": NONE},
    }
    text = reports(run_folder, cases).split("# membership\n")[1]
    golden("secure_fed/report_membership.txt", text)
    assert "<empty>" not in write_report(run_folder(edit=NONE)).read_text(encoding="utf-8")


def _within(low: float, high: float) -> Edit:
    return measured(auc=(low + high) / 2, auc_interval=[low, high])


def audited(folder: Path, told: str) -> None:
    """Writes an audit into a run's folder; `told` becomes its audit.json."""
    (folder / "private").mkdir(exist_ok=True)
    (folder / "private" / "audit.html").write_text("an audit", encoding="utf-8")
    (folder / "private" / "audit.json").write_text(told, encoding="utf-8")


def links(folder: Path) -> int:
    """How often the report links to the audit."""
    return write_report(folder).read_text(encoding="utf-8").count('<a href="private/audit.html">')


@pytest.mark.parametrize("edit", [measured(), lambda run: None])
def test_the_audit_is_linked_where_there_is_one_of_this_state(run_folder: RunFolder, edit: Edit) -> None:
    """A run that is resumed after its audit has an audit of another state."""
    folder = run_folder(5, edit=edit)
    assert links(folder) == 0
    others = ('{"rounds": 4}', '{"rounds": 6}', '{"rounds": 5.0}', '{"rounds": "5"}', '{"rounds": null}')
    for other in (*others, "{}", "[5]", '{"rou', ""):
        audited(folder, other)
        assert links(folder) == 0, other
    audited(folder, '{"rounds": 5}')
    assert links(folder) == 1
    (folder / "private" / "audit.html").unlink()
    assert links(folder) == 0
    audited(folder, "")
    (folder / "private" / "audit.json").unlink()
    (folder / "private" / "audit.json").mkdir()
    assert links(folder) == 0, "one that cannot be read does not keep the report from being written"


RESULTS: dict[str, Any] = {
    "no protection": changed({}),
    "membership": measured(),
    "membership without a figure": NONE,
    "private": make_private,
    "NOT PRIVATE: injected noise": lambda run: make_private(run, private=False),
    "private, one epsilon for all but the server": changed(
        {"result.privacy.holds_against": ["reader", "participant"]}, make_private
    ),
    "private, one epsilon for all": changed(
        {"result.privacy.holds_against": ["reader", "participant", "server"]}, make_private
    ),
    "private, from a ledger, with dummy clients": changed({"result.privacy.ledger": "/notes.sqlite"}, of_dummies(1.5)),
    "private, ended early": changed({"result.ended_early": "the budget is spent"}, make_private),
    "masks from which nobody may vanish": masked("nothing", least=4),
    **{f"masks, {case.replace('coins', 'secret coins')}": masked(case) for case in CASES},
    "masks, a server that may lie": masked("nothing", active=True),
}


def test_every_result_in_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run_folder: RunFolder
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for name, edit in RESULTS.items():
        folder = run_folder(edit=edit)
        show_result(json.loads((folder / "result.json").read_text(encoding="utf-8")))
        shutil.rmtree(folder)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        shown[name] = [" ".join(line.split()) for line in lines if set(line) & set("│")]
    injected = "\n".join(shown["NOT PRIVATE: injected noise"])
    assert injected.index("NOT PRIVATE") < injected.index("epsilon")
    assert not any("expected" in line or "epsilon" in line for line in shown["no protection"])
    golden("secure_fed/terminal.txt", compared(shown))


def test_methods_say_whom_they_can_protect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    row = {
        **{"travels": "B", "mean_exact": True, "lr": 0.005, "head_factor": 3.0},
        **{"trainable": 1, "bytes_up": 1, "paper": "p"},
    }
    rows = [{"name": "one", "units": ["none", "client", "person"], **row}, {"name": "two", "units": ["none"], **row}]
    show_methods("builtin/tiny", 8, rows)
    golden("secure_fed/terminal_methods.txt", capsys.readouterr().out)


SAID: dict[Callable[[Any], str], dict[float | None, str]] = {
    formatting.number: {None: "–", math.nan: "not finite", 0.8714: "0.871", 12_345: "12,345"},
    formatting.at_most: {7.961: "7.97", 7.97: "7.97", 8.0: "8", 0.1: "0.1", 15_737.7: "15,800", math.inf: "not finite"},
    formatting.percent: {0.8714: "87.1 %", None: "–"},
    formatting.rate: {0.0003: "0.0003", math.inf: "not finite"},
    formatting.size: {0: "0 bytes", 999: "999 bytes", 1000: "1.00 kB", 999_999: "1.00 MB", 9_996: "10.0 kB", None: "–"}
    | {14_814_804: "14.8 MB", 123_456_789: "123 MB", 5e18: "5,000 PB"},
    formatting.duration: {
        0.04: "0.0 s",
        9.96: "10 s",
        59.7: "1 min 0 s",
        135: "2 min 15 s",
        108_060: "30 h 1 min",
        None: "–",
    },
}


def test_numbers_read_well() -> None:
    for say, said in SAID.items():
        assert {value: say(value) for value in said} == said


def test_a_count_has_its_noun_and_a_list_its_and() -> None:
    assert formatting.counted(1, "class", "classes") == "1 class"
    assert formatting.counted(1200, "client") == "1,200 clients"
    listed = [formatting.listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])]
    assert listed == ["", "a", "a and b", "a, b and c"]


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)).strip()


def curves(figure: Figure) -> dict[str, dict[str, list[float]]]:
    """For each panel, the values of its lines by their labels."""
    return {
        axes.get_ylabel(): {str(line.get_label()): list(line.get_ydata()) for line in axes.get_lines()}  # type: ignore[arg-type]
        for axes in figure.axes
    }


@pytest.fixture(scope="module")
def result() -> Result:
    return toys.federation({"federation.rounds": 3}).run()


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Result:
    settings = {**private_toys.NOISE, "federation.rounds": 3}
    return private_toys.federation(settings).run(tmp_path_factory.mktemp("private") / "run")


def test_a_result_in_a_notebook_is_a_small_table_with_escaped_names(result: Result) -> None:
    assert isinstance(result, secure_fed.Result)
    html = result._repr_html_()
    said = words(html)
    assert f"accuracy {100 * result.summary['accuracy']:.1f} %" in said
    assert "rounds 3, each with 3 of 3 clients" in said
    assert "No differential privacy" in said
    assert len(html) < 10_000
    assert not re.findall(r"<script|<link|<img|<iframe|https?:|\bon\w+=", html)
    hostile = replace(result, summary={**result.summary, "data": "<script>alert('x')</script>"})
    assert "<script" not in hostile._repr_html_()
    assert "&lt;script&gt;" in hostile._repr_html_()


def test_the_membership_figure_is_explained_in_it(result: Result) -> None:
    found = {"of": "data", "unit": "example", "auc": 0.47, "auc_interval": [0.38, 0.56], "members": 60}
    found |= {"non_members": 58}
    said = words(replace(result, summary={**result.summary, "membership": found})._repr_html_())
    assert "names the one that trained in 47 of 100 pairs; a guess at random does in 50" in said
    assert "60 and 58 are too few to show whether there is a leak. A value below 50 is chance; it does not" in said


def test_a_private_result_in_a_notebook_shows_its_public_part(private: Result) -> None:
    """Accuracy on rows held out of private ones is withheld."""
    said = words(private._repr_html_())
    assert "epsilon" in said
    assert private.withheld["seconds"] > 0
    assert not re.search(r"\btime\b", said)
    assert repr(private) == "<Result of fedlora: Toy on given in Python, 3 rounds>"
    own = replace(private, summary={**private.summary, "test": {"from": HELD_OUT["example"], "rows": 9}})
    said = words(own._repr_html_())
    assert "accuracy is withheld here" in said
    assert f"{private.summary['accuracy']:.1%}" not in said


def test_the_figure_has_accuracy_and_loss_by_round(result: Result) -> None:
    drawn = curves(result.plot())
    assert set(drawn) == {"accuracy", "loss"}
    assert drawn["accuracy"]["accuracy"] == [record["accuracy"] for record in result.records]
    assert drawn["loss"]["train loss"] == [record["train_loss"] for record in result.records]
    picture = result.plot()._repr_png_()  # type: ignore[attr-defined]
    assert picture.startswith(b"\x89PNG")
    assert 3_000 < len(picture) < 60_000


def test_the_figure_of_a_private_result_has_epsilon_and_nothing_that_is_withheld(private: Result) -> None:
    known = replace(private, records=[{**record, "train_loss": 1.0} for record in private.records])
    drawn = curves(known.plot())
    assert set(drawn) == {"accuracy", "test loss", "epsilon"}
    (spent,) = drawn["epsilon"].values()
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(private.summary["epsilon"])
    assert len(set(spent)) == 3
    killed = replace(private, summary={**private.summary, "releases": private.summary["releases"] + 2})
    (more,) = curves(killed.plot())["epsilon"].values()
    assert private.plan is not None
    assert more[-1] == private.plan.epsilon(private.summary["releases"] + 2) > spent[-1], "of interrupted rounds, too"


def test_how_many_are_held_out_is_said_of_runs_without_privacy_alone() -> None:
    half = {"evaluation.audit_fraction": 0.5}
    counted = " ".join(toys.federation(half, sizes=(30, 30, 30)).notes)
    assert re.search(r"\d+ of 90 examples, chosen at random, are not trained on", counted)
    settings = {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0, **half}
    uncounted = " ".join(private_toys.federation(settings, sizes=(30, 30, 30)).notes)
    assert "some examples, chosen at random, are not trained on" in uncounted


def test_a_callback_is_given_a_result_that_shows_itself(tmp_path: Path) -> None:
    given: list[object] = []
    toys.federation({"federation.rounds": 1}, callbacks=[SimpleNamespace(on_end=given.append)]).run()
    assert [type(one) for one in given] == [Result]
