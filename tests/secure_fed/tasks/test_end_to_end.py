"""Every task from a file to a report: its runs learn, resume and predict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from secure_fed import Federation, RunConfig
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.export import trained
from secure_fed.learning import tasks
from secure_fed.learning.tasks.headline import headline
from secure_fed.report.page import write_report
from secure_fed.report.terminal import show_result
from secure_fed.runs.evaluation import evaluated
from tests.cells import chosen
from tests.secure_fed import toys
from tests.secure_fed.tasks.conftest import Write
from tests.secure_fed.tasks.toy_tasks import TOYS

SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs" / "result.schema.json").read_text(encoding="utf-8"))
Configured = Callable[..., RunConfig]


@pytest.fixture
def configured(write: Write, small_model: Path, gpt2: Path) -> Configured:
    """A function that returns a config for a few rounds on the named task's toy data."""

    def config(task: str, **settings: Any) -> RunConfig:
        toy = TOYS[task]
        usual = {
            "model.name": str(gpt2 if toy.decoder else small_model),
            "model.max_length": 32,
            "data.task": task,
            "data.train": str(write("train", toy.rows(40))),
            "data.test": str(write("test", toy.rows(12))),
            **{f"data.{name}": value for name, value in toy.settings.items()},
            "federation.clients": 4,
            "federation.cohort": 4,
            "federation.rounds": 6,
            "method.name": "fedlora",
            "training.lr": 0.02,
            "training.lr_schedule": "constant",
            "training.batch_size": 4,
            "training.epochs": 2,
            "training.together": 1,
        }
        chosen = {**usual, **{name.replace("__", "."): value for name, value in settings.items()}}
        return RunConfig().replace({tuple(name.split(".", 1)): value for name, value in chosen.items()})  # type: ignore[misc]

    return config


@pytest.mark.parametrize("task", chosen(("tokens", "question_answering"), ["tokens"]))
def test_f1_stands_for_a_model_of_entities_or_answers(
    task: str, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """High accuracies with an F1 of 0 reach no target, and the model that is kept is that of the highest F1."""
    scores = iter([(0.95, 0.0), (0.97, 0.1), (0.9, 0.5), (0.96, 0.4)])
    measured = lambda *_, **__: {**dict(zip(("accuracy", "f1"), next(scores), strict=True)), "loss": 1.0}  # noqa: E731
    monkeypatch.setattr(f"secure_fed.learning.tasks.{task}.metrics", measured)
    asked = {"evaluation__keep_best": True, "evaluation__target_accuracy": 0.45, "evaluation__patience": 3}
    result = Federation(configured(task, federation__rounds=4, **asked)).run(tmp_path / "run")
    assert result.best is not None
    assert result.best.round == result.summary["best_round"] == 3
    assert result.summary["diagnostics"]["target"]["rounds"] == 3
    written = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    jsonschema.validate(written, SCHEMA)
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "The target F1 of 0.45" in page
    assert "F1 on the test examples" in page


def test_a_task_has_the_same_headline_metric_by_its_name_and_by_its_title() -> None:
    """Runs know a task's name, results know its title."""
    for name in tasks.TASKS:
        title = tasks.build(DataConfig(task=name)).title
        assert headline(name) == headline(title)
        assert headline(name) == "accuracy" or headline(name) in TOYS[name].measured


def test_every_task_has_a_toy() -> None:
    assert {*TOYS, "classification"} == set(tasks.TASKS)


@pytest.mark.parametrize("task", chosen(TOYS, ["regression"]))
def test_a_task_learns_and_is_reported(task: str, configured: Configured, tmp_path: Path) -> None:
    longer = {"federation__rounds": 9} if task == "multi_label" else {}  # it hardly learns for five rounds
    config = configured(task, **longer)
    federation = Federation(config)
    before = evaluated(federation.assembly, federation.assembly.initial)
    result = federation.run(tmp_path / "run")
    last = result.records[-1]
    assert last["loss"] < 0.97 * before["loss"]
    assert {*TOYS[task].measured, "loss"} <= set(last)
    assert isinstance(result.summary["accuracy"], float) is TOYS[task].accuracy
    assert set(TOYS[task].measured) - {"macro_f1"} <= set(result.summary["metrics"])
    jsonschema.validate(json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8")), SCHEMA)
    assert write_report(tmp_path / "run").stat().st_size > 1000
    show_result(result.summary)


def answers(run_dir: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    capsys.readouterr()
    assert main(["predict", str(run_dir), str(file)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(list(one)[:2] == ["line", "text"] for one in found)
    return [{name: value for name, value in one.items() if name not in ("line", "text")} for one in found]


SHAPES: dict[str, dict[str, Any]] = {
    "multi_label": {"labels": list, "probabilities": dict},
    "regression": {"value": float},
    "tokens": {"entities": list},
    "question_answering": {"answer": str, "start": int, "score": float},
    "causal_lm": {"log_likelihood": float, "tokens": int, "perplexity": float, "continuation": str},
    "chat": {"log_likelihood": float, "tokens": int, "perplexity": float, "continuation": str},
    "multiple_choice": {"label": int, "choice": str, "likelihoods": list},
}


@pytest.mark.parametrize("task", chosen(TOYS, ["tokens", "multiple_choice"]))
def test_a_run_answers_in_the_order_of_the_file(
    task: str, configured: Configured, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Federation(configured(task, federation__rounds=1, evaluation__batch_size=5)).run(tmp_path / "run")
    rows = TOYS[task].rows(11)
    labels = ("label", "tags", "answers")
    file = write("asked", [{name: cell for name, cell in row.items() if name not in labels} for row in rows])
    found = answers(tmp_path / "run", file, capsys)
    assert len(found) == len(rows)
    for answer in found:
        assert {name: type(value) for name, value in answer.items()} == SHAPES[task]
    one = write("alone", [json.loads(file.read_text(encoding="utf-8").splitlines()[7])])
    (alone,) = answers(tmp_path / "run", one, capsys)
    numbers = [name for name, kind in SHAPES[task].items() if kind is float]
    assert {name: found[7][name] for name in numbers} == pytest.approx(
        {name: alone[name] for name in numbers}, rel=1e-3
    )
    assert {name: found[7][name] for name in SHAPES[task] if SHAPES[task][name] in (str, int)} == {
        name: alone[name] for name in SHAPES[task] if SHAPES[task][name] in (str, int)
    }


@pytest.mark.nightly
def test_a_run_on_entities_goes_on_where_it_was_stopped(configured: Configured, tmp_path: Path) -> None:
    config = configured("tokens", federation__rounds=4, training__epochs=1)
    whole = Federation(config).run(tmp_path / "whole")
    Federation(configured("tokens", federation__rounds=2, training__epochs=1)).run(tmp_path / "halves")
    resumed = Federation(config).run(tmp_path / "halves", resume=True)
    assert toys.same(whole.state.tensors, resumed.state.tensors)
    assert toys.without_time(whole.records) == toys.without_time(resumed.records)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "unit"),
    chosen(
        [
            ("tokens", "client"),
            ("tokens", "example"),
            ("question_answering", "example"),
            ("multiple_choice", "client"),
            ("chat", "example"),
        ],
        [("multiple_choice", "client")],
    ),
)
def test_tasks_run_in_private_and_behind_masks(task: str, unit: str, configured: Configured) -> None:
    config = configured(
        task,
        federation__rounds=1,
        training__epochs=1,
        training__batch_size=12,
        privacy__unit=unit,
        privacy__noise_multiplier=1.0,
        secure_aggregation__enabled=True,
        secure_aggregation__corrupt=0.0,
        secure_aggregation__dropout=0.0,
        federation__cohort=4,
        federation__sampling="fixed" if unit == "example" else "auto",
    )
    summary = Federation(config).run().summary
    assert summary["epsilon"] > 0
    assert math.isfinite(summary["loss"])


def test_clients_of_a_task_with_an_accuracy_are_compared(configured: Configured) -> None:
    record = Federation(configured("question_answering", federation__rounds=1, evaluation__per_client=True)).run()
    assert set(record.records[-1]["clients_accuracy"]) == {"mean", "worst_decile"}
    with pytest.raises(
        ConfigError, match=r"evaluation\.per_client = True has no effect here: it needs a data\.task with"
    ):
        configured("regression", evaluation__per_client=True)


def test_lines_of_text_are_divided_into_words(
    configured: Configured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Federation(configured("tokens", training__lr=0.05, federation__rounds=5)).run(tmp_path / "run")
    (tmp_path / "lines.txt").write_text("calm wild word9 word3\n", encoding="utf-8")
    (answer,) = answers(tmp_path / "run", tmp_path / "lines.txt", capsys)
    assert answer == {"entities": [{"text": "calm wild", "type": "mood", "start": 0, "end": 2}]}


def test_a_question_without_its_context_is_refused(
    configured: Configured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Federation(configured("question_answering", federation__rounds=1)).run(tmp_path / "run")
    (tmp_path / "lines.txt").write_text("what\n", encoding="utf-8")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "lines.txt")]) == 2
    assert "give columns 'question' and 'context'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="judges 'question' and 'context' together"):
        list(trained.load_run(tmp_path / "run").predict(["what"]))


@pytest.mark.nightly
def test_questions_without_an_answer_are_learned_and_left_unanswered(
    configured: Configured, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = TOYS["question_answering"].rows(40)
    for row in rows[::2]:
        row |= {"context": row["context"].replace("calm", "word9").replace("wild", "word9")}
        row["answers"] = {"text": [], "answer_start": []}
    file = write("rows", rows)
    files = {"data__train": str(file), "data__test": str(file)}
    maybe = configured("question_answering", federation__rounds=20, training__lr=0.05, data__unanswerable=True, **files)
    result = Federation(maybe).run(tmp_path / "run")
    jsonschema.validate(json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8")), SCHEMA)
    measured = result.summary["metrics"]
    assert measured["no_answer_exact_match"] > 0.9
    assert measured["has_answer_exact_match"] > 0.4
    found = answers(tmp_path / "run", file, capsys)
    empty = [one["answer"] == "" for one in found]
    assert sum(empty[::2]) / 20 == pytest.approx(measured["no_answer_exact_match"])
    assert [one["no_answer"] > 0.5 for one in found] == empty == [one["start"] is None for one in found]
    with pytest.raises(DataError, match=r"holds no answer; set data\.unanswerable = true"):
        Federation(configured("question_answering", **files))


def test_prompts_and_their_targets_are_learned_and_judged(
    configured: Configured, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"word{index % 5} word9", "target": f"word{index % 5} calm"} for index in range(24)]
    file = write("rows", rows)
    config = configured("causal_lm", data__text_b="target", data__train=str(file), data__test=str(file))
    federation = Federation(config)
    before = evaluated(federation.assembly, federation.assembly.initial)
    result = federation.run(tmp_path / "run")
    assert result.summary["task"] == "language modelling of targets"
    assert result.records[-1]["loss"] < 0.97 * before["loss"]
    found = answers(tmp_path / "run", file, capsys)
    assert [one["tokens"] for one in found] == [2] * 24
    prompts = [one["continuation"] for one in found]
    assert prompts == list(trained.load_run(tmp_path / "run").generate([row["text"] for row in rows]))
    (tmp_path / "prompts.txt").write_text("word1 word9\n", encoding="utf-8")
    (alone,) = answers(tmp_path / "run", tmp_path / "prompts.txt", capsys)
    assert alone == {"continuation": prompts[1]}
    total = sum(one["log_likelihood"] for one in found)
    assert result.summary["metrics"]["perplexity"] == pytest.approx(math.exp(-total / 48), rel=1e-3)
