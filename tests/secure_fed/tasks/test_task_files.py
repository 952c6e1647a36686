"""Rows of every task from files: their columns, the held-out rows, their clients, and their division among clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from secure_fed import RunConfig
from secure_fed.config import DataConfig, ModelConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import sources
from secure_fed.learning.models import loading
from secure_fed.learning.problem import configured
from secure_fed.learning.tasks import TASKS, build
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed.tasks.conftest import Write
from tests.secure_fed.tasks.toy_tasks import TOYS


def load(task: str, **settings: Any) -> sources.Source:
    data = DataConfig(task=task, **{name: str(value) for name, value in settings.items()})
    return sources.load(data, tasks.build(data), seed=0)


@pytest.mark.parametrize("task", TOYS)
def test_a_fifth_is_held_out_and_clients_are_named_by_a_column(task: str, write: Write) -> None:
    rows = [{**row, "site": f"s{index % 3}"} for index, row in enumerate(TOYS[task].rows(30))]
    source = load(task, train=write("rows", rows), client="site")
    assert (len(source.train), len(source.test)) == (24, 6)
    assert set(source.train.client or ()) == {"s0", "s1", "s2"}
    again = load(task, train=write("rows", rows), client="site")
    assert (again.train, again.test) == (source.train, source.test)


def test_parquet_and_csv_hold_what_json_does(tmp_path: Path, write: Write) -> None:
    rows = TOYS["tokens"].rows(12)
    as_json = load("tokens", train=write("rows", rows), test=write("rows", rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines = ["tokens,tags", *(f"{' '.join(row['tokens'])},{' '.join(row['tags'])}" for row in rows)]
    (tmp_path / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    for name in ("rows.parquet", "rows.csv"):
        assert load("tokens", train=tmp_path / name, test=tmp_path / name) == as_json


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_numbers_of_tags_are_named_by_the_data_set(kind: str, tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("string")),
            "tags": datasets.List(datasets.ClassLabel(names=["O", "B-x", "I-x"])),
        }
    )
    rows = {"tokens": [["a", "b", "c"]] * 3, "tags": [[0, 1, 2], [1, 0, 0], [0, 0, 0]]}
    made = datasets.Dataset.from_dict(rows, features)
    if kind == "saved":
        datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "saved")
        source = load("tokens", name=tmp_path / "saved")
    else:
        made.to_parquet(tmp_path / "x.parquet")
        source = load("tokens", train=tmp_path / "x.parquet", test=tmp_path / "x.parquet")
    assert source.train.label_names == ("O", "B-x", "I-x")
    assert source.test.label == ((0, 1, 2), (1, 0, 0), (0, 0, 0))


@pytest.mark.parametrize(
    ("task", "column", "setting"),
    [
        ("tokens", "tags", "data.label"),
        ("tokens", "tokens", "data.text"),
        ("question_answering", "context", "data.text_b"),
        ("question_answering", "answers", "data.label"),
        ("multiple_choice", "choices", "data.text_b"),
        ("causal_lm", "text", "data.text"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_its_setting(
    task: str, column: str, setting: str, write: Write
) -> None:
    rows = [{("other" if name == column else name): cell for name, cell in row.items()} for row in TOYS[task].rows(4)]
    with refused(DataError):
        load(task, train=write("rows", rows))
    found = load(task, train=write("rows", rows), **{setting.partition(".")[2]: "other"})
    assert len(found.train) + len(found.test) == 4


def test_rows_that_have_to_have_a_text(write: Write) -> None:
    rows = [{"tokens": [], "tags": []}] * 3
    with refused(DataError):
        load("tokens", train=write("rows", rows))
    rows = [{"text": f"question {row}", "answer": f"answer {row}"} for row in range(6)]
    assert load("causal_lm", train=write("prompts", [*rows, {"text": "", "answer": "free"}]), text_b="answer")
    with refused(DataError, "data.text_b"):
        load("causal_lm", train=write("targets", [*rows, {"text": "question", "answer": " "}]), text_b="answer")
    task, path = build(DataConfig()), write("rows", [{"text": " ", "label": "a"}, {"text": "b", "label": "b"}])
    with refused(DataError, "data.text"):
        sources.of_one_party(task, [path], "data.train")
    assert sources.of_one_party(task, [path], "data.test")


@every("task", [task for task in TASKS if task != "classification"])
def test_a_task_of_your_own_needs_data_of_your_own(task: str) -> None:
    with refused(ConfigError, "data.task"):
        RunConfig.load(None, [f"data.task={task}"])


@every(
    "setting",
    ["text_b=x", "stride=8", "label_scale=2.0", "likelihood=sum", "learn_prompt=true", 'class_priors=["a=1"]'],
)
def test_a_setting_of_another_task_is_refused(setting: str) -> None:
    with refused(ConfigError, f"data.{setting.partition('=')[0]}"):
        RunConfig.load(None, ["data.task=tokens", "data.train=x.jsonl", f"data.{setting}"])


def divided(task: str, alpha: float, model: Path, write: Write) -> Any:
    toy = TOYS[task]
    data = {"task": task, "train": str(write("rows", toy.rows(120))), "partition": "dirichlet", "alpha": alpha}
    config = {
        "model": {"name": str(model), "max_length": 20},
        "data": data | toy.settings,
        "federation": {"clients": 4},
    }
    return configured(RunConfig.from_dict(config))


@pytest.mark.parametrize(
    "task", chosen(["tokens", "multi_label", "regression", "question_answering"], ["tokens", "question_answering"])
)
def test_clients_differ_by_what_a_task_calls_a_class(task: str, small_model: Path, write: Write) -> None:
    skewed, alike = (divided(task, alpha, small_model, write).facts["partition"] for alpha in (0.1, 10_000.0))
    assert skewed["jensen_shannon"] > alike["jensen_shannon"] + 0.1


@pytest.mark.parametrize(
    ("task", "outputs", "head"),
    [
        ("tokens", 3, ("classifier.weight", "classifier.bias")),
        ("question_answering", 2, ("qa_outputs.weight", "qa_outputs.bias")),
        (
            "regression",
            1,
            ("bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"),
        ),
    ],
)
def test_what_the_task_puts_on_top_is_head(task: str, outputs: int, head: tuple[str, ...], small_model: Path) -> None:
    names = ("O", "B-x", "I-x") if task == "tokens" else ()
    loaded = loading.load(ModelConfig(name=str(small_model)), build(DataConfig(task=task)), names, 0)
    assert loaded.head == head
    assert loaded.model.get_parameter(head[-1]).shape == (outputs,)


def test_a_question_counts_as_one_unit_however_many_windows_it_takes(small_model: Path, write: Write) -> None:
    words = " ".join(f"word{index % 40}" for index in range(200))
    answers = [{"text": "wild", "answer_start": len(words) + 1}]
    rows = [{"question": "calm", "context": f"{words} wild {index}", "answers": answers} for index in range(12)]
    file = str(write("rows", rows))
    config = {
        "model": {"name": str(small_model), "max_length": 24},
        "data": {"task": "question_answering", "train": file, "test": file, "stride": 4},
        "federation": {"clients": 3},
        "privacy": {"unit": "example", "noise_multiplier": 1.0},
    }
    parts = configured(RunConfig.from_dict(config))
    assert sum(parts.units) == 12
    item = parts.train[0][0]
    assert len(item["parts"]) > 10
    assert np.ndim(item["input_ids"]) == 1
