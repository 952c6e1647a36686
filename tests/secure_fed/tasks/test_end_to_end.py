"""Every task from a file to a report: its runs learn, resume and predict."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from secure_fed import Federation, RunConfig
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.export import trained
from secure_fed.learning import problem, tasks
from secure_fed.learning.data import fingerprint, notes, on_disk
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.on_disk import OnDisk
from secure_fed.learning.models.loading import load
from secure_fed.learning.problem import tokenised
from secure_fed.learning.tasks.headline import headline
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.trials import agree, moved_away
from secure_fed.report.page import write_report
from secure_fed.report.terminal import show_result
from secure_fed.runs.evaluation import evaluated
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed.example_gradients import one_by_one, path_for, together
from tests.secure_fed.tasks.conftest import Write, lines_of, require_valid, settings_of
from tests.secure_fed.tasks.toy_tasks import TOYS

Configured = Callable[..., RunConfig]


@pytest.fixture
def configured(write: Write, small_model: Path, gpt2: Path) -> Configured:
    """A function that returns a config for a few rounds on the named task's toy data."""

    def config(task: str, **settings: Any) -> RunConfig:
        toy = TOYS[task]
        usual = {
            **{"model.name": str(gpt2 if toy.decoder else small_model), "model.max_length": 32, "data.task": task},
            **{"data.train": str(write("train", toy.rows(40))), "data.test": str(write("test", toy.rows(12)))},
            **{f"data.{name}": value for name, value in toy.settings.items()},
            **{"federation.clients": 4, "federation.cohort": 4, "federation.rounds": 6, "method.name": "fedlora"},
            **{"training.lr": 0.02, "training.lr_schedule": "constant", "training.batch_size": 4},
            **{"training.epochs": 2, "training.together": 1},
        }
        return settings_of(usual, **settings)

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
    result = Federation(configured(task, federation__rounds=4, training__epochs=1, **asked)).run(tmp_path / "run")
    assert result.best is not None
    assert result.best.round == result.summary["best_round"] == 3
    assert result.summary["diagnostics"]["target"]["rounds"] == 3
    require_valid(tmp_path / "run")


def test_a_task_has_the_same_headline_metric_by_its_name_and_by_its_title() -> None:
    """Runs know a task's name, results know its title."""
    assert {*TOYS, "classification"} == set(tasks.TASKS)
    for name in tasks.TASKS:
        title = tasks.build(DataConfig(task=name)).title
        assert headline(name) == headline(title)
        assert headline(name) == "accuracy" or headline(name) in TOYS[name].measured


def answers(run_dir: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    capsys.readouterr()
    assert main(["predict", str(run_dir), str(file)]) == 0
    found = lines_of(capsys.readouterr().out)
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


@pytest.mark.usefixtures("never_drawn")
@pytest.mark.parametrize("task", chosen(TOYS, ["regression"]))
def test_a_task_learns_is_reported_and_answers_in_the_order_of_a_file(
    task: str, configured: Configured, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = {"federation__rounds": 9} if task == "multi_label" else {}  # it hardly learns for five rounds
    federation = Federation(configured(task, evaluation__batch_size=5, **longer))
    before = evaluated(federation.assembly, federation.assembly.initial)
    result = federation.run(tmp_path / "run")
    last = result.records[-1]
    assert last["loss"] < 0.97 * before["loss"]
    assert {*TOYS[task].measured, "loss"} <= set(last)
    assert isinstance(result.summary["accuracy"], float) is TOYS[task].accuracy
    assert set(TOYS[task].measured) - {"macro_f1"} <= set(result.summary["metrics"])
    require_valid(tmp_path / "run")
    assert write_report(tmp_path / "run").stat().st_size > 1000
    show_result(result.summary)
    rows = TOYS[task].rows(11)
    labels = ("label", "tags", "answers")
    file = write("asked", [{name: cell for name, cell in row.items() if name not in labels} for row in rows])
    found = answers(tmp_path / "run", file, capsys)
    assert len(found) == len(rows)
    for answer in found:
        assert {name: type(value) for name, value in answer.items()} == SHAPES[task]
    one = write("alone", [json.loads(file.read_text(encoding="utf-8").splitlines()[7])])
    (alone,) = answers(tmp_path / "run", one, capsys)
    for name, kind in SHAPES[task].items():
        if kind in (str, int, float):
            assert found[7][name] == (pytest.approx(alone[name], rel=1e-3) if kind is float else alone[name])


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


def test_lines_of_text_are_divided_into_words(
    configured: Configured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Federation(configured("tokens", training__lr=0.05, federation__rounds=4)).run(tmp_path / "run")
    (tmp_path / "lines.txt").write_text("calm wild word9 word3\n", encoding="utf-8")
    (answer,) = answers(tmp_path / "run", tmp_path / "lines.txt", capsys)
    assert answer == {"entities": [{"text": "calm wild", "type": "mood", "start": 0, "end": 2}]}


def test_clients_are_compared_by_their_answers_and_a_question_without_its_context_is_refused(
    configured: Configured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = configured("question_answering", federation__rounds=1, training__epochs=1, evaluation__per_client=True)
    result = Federation(one).run(tmp_path / "run")
    assert set(result.records[-1]["clients_accuracy"]) == {"mean", "worst_decile"}
    (tmp_path / "lines.txt").write_text("what\n", encoding="utf-8")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "lines.txt")]) == 2
    assert "give columns 'question' and 'context'" in capsys.readouterr().err
    with refused(ConfigError):
        list(trained.load_run(tmp_path / "run").predict(["what"]))
    with refused(ConfigError):
        configured("regression", evaluation__per_client=True)


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
    require_valid(tmp_path / "run")
    measured = result.summary["metrics"]
    assert measured["no_answer_exact_match"] > 0.9
    assert measured["has_answer_exact_match"] > 0.4
    found = answers(tmp_path / "run", file, capsys)
    empty = [one["answer"] == "" for one in found]
    assert sum(empty[::2]) / 20 == pytest.approx(measured["no_answer_exact_match"])
    assert [one["no_answer"] > 0.5 for one in found] == empty == [one["start"] is None for one in found]
    with refused(DataError):
        Federation(configured("question_answering", **files))


def test_prompts_and_their_targets_are_learned_and_judged(
    configured: Configured, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"word{index % 5} word9", "target": f"word{index % 5} calm"} for index in range(24)]
    file = write("rows", rows)
    files = {"data__train": str(file), "data__test": str(file)}
    config = configured("causal_lm", data__text_b="target", federation__rounds=3, training__lr=0.05, **files)
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


# The code in an exported model's README loads the model, for every task.


@torch.no_grad()
def outputs(model: nn.Module) -> torch.Tensor:
    """The model's scores for three random texts of the small vocabulary, as one vector."""
    ids = torch.randint(4, 30, (3, 7), generator=torch.Generator().manual_seed(0))
    found: Any = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), return_dict=True)
    names = [name for name in ("logits", "start_logits", "end_logits") if name in found]
    return torch.cat([found[name].flatten() for name in names])


@pytest.mark.parametrize(
    ("method", "task"),
    chosen(
        itertools.product(["fedlora", "adapter_pfeiffer"], TOYS),
        [("fedlora", "chat"), ("adapter_pfeiffer", "multi_label")],
    ),
)
def test_the_use_shown_in_the_readme_works(task: str, method: str, configured: Configured, tmp_path: Path) -> None:
    config = configured(task, federation__rounds=1, training__epochs=1, method__name=method)
    Federation(config).run(tmp_path / "run")
    done = trained.load_run(tmp_path / "run")
    want = outputs(done.model)
    folders = [done.export(tmp_path / "out")]
    if method == "fedlora":
        folders.append(done.export(tmp_path / "whole", merged=True))
    for folder in folders:
        readme = (folder / "README.md").read_text(encoding="utf-8")
        scope: dict[str, Any] = {}
        exec(readme.split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(folder)), scope)
        found = outputs(scope["model"])
        assert (found - want).abs().max() <= 1e-5 * want.abs().max()
        if method == "fedlora":
            assert f"import {tasks.build(config.data).auto}\n" in readme


def test_the_readme_of_a_regression_says_how_its_scores_become_numbers(configured: Configured, tmp_path: Path) -> None:
    federation = Federation(configured("regression", federation__rounds=1, training__epochs=1))
    result = federation.run(tmp_path / "run")
    done = trained.load_run(tmp_path / "run")
    inputs = done.tokenizer(["calm word3"], return_tensors="pt")
    want = next(done.predict(["calm word3"]))["value"]
    folders = [done.export(tmp_path / "out"), done.export(tmp_path / "whole", merged=True)]
    for folder in (*folders, federation.export(result.state, tmp_path / "direct")):
        shown = (folder / "README.md").read_text(encoding="utf-8").rpartition("a prediction is `")[2].partition("`")[0]
        assert eval(shown, {"model": done.model, "inputs": inputs}).item() == pytest.approx(want, abs=1e-5)


# Example-level privacy in every task: one pass gives the per-example gradients that a loop over single examples gives.


@pytest.mark.parametrize("task", TOYS)
def test_per_example_gradients_are_taken_in_one_pass_and_right(task: str, configured: Configured, llama: Path) -> None:
    own = {"model__name": str(llama)} if TOYS[task].decoder else {}
    few = {"federation__clients": 2, "federation__cohort": 2}
    assembly = Federation(configured(task, model__max_length=20, method__rank=2, **few, **own)).assembly
    trainable = assembly.method.plan(assembly.initial).trainable
    placed = moved_away(Placed.of(assembly.initial.tensors, trainable, assembly.objective.device))
    parts = (assembly.objective, assembly.problem.collate, placed, [assembly.problem.train[0][at] for at in range(6)])
    assert path_for(*parts) is together
    assembly.objective.eval()
    quick, slow = (path(*parts) for path in (together, one_by_one))
    assert agree(quick, slow, 1e-4)
    assert all(len(gradient) == 6 for gradient in quick.values())
    assert any(float(gradient.abs().max()) > 1e-4 for gradient in quick.values())


# Rows as token ids: of the built-in notes once per process, of a user's data at every reading, of many rows through files.


CONFIG = RunConfig.from_dict({"data": {"examples": 30}})
TASK = tasks.build(CONFIG.data)
ROWS = notes.generate(30, seed=5, split="train")


def test_the_same_notes_are_tokenised_once_and_other_settings_again() -> None:
    tokenizer = load(CONFIG.model, TASK, ROWS.label_names, 0).tokenizer
    first = tokenised(CONFIG, TASK, tokenizer, ROWS)
    again = replace(ROWS)
    assert tokenised(CONFIG, TASK, tokenizer, again) is first
    fresh = TASK.encode(tokenizer, ROWS, CONFIG.model.max_length)
    assert fresh is not first
    assert all(np.array_equal(ours, own) for ours, own in zip(first.input_ids, fresh.input_ids, strict=True))
    short = tokenised(replace(CONFIG, model=replace(CONFIG.model, max_length=8)), TASK, tokenizer, ROWS)
    assert short.lengths.max() == 8
    others = tokenised(CONFIG, TASK, tokenizer, notes.generate(30, seed=6, split="train"))
    assert not np.array_equal(others.lengths, first.lengths)
    own = RunConfig.from_dict({"data": {"train": "mine.jsonl"}})
    assert tokenised(own, TASK, tokenizer, ROWS) is not tokenised(own, TASK, tokenizer, ROWS)


def contents(made: problem.Problem) -> list[list[bytes]]:
    """The content of every example, of each client and of the test set, as a batch has it."""
    return [[fingerprint.content(own[index]) for index in range(len(own))] for own in (*made.train, made.test)]


@pytest.mark.parametrize("task", chosen(TOYS, ["question_answering"]))
def test_examples_and_digests_do_not_depend_on_where_they_are(
    task: str,
    configured: Configured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"privacy.unit": "example", "privacy.epsilon": 8.0}
    config = configured(task, **settings)
    memory = problem.configured(config)
    monkeypatch.setattr(on_disk, "LONG", 4)
    monkeypatch.setattr(problem, "WINDOW", 7)
    disk = problem.configured(config)
    for own in (*disk.train, disk.test):
        assert isinstance(own, Encoded)
        assert isinstance(own.input_ids, OnDisk)
    assert contents(disk) == contents(memory)
    assert (disk.data_digest, disk.unit_digest) == (memory.data_digest, memory.unit_digest)
    assert disk.facts == memory.facts
    assert disk.warning == memory.warning
    batch = disk.collate([disk.test[0], disk.test[3]])
    assert set(batch) == set(memory.collate([memory.test[0], memory.test[3]]))
