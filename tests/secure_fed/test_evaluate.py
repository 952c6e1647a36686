"""`secure-fed evaluate`: lm-eval's figures of a run's model, of its merged model and of its base model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from secure_fed import Federation, RunConfig
from secure_fed.activity import shown_by
from secure_fed.commands.cli import main
from secure_fed.export import lm_eval_tasks, trained
from tests.secure_fed import small_causal

CHOICES = "\n".join(
    [
        "task: toy_choice",
        "dataset_path: json",
        "dataset_kwargs: {data_files: {test: FILE}}",
        "test_split: test",
        "output_type: multiple_choice",
        'doc_to_text: "{{question}}"',
        'doc_to_choice: "{{choices}}"',
        "doc_to_target: right",
    ]
)
WRITTEN = "\n".join(
    [
        "task: toy_written",
        "dataset_path: json",
        "dataset_kwargs: {data_files: {test: FILE}}",
        "test_split: test",
        "output_type: generate_until",
        'doc_to_text: "{{question}}"',
        'doc_to_target: "{{answer}}"',
        "generation_kwargs: {max_gen_toks: 6, until: []}",
        "metric_list: [{metric: exact_match}]",
    ]
)
Row = dict[str, Any]
ROWS: list[Row] = [
    {
        "question": f"w{row} w{row + 1}" + " w9" * (row % 4),
        "choices": ["w3 w4", "w5", "w6 w7 w8"],
        "right": row % 3,
        "answer": "w1",
    }
    for row in range(7)
]
VIRTUAL, LENGTH = ("prompt_tuning", "prefix_tuning"), 4  # methods with tokens before the text


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_causal.make(tmp_path_factory.mktemp("causal"))


Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, causal: Path) -> Run:
    """Makes the run of a method and a task, once."""
    there: dict[tuple[str, str], Path] = {}

    def made(method: str = "fedlora", task: str = "causal_lm") -> Path:
        if (method, task) in there:
            return there[method, task]
        folder = tmp_path_factory.mktemp(method)
        turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
        row = {"messages": turns} if task == "chat" else {"text": "w1 w2 w3 w5 w4"}
        (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * 16)
        tables: dict[str, dict[str, Any]] = {
            "model": {"name": str(causal), "max_length": 16},
            "data": {"train": str(folder / "train.jsonl"), "task": task},
            "federation": {"clients": 2, "rounds": 1},
            "method": {"name": method, **({"prompt_length": LENGTH} if method in VIRTUAL else {})},
            "training": {"lr": 0.3, "steps": 3},
        }
        if task == "chat":
            tables["data"]["chat_template"] = small_causal.TEMPLATE
        Federation(RunConfig.from_dict(tables)).run(folder / "run")
        there[method, task] = folder / "run"
        return folder / "run"

    return made


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("choice", CHOICES), ("written", WRITTEN)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "rows.jsonl")) + "\n")
    return folder


@pytest.fixture(autouse=True)
def users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache of data sets, which the rows must not reach."""
    folder = tmp_path / "users-cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    yield folder
    assert not [path for path in folder.rglob("*") if path.is_file()]


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The object that the command prints with --json."""
    capsys.readouterr()
    assert main(["evaluate", *map(str, arguments), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    return found


def value(found: dict[str, Any], metric: str, name: str = "value") -> float:
    (row,) = (row for row in found["figures"] if row["metric"] == metric)
    return float(row[name])


@torch.no_grad()
def share_right(model: Any, folder: Path, rows: Sequence[Row] = ROWS) -> float:
    """The share of rows whose right choice has the highest log-likelihood behind the question, one at a time."""
    tokenizer, right = AutoTokenizer.from_pretrained(folder), 0
    for row in rows:
        scores = []
        before = tokenizer(row["question"])["input_ids"]
        for choice in row["choices"]:
            after = tokenizer(choice)["input_ids"]
            logits = model.eval()(input_ids=torch.tensor([before + after])).logits[0].log_softmax(-1)
            scores.append(sum(float(logits[len(before) + at - 1, token]) for at, token in enumerate(after)))
        right += max(range(3), key=scores.__getitem__) == row["right"]
    return right / len(rows)


@torch.no_grad()
def written(model: Any, ids: list[int], count: int, stops: Sequence[int]) -> list[int]:
    """The most likely tokens, without a cache and without padding."""
    found: list[int] = []
    while len(found) < count:
        token = int(model.eval()(input_ids=torch.tensor([ids + found])).logits[0, -1].argmax())
        if token in stops:
            break
        found.append(token)
    return found


@pytest.mark.parametrize("method", ["fedlora", "federa", *VIRTUAL])
def test_choices_are_those_of_a_loop_over_single_texts(
    method: str, run: Run, causal: Path, own_tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(method)
    found = evaluated(capsys, out, "--tasks", "toy_choice", "--include-path", own_tasks, "--base", "--batch-size", 4)
    assert value(found, "acc") == pytest.approx(share_right(trained.load_run(out).model, causal))
    assert value(found, "acc", "base") == pytest.approx(share_right(GPT2LMHeadModel.from_pretrained(causal), causal))
    assert value(found, "acc", "n") == len(ROWS)
    assert value(found, "acc", "stderr") > 0 or value(found, "acc") in (0, 1)
    assert (found["model"], found["chat_template"], found["shortened"]) == ("adapter", False, 0)


@pytest.mark.parametrize("method", ["fedlora", *VIRTUAL])
def test_generated_texts_are_those_of_a_loop_without_a_cache(
    method: str, run: Run, causal: Path, own_tasks: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done = trained.load_run(run(method))
    ids = [done.tokenizer(row["question"])["input_ids"] for row in ROWS]
    answers = [done.tokenizer.decode(written(done.model, own, 6, [1]), skip_special_tokens=True) for own in ids]
    rows = [
        row | {"answer": answer if at % 2 else "w29"}
        for at, (row, answer) in enumerate(zip(ROWS, answers, strict=True))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "written.yaml").write_text(WRITTEN.replace("FILE", str(tmp_path / "rows.jsonl")))
    found = evaluated(capsys, run(method), "--tasks", "toy_written", "--include-path", tmp_path)
    assert value(found, "exact_match") == pytest.approx(3 / 7)


def test_merged_and_limited_figures(
    run: Run, causal: Path, own_tasks: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    both = ("--tasks", "toy_choice", "toy_written", "--include-path", own_tasks, "--limit", 3)
    plain, merged = (
        evaluated(capsys, run(), *both, *more) for more in ((), ("--merged", "--out", tmp_path / "f.json"))
    )
    assert merged["model"] == "merged"
    assert [row["value"] for row in merged["figures"]] == [row["value"] for row in plain["figures"]]
    assert [row["n"] for row in merged["figures"]] == [3] * len(merged["figures"])
    assert value(plain, "acc") == pytest.approx(share_right(trained.load_run(run()).model, causal, ROWS[:3]))
    assert json.loads((tmp_path / "f.json").read_text()) == merged


def test_a_chat_is_asked_by_its_template_and_stops_at_the_end_of_its_turn(
    run: Run, own_tasks: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done = trained.load_run(run(task="chat"))
    over = done.tokenizer.convert_tokens_to_ids("<|over|>")
    assert done.stops == (over,)
    asked = [
        done.tokenizer.apply_chat_template([{"role": "user", "content": row["question"]}], add_generation_prompt=True)
        for row in ROWS
    ]
    own = [written(done.model, list(ids["input_ids"]), 6, [1, over]) for ids in asked]
    assert any(len(tokens) < 6 for tokens in own)
    rows = [row | {"answer": done.tokenizer.decode(ids)} for row, ids in zip(ROWS, own, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "written.yaml").write_text(WRITTEN.replace("FILE", str(tmp_path / "rows.jsonl")))
    arguments = (run(task="chat"), "--tasks", "toy_written", "--include-path", tmp_path)
    found = evaluated(capsys, *arguments)
    assert (found["chat_template"], value(found, "exact_match")) == (True, 1.0)
    without = evaluated(capsys, *arguments, "--no-apply-chat-template")
    assert (without["chat_template"], value(without, "exact_match") < 1) == (False, True)


def test_prompts_that_lose_their_beginning_are_counted(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [row | {"question": row["question"] + " w9" * (40 if at < 2 else 0)} for at, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text, shortened in (("toy_written", WRITTEN, 2), ("toy_choice", CHOICES, 6)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("FILE", str(tmp_path / "rows.jsonl")))
        found = evaluated(capsys, run("prompt_tuning"), "--tasks", name, "--include-path", tmp_path)
        assert (found["shortened"], found["positions"]) == (shortened, 32 - LENGTH)


def test_a_person_reads_a_table_and_what_no_guarantee_covers(
    run: Run, own_tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    arguments = ["evaluate", str(run()), "--tasks", "toy_choice", "--include-path", str(own_tasks), "--base"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("toy_choice", "acc_norm", "stderr", "base", "guarantee"))


Refusal = tuple[list[str], str]
REFUSED: list[Refusal] = [
    (["--tasks", "toy_choise"], "did you mean 'toy_choice'"),
    (["--tasks", "toy_choice", "--limit", "0"], "at least 1"),
    (["--tasks", "toy_choice", "--batch-size", "0"], "at least 1"),
    (["--tasks", "toy_choice", "--num-fewshot", "-1"], "at least 0"),
    (["--tasks", "toy_choice", "--out", "figures.csv"], ".json"),
    (["--tasks", "toy_choice", "--out", "nowhere/figures.json"], "no folder"),
    (["--tasks", "toy_fixed", "--num-fewshot", "2"], "no effect"),
    (["--tasks", "toy_absent"], "cannot read the data"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(
    arguments: list[str],
    said: str,
    run: Run,
    own_tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unexpected(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    rows = str(own_tasks / "rows.jsonl")
    (tmp_path / "fixed.yaml").write_text(
        CHOICES.replace("FILE", rows).replace("toy_choice", "toy_fixed") + "\nnum_fewshot: 0\n"
    )
    (tmp_path / "absent.yaml").write_text(CHOICES.replace("FILE", "nowhere.jsonl").replace("toy_choice", "toy_absent"))
    (tmp_path / "choice.yaml").write_text(CHOICES.replace("FILE", rows))
    monkeypatch.setattr(trained, "load_run", unexpected)
    _only_own_tasks(monkeypatch)
    capsys.readouterr()
    assert main(["evaluate", str(run()), *arguments, "--include-path", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


def _only_own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own task files are left out: to read all 15,000 takes half a minute."""
    from lm_eval import tasks

    whole = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", lambda **named: whole(**named | {"include_defaults": False}))


def test_a_task_file_that_fails_later_is_named(run: Run, own_tasks: Path, tmp_path: Path, capsys: Any) -> None:
    wrong = CHOICES.replace("FILE", str(own_tasks / "rows.jsonl")).replace("{{question}}", "{{quest.ion}}")
    (tmp_path / "wrong.yaml").write_text(wrong)
    capsys.readouterr()
    assert main(["evaluate", str(run()), "--tasks", "toy_choice", "--include-path", str(tmp_path)]) == 2
    assert "toy_choice" in capsys.readouterr().err


def test_what_is_going_on_is_said(run: Run, own_tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str | None] = []
    with shown_by(lambda what, began: said.append(what)):
        evaluated(capsys, run(), "--tasks", "toy_choice", "toy_written", "--include-path", own_tasks, "--batch-size", 4)
    parts = {part for what in said for part in (what or "").split(", ")}
    assert {"scoring answers in batches: 2 of 6", "generating answers in batches: 2 of 2"} <= parts


def test_runs_without_a_language_model_or_with_one_of_a_program_are_refused(
    small_model: Path, small_data: Path, causal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {"model": {"name": str(small_model)}, "data": {"train": str(small_data / "train.jsonl")}}
    Federation(RunConfig.from_dict(tables | {"federation": {"clients": 2, "rounds": 1}})).run(tmp_path / "labels")
    model = GPT2LMHeadModel.from_pretrained(causal)
    examples = [{"input_ids": torch.tensor([1, 2, 3]), "labels": 1}] * 4
    config = RunConfig.from_dict({"federation": {"rounds": 1}})
    Federation(
        config,
        model=model,
        train=[examples, examples],
        test=examples,
        metrics=lambda one, batches: {"loss": 1.0},
        loss=lambda one, batch: one(input_ids=batch["input_ids"]).logits.mean((1, 2)),
    ).run(tmp_path / "own")
    for name, said in (("labels", "language model"), ("own", "given in Python")):
        capsys.readouterr()
        assert main(["evaluate", str(tmp_path / name), "--tasks", "toy_choice"]) == 2
        assert said in capsys.readouterr().err


def test_the_missing_extra_is_named(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval_tasks, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", str(run()), "--tasks", "toy_choice"]) == 2
    assert "pip install 'secure-fed[evaluate]'" in capsys.readouterr().err


def test_help_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 40


def test_the_tasks_of_a_group_have_a_figure_each(
    run: Run, own_tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_own_tasks(monkeypatch)
    rows = str(own_tasks / "rows.jsonl")
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text(CHOICES.replace("FILE", rows).replace("toy_choice", name))
    (tmp_path / "both.yaml").write_text(
        "group: both\ntask: [first, second]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    found = evaluated(capsys, run(), "--tasks", "both", "--include-path", tmp_path, "--base")
    figures = {(row["task"], row["metric"]): row for row in found["figures"]}
    assert {task for task, _ in figures} == {"both", "first", "second"}
    assert figures["both", "acc"]["n"] == 2 * len(ROWS)
    assert math.isclose(figures["both", "acc"]["value"], figures["first", "acc"]["value"])
