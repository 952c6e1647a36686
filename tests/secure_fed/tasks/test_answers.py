"""Answers that a run writes to test rows: their metric in records, reports and comparisons, and what is refused."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed import Federation, RunConfig
from secure_fed.commands.cli import main
from secure_fed.commands.comparison import compare
from secure_fed.commands.comparison.tables import numbers
from secure_fed.errors import UsageError
from secure_fed.export.trained import load_run
from secure_fed.learning.evaluation import rouge_l
from secure_fed.learning.problem import configured
from secure_fed.report.page import write_report
from secure_fed.report.progress import ConsoleProgress
from secure_fed.runs.evaluation import evaluated
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed.tasks.conftest import Write, lines_of, require_valid, settings_of

ROWS = [  # no two alike: rows are held out by their content
    {"text": f"word{index} word{index % 5}", "target": f"word{index % 5} calm"} for index in range(24)
]
Settings = Callable[..., RunConfig]


@pytest.fixture
def settings(write: Write, gpt2: Path) -> Settings:
    """A function that returns the configuration of a short run on prompts and targets, which writes answers to test rows."""
    file = str(write("rows", ROWS))
    usual = {
        **{"model.name": str(gpt2), "model.max_length": 16, "method.name": "fedlora"},
        **{"data.train": file, "data.test": file, "data.task": "causal_lm", "data.text_b": "target"},
        **{"federation.clients": 4, "federation.cohort": 4, "federation.rounds": 1},
        **{"training.lr": 0.05, "training.batch_size": 4, "training.epochs": 1},
        **{"evaluation.generate": 7, "evaluation.max_new_tokens": 4, "data.metric": "rouge_l"},
    }
    return partial(settings_of, usual)


@pytest.mark.usefixtures("never_drawn")
def test_a_round_measures_the_answers_that_predict_writes(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Federation(settings(federation__rounds=2, training__epochs=2)).run(tmp_path / "run")
    kept = [ROWS[index * 24 // 7] for index in range(7)]
    written = load_run(tmp_path / "run").generate([row["text"] for row in kept], 4)
    expected = sum(rouge_l(text, row["target"]) for text, row in zip(written, kept, strict=True)) / 7
    assert 0 < expected == pytest.approx(result.records[-1]["rouge_l"])
    assert all("rouge_l" in record for record in result.records)
    assert result.summary["metrics"]["rouge_l"] == result.records[-1]["rouge_l"]
    require_valid(tmp_path / "run")
    page = re.sub(r"\s+", " ", write_report(tmp_path / "run").read_text(encoding="utf-8"))
    assert page.count("ROUGE-L") >= 3  # the sentence, the key number, the table of rounds
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "rows.jsonl"), "--max-new-tokens", "4"]) == 0
    lines = lines_of(capsys.readouterr().out)
    assert [lines[index * 24 // 7]["continuation"] for index in range(7)] == written


def test_a_comparison_and_the_progress_show_the_metric(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secure_fed.commands.comparison.tables.drawn", lambda rows: "<svg></svg>")
    (row,) = compare({"one": settings(data__metric="f1")}, [1], tmp_path / "compared")
    assert "f1_mean" in numbers(row)
    with ConsoleProgress(2, task="causal_lm", of_answers="rouge_l") as progress:
        progress.on_round_end({"round": 1, "rouge_l": 0.25, "rejected": []}, type("State", (), {"round": 1})())
    assert "ROUGE-L 0.25" in capsys.readouterr().err


def test_without_the_setting_nothing_is_written(settings: Settings) -> None:
    federation = Federation(settings(evaluation__generate=0, evaluation__max_new_tokens=64, data__metric=""))
    assert federation.assembly.problem.asked is None
    asked = configured(settings(evaluation__generate=1000)).asked
    assert asked is not None
    assert len(asked.rows) == 24, "more rows than there are mean all of them"
    assert set(evaluated(federation.assembly, federation.assembly.initial)) == {"accuracy", "perplexity", "loss"}


def test_a_model_that_diverged_has_no_figure(settings: Settings) -> None:
    federation = Federation(settings())
    assembly = federation.assembly
    with torch.no_grad():
        assembly.problem.model.get_parameter("transformer.ln_f.weight").fill_(math.nan)
    assert math.isnan(evaluated(assembly, assembly.initial)["rouge_l"])


@pytest.mark.usefixtures("never_drawn")
@pytest.mark.parametrize("declared", chosen([True, False], [False]))
def test_a_private_run_publishes_the_metric_as_it_publishes_accuracy(
    declared: bool, settings: Settings, tmp_path: Path
) -> None:
    """Of rows held out of private ones both are in result.json, beside their source, and in no other public file."""
    config = settings(
        data__test=str(tmp_path / "rows.jsonl") if declared else "",
        privacy__unit="client",
        privacy__noise_multiplier=1.0,
        federation__clients=6,
        federation__cohort=6,
    )
    Federation(config).run(tmp_path / "run")
    export = tmp_path / "export"
    load_run(tmp_path / "run").export(export)
    write_report(tmp_path / "run")
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert ("rouge_l" in json.loads(line)) is ("perplexity" in json.loads(line)) is declared
    metrics = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["metrics"]
    assert {"rouge_l", "perplexity"} <= set(metrics)
    for file in (tmp_path / "run" / "report.html", export / "README.md"):
        text = re.sub(r"\s+", " ", file.read_text(encoding="utf-8"))
        assert ("ROUGE-L on the test set" in text or "have ROUGE-L" in text) is declared
    kept = [path for path in (tmp_path / "run" / "private").rglob("*.jsonl") if "rouge_l" in path.read_text("utf-8")]
    assert bool(kept) is not declared


@every(
    ("changed", "setting"),
    [
        ({"data__task": "classification", "data__text_b": ""}, "evaluation.generate"),
        ({"data__text_b": ""}, "evaluation.generate"),
        ({"data__metric": ""}, "data.metric"),
        ({"evaluation__generate": 0, "evaluation__max_new_tokens": 64}, "data.metric"),
        ({"evaluation__generate": 0, "data__metric": ""}, "evaluation.max_new_tokens"),
        ({"evaluation__generate": -1}, "evaluation.generate"),
        ({"data__metric": "bleu"}, "data.metric"),
        ({"data__answer_pattern": "(.*)"}, "data.answer_pattern"),
        ({"data__metric": "exact_match", "data__answer_pattern": "(("}, "data.answer_pattern"),
        ({"data__metric": "exact_match", "data__answer_pattern": "a{99999999999}"}, "data.answer_pattern"),
        ({"evaluation__max_new_tokens": 128}, "evaluation.max_new_tokens"),
        ({"evaluation__max_new_tokens": 110, "method__name": "prompt_tuning"}, "evaluation.max_new_tokens"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], setting: str, settings: Settings) -> None:
    with refused(UsageError, setting):
        Federation(settings(**changed))


def test_a_pattern_is_refused_before_a_model_is_loaded(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("secure_fed.learning.problem.load", loaded)
    with refused(UsageError, "data.answer_pattern"):
        configured(settings(data__metric="exact_match", data__answer_pattern="#### (.*)"))
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_prompts_and_targets_of_a_pattern(settings: Settings, write: Write) -> None:
    """The part that the pattern picks out of the target is compared, and targets without it are never right."""
    rows = [{"text": "word1", "target": "word2 calm"}, {"text": "word1", "target": "word3"}]
    file = str(write("few", rows))
    config = settings(
        data__metric="exact_match", data__answer_pattern="calm|wild", data__test=file, evaluation__generate=2
    )
    assembly = Federation(config).assembly
    assert 0 <= evaluated(assembly, assembly.initial)["exact_match"] <= 0.5


def test_predict_continues_the_end_of_a_long_text_and_hides_special_tokens(settings: Settings, tmp_path: Path) -> None:
    """The special token that begins a text stays, the one that ends it is left out, and an empty text is that which begins."""
    Federation(settings()).run(tmp_path / "run")
    run = load_run(tmp_path / "run")
    run.model.eval()
    long = " ".join(f"word{index}" for index in range(30))
    prompts = [long, "", "calm word1"]
    expected = []
    for prompt in prompts:
        ids = run.tokenizer(prompt)["input_ids"][:-1]
        ids = ids if len(ids) <= 16 else [ids[0], *ids[-15:]]
        for _ in range(5):
            with torch.no_grad():
                ids.append(int(run.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(run.tokenizer.decode(ids[-5:], skip_special_tokens=True))
    assert run.generate(prompts, 5) == expected
    first, again, other = (run.generate(prompts, 8, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    run.tokenizer.eos_token = run.tokenizer.decode([run.tokenizer(expected[0])["input_ids"][1]])
    assert run.generate(prompts[:1], 5) == [""]
    with refused(UsageError, "--max-new-tokens"):
        run.generate(prompts, 128)
    with refused(UsageError, "data.task"):
        replace(run, config=RunConfig()).generate(prompts)
