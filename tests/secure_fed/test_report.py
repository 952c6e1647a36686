"""The report as a file: its words, its escaping, and the damaged or unusual runs that it copes with."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from secure_fed.errors import RunDirectoryError, StorageError
from secure_fed.report import markup, page
from secure_fed.report.markup import Series
from secure_fed.report.page import write_report
from secure_fed.report.record import read

pytestmark = pytest.mark.usefixtures("drawn_once")

RunFolder = Callable[..., Path]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the drawings, which take most of the time."""
    for name in ("lines", "bars", "scale"):
        monkeypatch.setattr(markup, name, lambda *args, **named: "<svg></svg>")


Run = dict[str, Any]

HOSTILE = '<script>alert("&")</script>'


class Outline(HTMLParser):
    """Tags, attributes and the text outside the style sheet; unclosed or crossing tags are an error."""

    VOID = frozenset({"meta"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.style_parts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.style_parts if "style" in self.open else self.words).append(data)

    @property
    def style(self) -> str:
        return "".join(self.style_parts)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def written(folder: Path) -> Outline:
    return Outline(write_report(folder).read_text(encoding="utf-8"))


def test_a_finished_run_is_told_in_words_first(run_folder: RunFolder) -> None:
    text = written(run_folder(12)).text
    told = (
        "8 clients fine-tuned the model builtin/tiny together on builtin/notes, using the method ffa_lora:"
        " 12 rounds, with 4 of the clients in each. The shared model finds the right one of 4 classes for"
        " 82.7 % of the test examples (macro-F1 0.805)."
    )
    travelled = (
        "Clients sent updates of 18,436 trained parameters, not texts: 14.8 MB from the clients to the"
        " server and 20.8 MB back. It took 54 s."
    )
    assert text.index(told) < text.index(travelled) < text.index("Privacy: this run is not protected")
    assert text.index("Every setting") < text.index("Statement for the record")
    assert "mean model of its last" not in text


def test_a_run_that_ends_with_a_mean_of_models_says_so(run_folder: RunFolder) -> None:
    averaged = run_folder(edit=lambda run: run["config"]["federation"].update(average_last=3))
    assert "These are the numbers of the mean model of its last 3 rounds." in written(averaged).text


def test_a_run_without_protection_says_so_plainly(run_folder: RunFolder) -> None:
    text = written(run_folder()).text
    assert "No differential privacy and no secure aggregation protect this run." in text
    assert "Each client's contribution is visible to the server" in text
    assert "No differential privacy: the privacy unit of this run is none." in text  # from result.json


def test_no_file_of_a_run_talks_the_report_out_of_its_warning(run_folder: RunFolder) -> None:
    def boast(run: Run) -> None:
        run["result"].update(unit="client", epsilon=0.1, delta=1e-9, noise_multiplier=3.0)
        run["run"].update(privacy={"unit": "client"}, secure_aggregation={"enabled": True})

    text = written(run_folder(edit=boast)).text
    assert "No differential privacy and no secure aggregation protect this run." in text
    assert "epsilon no guarantee" in text
    assert "privacy unit none" in text


@pytest.mark.parametrize(
    ("section", "key", "value"), [("privacy", "unit", "client"), ("secure_aggregation", "corrupt", 0.2)]
)
def test_a_configuration_that_no_run_can_have_is_refused(
    run_folder: RunFolder, section: str, key: str, value: object
) -> None:
    folder = run_folder(edit=lambda run: run["config"].setdefault(section, {}).update({key: value}))
    with pytest.raises(RunDirectoryError, match=rf"config\.json is damaged.*{section}"):
        write_report(folder)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: run["rows"][2].update(accuracy="high"),
        lambda run: run["rows"][2].update(clients_accuracy=3),
        lambda run: run["rows"][2].update(rejected=7),
        lambda run: run["run"].update(partition=[1]),
        lambda run: run["run"]["partition"].update(sizes=["many", 2]),
        lambda run: run["result"].update(rounds="all"),
        lambda run: run["result"].update(metrics=[1]),
    ],
)
def test_values_that_no_run_writes_are_one_sentence(run_folder: RunFolder, spoil: Callable[[Run], None]) -> None:
    folder = run_folder(edit=spoil)
    with pytest.raises(RunDirectoryError, match="hand-made is damaged: it holds a value that no run writes"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_every_section_of_a_full_run_is_there_with_its_plots(run_folder: RunFolder) -> None:
    outline = written(run_folder())
    for title in (
        "In short",
        "Privacy",
        "Result",
        "Learning",
        "What travelled",
        "Clients",
        "Every round",
        "Configuration",
    ):
        assert title in outline.text
    assert outline.tags.count("svg") == 8
    assert "Jensen-Shannon divergence between clients: 0.183" in outline.text
    assert "from 60 to 1,900 each, median 525" in outline.text
    assert "method.target_modules" in outline.text
    assert "top_2 0.953" in outline.text
    assert "2.13.0" in outline.text


def test_the_file_needs_nothing_but_itself(run_folder: RunFolder) -> None:
    outline = written(run_folder())
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(outline.tags)
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert ("content", policy) in outline.attributes
    for name, value in outline.attributes:
        assert not name.startswith("on")
        assert name not in ("href", "xlink:href", "src") or value.startswith("#")
        assert "url(" not in value or "url(#" in value
    assert "url(" not in outline.style
    assert "@import" not in outline.style


def test_drawings_refer_only_to_what_they_define(run_folder: RunFolder) -> None:
    outline = written(run_folder())
    defined = [value for name, value in outline.attributes if name == "id"]
    used = {value[1:] for name, value in outline.attributes if name == "xlink:href"}
    used |= {found for _, value in outline.attributes for found in re.findall(r"url\(#([^)]+)\)", value)}
    assert used
    assert used <= set(defined)
    assert len(defined) == len(set(defined))


def test_the_same_run_gives_the_same_bytes_whatever_a_users_plot_settings(
    run_folder: RunFolder, drawn_once: dict[str, str]
) -> None:
    import matplotlib

    folder = run_folder()
    first = write_report(folder).read_bytes()
    before = dict(drawn_once)
    drawn_once.clear()
    with matplotlib.rc_context({"axes.grid": True, "font.size": 30, "svg.fonttype": "path"}):
        assert write_report(folder).read_bytes() == first
        assert matplotlib.rcParams["font.size"] == 30
    assert drawn_once, "all was drawn anew"
    drawn_once.update(before)


@pytest.mark.nightly
def test_another_run_gives_other_bytes(run_folder: RunFolder) -> None:
    record = read(run_folder())
    other = dataclasses.replace(record, rounds=record.rounds[:-1])
    assert page.page(record) != page.page(other)


def test_names_from_outside_are_text_never_markup(run_folder: RunFolder) -> None:
    def hostile(run: Run) -> None:
        run["run"]["clients"][0] = HOSTILE
        run["run"]["label_names"][1] = HOSTILE
        run["run"]["versions"][HOSTILE] = HOSTILE
        run["rows"][2]["rejected"] = [HOSTILE]
        run["config"]["model"]["name"] = run["result"]["model"] = HOSTILE
        run["result"]["metrics"][HOSTILE] = 0.5
        run["config"]["data"]["train"] = [HOSTILE, '"><img src=x onerror=alert(1)>']
        run["config"]["data"] |= {"text": HOSTILE, "label": "$x^2$ $\\frac$"}
        run["config"]["method"] |= {"name": HOSTILE, "personal": [HOSTILE]}
        run["result"]["data"] = ""
        run["run"]["task"] = run["result"]["privacy_statement"] = HOSTILE

    outline = written(run_folder(edit=hostile))
    assert {"script", "img"}.isdisjoint(outline.tags)
    assert outline.text.count(HOSTILE) >= 10


def test_a_run_directory_with_markup_in_its_name(run_folder: RunFolder) -> None:
    folder = run_folder()
    renamed = folder.rename(folder.with_name("a & <b>"))
    assert "a & <b>" in written(renamed).text


def test_an_unfinished_run_says_how_far_it_is_and_how_to_go_on(run_folder: RunFolder, undrawn: None) -> None:
    text = written(run_folder(3, planned=20, finished=False)).text
    assert "Not finished: 3 of 20 rounds done" in text
    assert "20 rounds, 3 of them done so far" in text
    assert "--resume" in text
    assert "55.3 %" in text  # the accuracy after the last finished round
    assert "3.70 MB from the clients" in text


def test_a_result_of_fewer_rounds_than_now_asked_for_is_not_the_result(run_folder: RunFolder, undrawn: None) -> None:
    text = written(run_folder(12, planned=30)).text
    assert "Not finished: 12 of 30 rounds done" in text


def test_a_run_before_its_first_round(run_folder: RunFolder) -> None:
    folder = run_folder(0, planned=5, finished=False)
    (folder / "metrics.jsonl").unlink()
    outline = written(folder)
    assert "Not finished: 0 of 5 rounds done" in outline.text
    assert "has not been evaluated on test examples" in outline.text
    assert outline.tags.count("svg") == 3  # protection and clients only: there are no rounds to draw


def test_a_run_of_one_round(run_folder: RunFolder, undrawn: None) -> None:
    text = written(run_folder(1)).text
    assert "1 round, with 4 of the clients in each" in text
    assert "Accuracy: 37.4 % in round 1." in text


def test_a_round_cut_off_by_a_kill_is_left_out(run_folder: RunFolder) -> None:
    folder = run_folder(3, planned=5, finished=False)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"round": 4, "accur')
    assert "Not finished: 3 of 5 rounds done" in written(folder).text


def test_rounds_that_were_not_evaluated_are_gaps_in_the_table_not_in_the_line(
    run_folder: RunFolder, undrawn: None
) -> None:
    def every_third(run: Run) -> None:
        for row in run["rows"]:
            if row["round"] % 3:
                del row["accuracy"], row["macro_f1"], row["loss"], row["clients_accuracy"]

    record = read(run_folder(12, edit=every_third))
    assert [number for number, _ in record.series("accuracy")] == [3, 6, 9, 12]
    assert [number for number, _ in record.series("clients_accuracy", "mean")] == [3, 6, 9, 12]
    assert "Accuracy: 55.3 % in round 3, 82.7 % in round 12." in Outline(page.page(record)).text


def test_what_was_never_measured_has_no_plot(run_folder: RunFolder) -> None:
    def bare(run: Run) -> None:
        for row in run["rows"]:
            for metric in ("accuracy", "macro_f1", "loss", "clients_accuracy", "train_loss"):
                row.pop(metric)
        for metric in ("accuracy", "macro_f1", "loss"):
            run["result"][metric] = None
        del run["run"]["partition"]

    outline = written(run_folder(edit=bare))
    assert outline.tags.count("svg") == 3  # protection and bytes only
    assert "Learning" not in outline.text
    assert "has not been evaluated on test examples" in outline.text


def test_classes_without_names_are_not_counted(run_folder: RunFolder) -> None:
    text = written(run_folder(edit=lambda run: run["run"].update(label_names=[]))).text
    assert "finds the right class for 82.7 % of the test examples" in text


def test_a_model_without_accuracy_is_told_by_its_loss(run_folder: RunFolder, undrawn: None) -> None:
    def no_accuracy(run: Run) -> None:
        for row in [*run["rows"], run["result"]]:
            row["accuracy"] = row["macro_f1"] = None

    text = written(run_folder(edit=no_accuracy)).text
    assert "The shared model has a loss of 0.562 on the test examples." in text


def test_values_that_are_not_finite_are_named_and_leave_a_gap(run_folder: RunFolder) -> None:
    def diverge(run: Run) -> None:
        run["rows"][4]["loss"] = math.nan
        run["rows"][5]["loss"] = math.inf
        for row in run["rows"]:
            row["train_loss"] = math.nan

    text = written(run_folder(edit=diverge)).text
    assert "not finite, hence not drawn: rounds 5 and 6" in text
    assert "Train loss: not finite in round 1" in text


def test_one_finite_value_among_many_is_still_visible() -> None:
    points = ((1, 2.5), *((number, math.nan) for number in range(2, 60)))
    assert "<use" in markup.lines("loss", [Series("loss", points)], y_label="loss")


def test_clients_left_out_are_named_by_round(run_folder: RunFolder) -> None:
    def reject(run: Run) -> None:
        run["rows"][3]["rejected"] = ["ward B", "ward C", "ward D"]
        run["rows"][8]["rejected"] = ["ward A"]

    text = written(run_folder(edit=reject)).text
    assert "left out 4 updates that contained numbers that are not finite" in text
    assert "4 ward B, ward C and ward D" in text
    assert "9 ward A" in text
    assert "Updates left out" in text


def test_nobody_left_out_is_not_mentioned(run_folder: RunFolder) -> None:
    assert "left out" not in written(run_folder()).text


def test_poisson_cohorts_are_expected_sizes(run_folder: RunFolder) -> None:
    folder = run_folder(edit=lambda run: run["config"]["federation"].update(sampling="poisson"))
    assert "with about 4 of the clients in each" in written(folder).text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "holds no run: it has no config.json"),
        ("run.json", None, "holds no run: it has no run.json"),
        ("result.json", "{", "result.json is damaged: it cannot be read as JSON"),
        ("run.json", "[1, 2]", "run.json is damaged: it holds [1, 2], not an object"),
        ("metrics.jsonl", '{"round": 1}\nnonsense\n', "metrics.jsonl, line 2 is damaged: it cannot be read as JSON"),
        ("metrics.jsonl", '{"round": 1}\n', "has 1 of the 12 rounds of its result: restore it"),
        ("metrics.jsonl", None, "has 0 of the 12 rounds of its result: restore it"),
        ("metrics.jsonl", '{"accuracy": 1}\n', "metrics.jsonl, line 1 is damaged: it has no round number"),
    ],
)
def test_a_damaged_run_directory_is_refused_and_nothing_is_written(
    run_folder: RunFolder, name: str, content: str | None, said: str
) -> None:
    folder = run_folder()
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(RunDirectoryError, match=re.escape(said)):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_no_run_directory_at_all(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"nowhere holds no run"):
        write_report(tmp_path / "nowhere")


def test_a_full_disk_leaves_the_old_report(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder()
    (folder / "report.html").write_text("old", encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match=r"report\.html cannot be written: No space left on device"):
        write_report(folder)
    assert (folder / "report.html").read_text(encoding="utf-8") == "old"


def test_a_thousand_clients_are_one_outline(run_folder: RunFolder) -> None:
    def many(run: Run) -> None:
        run["run"]["clients"] = [f"client {number}" for number in range(1000)]
        run["run"]["partition"]["sizes"] = [1 + number % 37 for number in range(1000)]

    text = written(run_folder(edit=many)).text
    assert "1,000 clients hold 18,982 examples: from 1 to 37 each" in text
    drawing = markup.bars("sizes", range(1000), x_label="client", y_label="examples")
    assert drawing.count("<path") < 20
