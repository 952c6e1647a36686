"""The report's sentences and numbers on what a run measured: metrics of each task, and membership inference.

The latter also in the terminal's table, with the report's link to the run's audit.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError
from secure_fed.learning.tasks import TASKS
from secure_fed.report.measured import how_good, key_numbers
from secure_fed.report.page import write_report
from secure_fed.report.record import RunRecord
from secure_fed.report.terminal import show_result

pytestmark = pytest.mark.usefixtures("drawn_once")
MEASURED = {
    "classification": (
        {"macro_f1": 0.5},
        "finds the right one of 3 classes for 25.0 % of the test examples (macro-F1 0.500)",
    ),
    "multi_label": (
        {"micro_f1": 0.4},
        "finds exactly the right labels of 25.0 % of the test examples (micro-F1 0.400)",
    ),
    "regression": ({"rmse": 1.5, "pearson": 0.7}, "is off by 1.500 on the test examples (root mean square; Pearson's"),
    "tokens": (
        {"f1": 0.3},
        "finds the entities of the test texts with an F1 of 0.300 (it tags 25.0 % of the words correctly)",
    ),
    "question_answering": ({"f1": 0.3}, "answers 25.0 % of the test questions exactly (F1 of the words 0.300)"),
    "causal_lm": ({"perplexity": 33.0}, "predicts 25.0 % of the next tokens of the test texts (perplexity 33.000)"),
    "chat": ({"perplexity": 33.0}, "assistant's next tokens in the test conversations (perplexity 33.000)"),
    "multiple_choice": ({}, "chooses correctly in 25.0 % of the test examples."),
}


def record(task: str, row: dict[str, Any]) -> RunRecord:
    config = RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "task"): task})
    return RunRecord("run", config, {"label_names": ["a", "b", "c"], "clients": []}, ({"round": 1, **row},), None)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_told_of_in_its_own_words(task: str) -> None:
    metrics, said = MEASURED[task]
    measured = metrics | {"loss": 1.0} | ({} if task == "regression" else {"accuracy": 0.25})
    found = record(task, measured)
    assert said in how_good(found)
    names = [name for name, _ in key_numbers(found)]
    assert ("accuracy" in names) == (task != "regression")
    assert all(value != "–" for name, value in key_numbers(found) if name != "macro-F1" or "macro_f1" in metrics)


def test_what_was_not_measured_is_not_made_up() -> None:
    assert how_good(record("tokens", {})) == "The shared model has not been evaluated on test examples."
    assert (
        how_good(record("classification", {"loss": 0.5}))
        == "The shared model has a loss of 0.500 on the test examples."
    )
    assert how_good(record("classification", {"accuracy": 0.5})).endswith("for 50.0 % of the test examples.")


def test_accuracy_stands_beside_the_commonest_label() -> None:
    """The report shows that label's share, and says if the model is no better. For entities, F1 precedes accuracy."""
    common = {"commonest": {"share": 0.5, "of": 400}}
    worse, better = (
        replace(record("classification", {"accuracy": accuracy}), result={**common, "accuracy": accuracy})
        for accuracy in (0.52, 0.8)
    )
    assert ("share of the commonest label", "50.0 %") in key_numbers(worse)
    assert "The accuracy of 52.0% is no better than always giving the commonest label" in how_good(worse)
    assert "no better" not in how_good(better)
    tags = replace(record("tokens", {"f1": 0.3, "accuracy": 0.9}), result={**common, "accuracy": 0.9})
    assert [name for name, _ in key_numbers(tags)][:2] == ["F1", "accuracy"]


RunFolder = Callable[..., Path]
Run = dict[str, Any]

TITLE = "Membership inference: what the model reveals"


def measured(**changes: Any) -> Callable[[Run], None]:
    """An edit that gives a run a membership result."""
    rate = {"tpr": 0.034, "tpr_interval": [0.023, 0.048], "fpr": 0.01, "fpr_interval": [0.0046, 0.0189]}
    found = {
        "attack": "loss",
        "unit": "example",
        "auc": 0.5312,
        "auc_interval": [0.5047, 0.5577],
        "members": 900,
        "non_members": 903,
        "tpr_at_fpr": {"0.01": rate, "0.001": None},
        "why": "",
    }
    return lambda run: run["result"].update(membership={**found, **changes})


def page(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def told(folder: Path) -> str:
    """The report's text, without markup and drawings."""
    words = re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]*>", " ", page(folder), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(words))


def test_membership_stands_beside_accuracy(run_folder: RunFolder) -> None:
    text = told(run_folder(edit=measured()))
    section = text[text.index(TITLE) : text.index("What travelled", text.index(TITLE))]
    assert (
        "names the one that trained in 53 of 100 pairs; a coin does in 50. The 95 % interval is 50.5 to 55.8" in section
    )
    assert "the model reveals something about whether an example was in its training" in section
    assert "accuracy 82.7 % membership AUC (a coin: 0.5) 0.531 (0.505 to 0.558)" in section
    assert "members, held out 900, 903" in section
    assert (
        "members found at 1 % false positives 3.4 % (2.3 % to 4.8 %), with 1.0 % (0.5 % to 1.9 %) falsely accused"
        in section
    )
    assert "members found at 0.1 % false positives not stated: 903 held out are too few for a rate of 0.1 %" in section
    assert "no sign of privacy" in section
    assert text.count("membership AUC (a coin: 0.5) 0.531 (0.505 to 0.558)") == 2  # in the summary, and in its section
    assert text.count("membership AUC 0.531 (0.505 to 0.558)") == 1  # in the result


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ([0.49, 0.55], "this attack found nothing."),
        ([0.46, 0.52], "this attack found nothing. A value below 50 is chance; it does not show privacy."),
        ([0.42, 0.56], "900 and 903 are too few to show whether there is a leak. A value below 50 is chance"),
        ([0.41, 0.47], "below a coin. That is not privacy"),
    ],
)
def test_nothing_found_is_never_called_privacy(run_folder: RunFolder, interval: list[float], said: str) -> None:
    text = told(run_folder(edit=measured(auc=sum(interval) / 2, auc_interval=interval)))
    assert said in text
    assert "reveals something" not in text
    assert "no sign of privacy" in text


@pytest.mark.parametrize(("unit", "word"), [("client", "clients"), ("group", "groups of examples")])
def test_the_unit_is_named(run_folder: RunFolder, unit: str, word: str) -> None:
    assert f"coins decided which of some {word} were left out" in told(run_folder(edit=measured(unit=unit)))


def test_what_was_not_measured_says_why_and_has_no_number(run_folder: RunFolder) -> None:
    nothing = measured(auc=None, auc_interval=None, tpr_at_fpr=None, why="the pool is <empty>")
    folder = run_folder(edit=nothing)
    text = told(folder)
    assert f"{TITLE} No figure: the pool is <empty>." in text
    assert "<empty>" not in page(folder)
    assert text.count("membership AUC (a coin: 0.5) no figure (why: below)") == 1  # beside accuracy
    assert text.count("membership AUC") == text.count("no figure (why: below)") == 2


@pytest.mark.parametrize("old", [lambda run: None, lambda run: run["result"].update(membership=None)])
def test_a_run_that_knows_of_no_membership_has_no_section(run_folder: RunFolder, old: Callable[[Run], None]) -> None:
    assert TITLE not in told(run_folder(edit=old))


def test_an_unfinished_run_has_none_either(run_folder: RunFolder) -> None:
    assert TITLE not in told(run_folder(3, planned=5, finished=False))


def audited(folder: Path, told: str) -> None:
    """Writes an audit into a run's folder; `told` becomes its audit.json."""
    (folder / "private").mkdir(exist_ok=True)
    (folder / "private" / "audit.html").write_text("an audit", encoding="utf-8")
    (folder / "private" / "audit.json").write_text(told, encoding="utf-8")


@pytest.mark.parametrize("edit", [measured(), lambda run: None])
def test_the_audit_is_linked_where_there_is_one(run_folder: RunFolder, edit: Callable[[Run], None]) -> None:
    folder = run_folder(edit=edit)
    assert "audit.html" not in page(folder)
    audited(folder, json.dumps({"rounds": len((folder / "metrics.jsonl").read_text().splitlines())}))
    assert page(folder).count('<a href="private/audit.html">') == 1
    (folder / "private" / "audit.html").unlink()
    assert "audit.html" not in page(folder)


@pytest.mark.parametrize(
    "told",
    [
        '{"rounds": 4}',
        '{"rounds": 6}',
        '{"rounds": 5.0}',
        '{"rounds": "5"}',
        '{"rounds": null}',
        "{}",
        "[5]",
        '{"rou',
        "",
    ],
)
def test_an_audit_of_another_state_is_not_the_audit_of_this_run(run_folder: RunFolder, told: str) -> None:
    """A run that is resumed after its audit has such an audit."""
    folder = run_folder(5, planned=5, edit=measured())
    audited(folder, told)
    assert "audit.html" not in page(folder)
    audited(folder, '{"rounds": 5}')
    assert "audit.html" in page(folder)


def test_an_audit_that_may_not_be_read_does_not_keep_the_report_from_being_written(run_folder: RunFolder) -> None:
    folder = run_folder(edit=measured())
    audited(folder, "")
    (folder / "private" / "audit.json").unlink()
    (folder / "private" / "audit.json").mkdir()
    assert "audit.html" not in page(folder)


@pytest.mark.parametrize("changes", [{"auc": "high"}, {"auc_interval": [0.1]}, {"tpr_at_fpr": {"0.01": {}}}])
def test_values_that_no_run_writes_are_one_sentence(run_folder: RunFolder, changes: Run) -> None:
    with pytest.raises(RunDirectoryError, match="it holds a value that no run writes"):
        write_report(run_folder(edit=measured(**changes)))


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """A function: run folder -> its result as printed on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(folder: Path) -> str:
        show_result(json.loads((folder / "result.json").read_text(encoding="utf-8")))
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        return printed

    return show


def test_the_terminal_shows_it_below_the_accuracy(run_folder: RunFolder, shown: Callable[[Path], str]) -> None:
    printed = shown(run_folder(edit=measured()))
    assert printed.index("accuracy") < printed.index("membership AUC") < printed.index("rounds")
    words = " ".join(printed.replace("│", " ").split())
    assert "membership AUC 0.531 (0.505 to 0.558)" in words
    assert "900 members, 903 held out" in words
    assert (
        "the attack names the one that trained in 53 of 100 pairs; a coin does in 50. The 95 % interval is 50.5"
        in words
    )
    assert "found at 1 % 3.4 % (2.3 % to 4.8 %), with 1.0 % (0.5 % to 1.9 %) falsely accused" in words
    assert "found at 0.1 % not stated" in words


def test_the_terminal_says_why_there_is_none(run_folder: RunFolder, shown: Callable[[Path], str]) -> None:
    nothing = measured(auc=None, auc_interval=None, tpr_at_fpr=None, why="too few units")
    assert "no figure: too few units" in shown(run_folder(edit=nothing))


def test_a_terminal_without_it_has_no_row(run_folder: RunFolder, shown: Callable[[Path], str]) -> None:
    assert "membership" not in shown(run_folder())
