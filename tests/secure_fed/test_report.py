"""The report as a file: its words and sections, its escaping, and the damaged or unusual runs that it copes with."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from secure_fed.errors import RunDirectoryError
from secure_fed.report import markup
from secure_fed.report.markup import Bar, Series, Station
from secure_fed.report.page import write_report
from tests.golden import golden, refused
from tests.secure_fed.conftest import make_private
from tests.secure_fed.pages import GONE, Edit, Run, RunFolder, changed, reports, told

pytestmark = pytest.mark.usefixtures("never_drawn")

PLOTS = {name: getattr(markup, name) for name in ("lines", "bars", "scale", "tradeoff")}
HOSTILE = '<script>alert("&")</script>'
METRICS = ("accuracy", "macro_f1", "loss", "clients_accuracy")
MEASURED: dict[str, dict[str, float | None]] = {
    "variation": {
        **{"magnitude": 0.5, "direction": 0.25, "magnitude_a": 0.125},
        **{"direction_a": 0.0625, "magnitude_b": 0.75, "direction_b": 1.5},
    },
    "discrepancy": {"magnitude": 2.75, "direction": 0.875},
    "drift": {"mean": 0.9375, "worst": 0.625},
    "aggregation_error": {"fedavg": 0.375, "fra": 0.1875},
}


def measuring(*names: str, **evaluation: float) -> Edit:
    """An edit that gives a run these diagnostics."""

    def edit(run: Run) -> None:
        run["config"]["evaluation"] |= {"diagnostics": list(names), **evaluation}
        for row in run["rows"]:
            row.update({name: dict(MEASURED[name]) for name in names})
            if "bandwidth" in evaluation:
                row["transfer_seconds"] = 2.5

    return edit


LINE = {"megabytes_per_second": 0.5, "transfer_seconds": 7.5, "compute_seconds": 13.5, "seconds": 21.0}
CASES: dict[str, dict[str, Any]] = {
    "a run that is finished": {},
    "ends with a mean of models": {"edit": changed({"config.federation.average_last": 3})},
    "not finished": {"planned": 20, "finished": False},
    "more rounds are planned now": {"planned": 30},
    "before its first round": {"rounds": 0, "planned": 5, "finished": False},
    "one round": {"rounds": 1},
    "one round was not evaluated": {"edit": changed(dict.fromkeys([f"rows.1.{name}" for name in METRICS], GONE))},
    "nothing was measured": {
        "edit": changed(
            dict.fromkeys([f"rows.*.{name}" for name in (*METRICS, "train_loss")], GONE)
            | dict.fromkeys(["result.accuracy", "result.macro_f1", "result.loss"])
            | {"run.partition": GONE}
        )
    },
    "classes without names": {"edit": changed({"run.label_names": []})},
    "loss alone": {
        "edit": changed(dict.fromkeys(["rows.*.accuracy", "rows.*.macro_f1", "result.accuracy", "result.macro_f1"]))
    },
    "values that are not finite": {
        "edit": changed({"rows.1.loss": math.nan, "rows.2.loss": math.inf, "rows.*.train_loss": math.nan})
    },
    "updates were left out": {
        "edit": changed({"rows.0.rejected": ["ward B", "ward C", "ward D"], "rows.2.rejected": ["ward A"]})
    },
    "cohorts at random": {"edit": changed({"config.federation.sampling": "poisson"})},
    **{name: {"edit": measuring(name)} for name in MEASURED},
    "all diagnostics": {"edit": measuring(*MEASURED)},
    "variation where A is frozen": {
        "edit": changed(
            {"rows.*.variation.magnitude_a": GONE, "rows.*.variation.direction_a": GONE}, measuring("variation")
        )
    },
    "a direction that there was not": {
        "edit": changed({"rows.0.discrepancy.direction": None}, measuring("discrepancy"))
    },
    "a target that was reached": {"edit": measuring(target_accuracy=0.5)},
    "a target that was reached at once": {"edit": measuring(target_accuracy=0.3)},
    "a target that was missed": {"edit": measuring(target_accuracy=0.99)},
    "time over a line": {"edit": changed({"result.diagnostics.bandwidth": LINE}, measuring(bandwidth=0.5))},
    "time over a line, not finished": {"planned": 9, "finished": False, "edit": measuring(bandwidth=1.0)},
}


def test_the_words_of_every_section(run_folder: RunFolder) -> None:
    golden("secure_fed/report.txt", reports(run_folder, CASES))


class Outline(HTMLParser):
    """Tags, attributes and the text outside the style sheet; unclosed or crossing tags are an error."""

    VOID = frozenset({"meta"})

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.style = ""
        self.feed(write_report(folder).read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.style += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def test_no_file_of_a_run_talks_the_report_out_of_its_warning(run_folder: RunFolder) -> None:
    boast = changed(
        {
            **{"result.unit": "client", "result.epsilon": 0.1, "result.delta": 1e-9, "result.noise_multiplier": 3.0},
            **{"run.privacy": {"unit": "client"}, "run.secure_aggregation": {"enabled": True}},
        }
    )
    text = told(run_folder(edit=boast))
    assert "No differential privacy and no secure aggregation protect this run." in text
    assert "epsilon no guarantee" in text
    assert "privacy unit none" in text


# Drawings.


@pytest.fixture
def really_drawn(monkeypatch: pytest.MonkeyPatch, never_drawn: None) -> None:
    """Plots are drawn by matplotlib after all."""
    for name, draw in PLOTS.items():
        monkeypatch.setattr(markup, name, draw)


def test_plots_are_the_same_whatever_a_users_settings(really_drawn: None) -> None:
    import matplotlib

    def plots() -> list[str]:
        found = markup.lines("loss", [Series("loss", ((1, 2.5), (2, 1.5)))], y_label="loss")
        return [found, markup.scale("skew", 0.2, low="low", high="high")]

    before = plots()
    with matplotlib.rc_context({"axes.grid": True, "font.size": 30, "svg.fonttype": "path"}):
        assert plots() == before
        assert matplotlib.rcParams["font.size"] == 30


def test_drawings_of_few_values_and_of_many(really_drawn: None) -> None:
    points = ((1, 2.5), *((number, math.nan) for number in range(2, 60)))
    assert "<use" in markup.lines("loss", [Series("loss", points)], y_label="loss"), "one finite value is visible"
    drawing = markup.bars("sizes", range(1000), x_label="client", y_label="examples")
    assert drawing.count("<path") < 20, "a thousand clients are one outline"


# Names from outside.


def test_names_from_outside_are_text_never_markup(run_folder: RunFolder) -> None:
    edit = changed(
        {
            **dict.fromkeys(["run.clients.0", "run.label_names.1", "run.task", "config.data.text"], HOSTILE),
            **dict.fromkeys(["config.model.name", "result.model", "result.privacy_statement"], HOSTILE),
            **{"rows.2.rejected": [HOSTILE], "config.method.personal": [HOSTILE]},
            **{f"run.versions.{HOSTILE}": HOSTILE, f"result.metrics.{HOSTILE}": 0.5, "config.method.name": HOSTILE},
            "config.data.train": [HOSTILE, '"><img src=x onerror=alert(1)>'],
            **{"config.data.label": "$x^2$ $\\frac$", "result.data": ""},
        }
    )
    outline = Outline(run_folder(edit=edit).rename(run_folder(name="another").with_name("a & <b>")))
    assert {"script", "img", "b"}.isdisjoint(outline.tags)
    assert outline.text.count(HOSTILE) >= 10
    assert "a & <b>" in outline.text


def test_statements_are_text_never_markup(run_folder: RunFolder) -> None:
    names = ("unit", "adjacency", "mechanism", "sampling", "accountant", "noise", "trust", "released")
    edit = changed(
        {f"result.privacy.{name}": HOSTILE for name in (*names, "ledger", "data_set")}
        | {
            "result.privacy.not_covered": [HOSTILE],
            "result.privacy_statement": HOSTILE,
            "config.privacy.ledger": HOSTILE,
        },
        make_private,
    )
    page = write_report(run_folder(edit=edit)).read_text(encoding="utf-8")
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 12


def test_a_drawing_holds_text_and_no_markup() -> None:
    hostile = "<script>&\"'"
    drawn = markup.path(hostile, [Station(hostile, hostile, hostile, hostile)] * 2, [hostile])
    drawn += markup.limits(hostile, [Bar(hostile, 1.0, hostile)])
    assert "<script" not in drawn
    assert drawn.count("&lt;script&gt;&amp;&quot;&#x27;") == 2 + 8 + 1 + 2 + 8 + 2, "title, words and description"


# Damage.


@pytest.mark.parametrize(
    "values",
    [
        {"config.privacy.unit": "client"},
        {"config.secure_aggregation.corrupt": 0.2},
        {"rows.2.accuracy": "high"},
        {"rows.2.clients_accuracy": 3},
        {"rows.2.rejected": 7},
        {"rows.2.drift": 0.5, "config.evaluation.diagnostics": ["drift"]},
        {"run.partition": [1]},
        {"run.partition.sizes": ["many", 2]},
        {"result.rounds": "all"},
        {"result.metrics": [1]},
        {"result.membership": {"auc": "high"}},
        {"result.privacy.epsilon": "small"},
        {"result.privacy.delta": None},
        {"result.privacy.not_covered": 3},
        {"result.privacy.clip_norm": "one"},
    ],
    ids=lambda values: next(iter(values)),
)
def test_values_that_no_run_writes_are_one_sentence(run_folder: RunFolder, values: dict[str, Any]) -> None:
    private = any(name.startswith("result.privacy") for name in values)
    folder = run_folder(3, edit=changed(values, *([make_private] if private else [])))
    with refused(RunDirectoryError):
        write_report(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", None),
        ("run.json", None),
        ("result.json", "{"),
        ("run.json", "[1, 2]"),
        ("metrics.jsonl", '{"round": 1}\nnonsense\n'),
        ("metrics.jsonl", '{"round": 1}\n'),
        ("metrics.jsonl", None),
        ("metrics.jsonl", '{"accuracy": 1}\n'),
        (".", None),
    ],
)
def test_a_damaged_run_directory_is_refused_and_nothing_is_written(
    run_folder: RunFolder, name: str, content: str | None
) -> None:
    folder = run_folder()
    if name == ".":
        folder /= "nowhere"
    elif content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="utf-8")
    with refused(RunDirectoryError):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_rounds_that_a_kill_cut_off_are_left_out(run_folder: RunFolder) -> None:
    folder = run_folder(3, planned=5, finished=False)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"round": 4, "accur')
    assert "Not finished: 3 of 5 rounds done" in told(folder)
    (folder / "metrics.jsonl").unlink()
    assert "Not finished: 0 of 5 rounds done" in told(folder)
