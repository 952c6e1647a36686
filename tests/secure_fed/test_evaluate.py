"""`secure-fed evaluate`: lm-eval's figures of a run's model, of its merged model and of its base model; and served exports.

Exported chat runs keep the template and stop at the end of a turn, and folders have the documented formats of vLLM and
llama.cpp: docs/serving.md relies on this.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2LMHeadModel

from secure_fed import Federation, RunConfig
from secure_fed.activity import shown_by
from secure_fed.export import lm_eval_tasks, trained
from tests.cells import chosen
from tests.secure_fed import small_causal
from tests.secure_fed.conftest import Ran, Refuses

CHOICES = """
task: toy_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: right
"""
WRITTEN = """
task: toy_written
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 6, until: []}
metric_list: [{metric: exact_match}]
"""
Row = dict[str, Any]
CHOICE = {"choices": ["w3 w4", "w5", "w6 w7 w8"], "answer": "w1"}
ROWS: list[Row] = [
    {"question": f"w{row} w{row + 1}" + " w9" * (row % 4), "right": row % 3, **CHOICE} for row in range(7)
]
VIRTUAL, LENGTH = ("prompt_tuning", "prefix_tuning"), 4  # methods with tokens before the text


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_causal.make(tmp_path_factory.mktemp("causal"))


Run = Callable[..., Path]
Evaluated = Callable[..., dict[str, Any]]


def trained_run(
    folder: Path, model: Path, row: Row, method: Row, training: dict[str, Any], data: dict[str, Any]
) -> Path:
    """The run of one round with two clients on sixteen rows like this one."""
    (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * 16)
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "max_length": 24},
        "data": {"train": str(folder / "train.jsonl"), **data},
        "federation": {"clients": 2, "rounds": 1},
        "method": method,
        "training": training,
    }
    Federation(RunConfig.from_dict(tables)).run(folder / "run")
    return folder / "run"


def chat_run(folder: Path, model: Path, template: str, method: Row, training: dict[str, Any]) -> Path:
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    data = {"task": "chat", "chat_template": template}
    return trained_run(folder, model, {"messages": turns}, method, training, data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, causal: Path) -> Run:
    """Makes the run of a method and a task, once."""

    @cache
    def made(method: str = "fedlora", task: str = "causal_lm") -> Path:
        folder = tmp_path_factory.mktemp(method)
        own = {"name": method, **({"prompt_length": LENGTH} if method in VIRTUAL else {})}
        if task == "chat":
            return chat_run(folder, causal, small_causal.TEMPLATE, own, {"lr": 0.3, "steps": 3})
        return trained_run(folder, causal, {"text": "w1 w2 w3 w5 w4"}, own, {"lr": 0.3, "steps": 3}, {"task": task})

    return made


def write(folder: Path, rows: Sequence[Row], *texts: str) -> Path:
    """Writes the tasks of these descriptions, with these rows, into the folder."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, text in enumerate(texts):
        (folder / f"{number}.yaml").write_text(text.replace("FILE", str(folder / "rows.jsonl")))
    return folder


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tasks"), ROWS, CHOICES, WRITTEN)


@pytest.fixture(autouse=True)
def users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache of data sets, which the rows must not reach."""
    folder = tmp_path / "users-cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    yield folder
    assert not [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def evaluated(ran: Ran) -> Evaluated:
    """The object that the command prints with --json."""

    def figures(*arguments: object) -> dict[str, Any]:
        status, out, error = ran("evaluate", *arguments, "--json")
        assert (status, error) == (0, "")
        return dict(json.loads(out))

    return figures


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


@pytest.mark.parametrize("method", chosen(["fedlora", "federa", *VIRTUAL], ["prefix_tuning"]))
def test_choices_are_those_of_a_loop_over_single_texts(
    method: str, run: Run, causal: Path, own_tasks: Path, evaluated: Evaluated
) -> None:
    out = run(method)
    found = evaluated(out, "--tasks", "toy_choice", "--include-path", own_tasks, "--base", "--batch-size", 4)
    assert value(found, "acc") == pytest.approx(share_right(trained.load_run(out).model, causal))
    assert value(found, "acc", "base") == pytest.approx(share_right(GPT2LMHeadModel.from_pretrained(causal), causal))
    assert value(found, "acc", "n") == len(ROWS)
    assert value(found, "acc", "stderr") > 0 or value(found, "acc") in (0, 1)
    assert (found["model"], found["chat_template"], found["shortened"]) == ("adapter", False, 0)


@pytest.mark.parametrize("method", chosen(["fedlora", *VIRTUAL], ["prompt_tuning"]))
def test_generated_texts_are_those_of_a_loop_without_a_cache(
    method: str, run: Run, causal: Path, own_tasks: Path, evaluated: Evaluated, tmp_path: Path
) -> None:
    done = trained.load_run(run(method))
    ids = [done.tokenizer(row["question"])["input_ids"] for row in ROWS]
    answers = [done.tokenizer.decode(written(done.model, own, 6, [1]), skip_special_tokens=True) for own in ids]
    rows = [
        row | {"answer": answer if at % 2 else "w29"}
        for at, (row, answer) in enumerate(zip(ROWS, answers, strict=True))
    ]
    write(tmp_path, rows, WRITTEN)
    found = evaluated(run(method), "--tasks", "toy_written", "--include-path", tmp_path)
    assert value(found, "exact_match") == pytest.approx(3 / 7)


def test_merged_and_limited_figures(
    run: Run, causal: Path, own_tasks: Path, evaluated: Evaluated, tmp_path: Path
) -> None:
    both = ("--tasks", "toy_choice", "toy_written", "--include-path", own_tasks, "--limit", 3)
    plain, merged = (evaluated(run(), *both, *more) for more in ((), ("--merged", "--out", tmp_path / "f.json")))
    assert merged["model"] == "merged"
    assert [row["value"] for row in merged["figures"]] == [row["value"] for row in plain["figures"]]
    assert [row["n"] for row in merged["figures"]] == [3] * len(merged["figures"])
    assert value(plain, "acc") == pytest.approx(share_right(trained.load_run(run()).model, causal, ROWS[:3]))
    assert json.loads((tmp_path / "f.json").read_text()) == merged


def test_a_chat_is_asked_by_its_template_and_stops_at_the_end_of_its_turn(
    run: Run, own_tasks: Path, evaluated: Evaluated, tmp_path: Path
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
    write(tmp_path, rows, WRITTEN)
    arguments = (run(task="chat"), "--tasks", "toy_written", "--include-path", tmp_path)
    found = evaluated(*arguments)
    assert (found["chat_template"], value(found, "exact_match")) == (True, 1.0)
    without = evaluated(*arguments, "--no-apply-chat-template")
    assert (without["chat_template"], value(without, "exact_match") < 1) == (False, True)


def test_prompts_that_lose_their_beginning_are_counted(run: Run, evaluated: Evaluated, tmp_path: Path) -> None:
    rows = [row | {"question": row["question"] + " w9" * (40 if at < 2 else 0)} for at, row in enumerate(ROWS)]
    write(tmp_path, rows, WRITTEN, CHOICES)
    for name, shortened in (("toy_written", 2), ("toy_choice", 6)):
        found = evaluated(run("prompt_tuning"), "--tasks", name, "--include-path", tmp_path)
        assert (found["shortened"], found["positions"]) == (shortened, 32 - LENGTH)


def test_a_person_reads_a_table_what_no_guarantee_covers_and_what_is_going_on(
    run: Run, own_tasks: Path, ran: Ran
) -> None:
    said: list[str | None] = []
    with shown_by(lambda what, began: said.append(what)):
        status, printed, _ = ran(
            *("evaluate", run(), "--tasks", "toy_choice", "toy_written"),
            *("--include-path", own_tasks, "--batch-size", 4),
        )
    assert status == 0
    assert all(word in printed for word in ("toy_choice", "acc_norm", "stderr", "guarantee"))
    parts = {part for what in said for part in (what or "").split(", ")}
    assert {"scoring answers in batches: 2 of 6", "generating answers in batches: 2 of 2"} <= parts


REFUSED = """
toy_choise
toy_choice --limit 0
toy_choice --batch-size 0
toy_choice --num-fewshot -1
toy_choice --out figures.csv
toy_choice --out nowhere/figures.json
toy_fixed --num-fewshot 2
toy_absent
"""


def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(
    run: Run, tmp_path: Path, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = CHOICES.replace("toy_choice", "toy_fixed") + "num_fewshot: 0"
    absent = CHOICES.replace("FILE", "nowhere.jsonl").replace("toy_choice", "toy_absent")
    write(tmp_path, ROWS, CHOICES, fixed, absent)
    monkeypatch.setattr(trained, "load_run", lambda *_, **__: pytest.fail("the model was loaded"))
    _only_own_tasks(monkeypatch)
    for arguments in REFUSED.strip().splitlines():
        refuses("evaluate", run(), "--tasks", *arguments.split(), "--include-path", tmp_path, hide=r"\(.*?\)")


def _only_own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own task files are left out: to read all 15,000 takes half a minute."""
    from lm_eval import tasks

    whole = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", lambda **named: whole(**named | {"include_defaults": False}))


def test_a_task_file_that_fails_later_is_named(run: Run, tmp_path: Path, refuses: Refuses) -> None:
    write(tmp_path, ROWS, CHOICES.replace("{{question}}", "{{quest.ion}}"))
    refuses("evaluate", run(), "--tasks", "toy_choice", "--include-path", tmp_path, hide=r"\(.*?\)")


def test_a_run_without_a_language_model_is_refused(
    small_model: Path, small_data: Path, tmp_path: Path, refuses: Refuses
) -> None:
    tables = {"model": {"name": str(small_model)}, "data": {"train": str(small_data / "train.jsonl")}}
    Federation(RunConfig.from_dict(tables | {"federation": {"clients": 2, "rounds": 1}})).run(tmp_path / "labels")
    refuses("evaluate", tmp_path / "labels", "--tasks", "toy_choice")


def test_the_missing_extra_is_named(run: Run, refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval_tasks, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refuses("evaluate", run(), "--tasks", "toy_choice")


def test_the_tasks_of_a_group_have_a_figure_each(
    run: Run, own_tasks: Path, tmp_path: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_own_tasks(monkeypatch)
    both = "group: both\ntask: [first, second]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    write(tmp_path, ROWS, both, *(CHOICES.replace("toy_choice", name) for name in ("first", "second")))
    found = evaluated(run(), "--tasks", "both", "--include-path", tmp_path, "--base")
    figures = {(row["task"], row["metric"]): row for row in found["figures"]}
    assert {task for task, _ in figures} == {"both", "first", "second"}
    assert figures["both", "acc"]["n"] == 2 * len(ROWS)
    assert math.isclose(figures["both", "acc"]["value"], figures["first", "acc"]["value"])


OTHER = small_causal.TEMPLATE.replace("<|over|>", "<eos>")  # with the tokenizer's own end token
TEMPLATES = {  # of the base model's tokenizer; data.chat_template; the token that ends a turn
    "own": (small_causal.TEMPLATE, "", "<|over|>"),
    "given": (OTHER, small_causal.TEMPLATE, "<|over|>"),
    "given, with the usual end": (small_causal.TEMPLATE, OTHER, "<eos>"),
    "ChatML": ("", "", "<eos>"),
}


Folders = tuple[Path, Path, Path, str, str]


@pytest.fixture(scope="module", params=chosen(TEMPLATES, ["given, with the usual end"]))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The base model, the adapter and the merged model of a chat run; its template, and the token that ends a turn."""
    own, given, end = TEMPLATES[request.param]
    folder = tmp_path_factory.mktemp("served")
    base = small_causal.make(folder / "base", own)
    method = {"name": "fedlora", "rank": 8}
    run = trained.load_run(chat_run(folder, base, given, method, {"lr": 0.1, "steps": 40}))
    template = str(run.tokenizer.chat_template)
    assert template == (given or own or template)
    return base, run.export(folder / "adapter"), run.export(folder / "merged", merged=True), template, end


def test_exports_keep_the_template_and_the_rest_of_the_tokenizer(folders: Folders) -> None:
    base, adapter, merged, template, _ = folders
    how_loaded = {"is_local": None, "local_files_only": None}  # which transformers notes
    theirs = json.loads((base / "tokenizer_config.json").read_text())
    for folder in (adapter, merged):
        assert AutoTokenizer.from_pretrained(folder).chat_template == template
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        ours = json.loads((folder / "tokenizer_config.json").read_text())
        assert ours | how_loaded == theirs | how_loaded


def test_the_merged_folder_answers_a_chat_in_plain_transformers_and_stops(
    folders: Folders,
) -> None:
    base, adapter, merged, _, end = folders
    tokenizer: Any = AutoTokenizer.from_pretrained(merged)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w1 w2"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = AutoModelForCausalLM.from_pretrained(merged)
    written = model.generate(**asked, max_new_tokens=6, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert len(written) < 6
    assert tokenizer.convert_ids_to_tokens(written)[-1] == end
    stops = GenerationConfig.from_pretrained(merged).eos_token_id
    assert stops == (1 if end == "<eos>" else [1, tokenizer.convert_tokens_to_ids(end)])
    wrapped: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    stop = tokenizer.convert_tokens_to_ids(end)
    again = wrapped.generate(**asked, max_new_tokens=6, do_sample=False, eos_token_id=stop)
    assert torch.equal(again[0, asked["input_ids"].shape[1] :], written)


def test_the_adapter_has_the_format_that_vllm_documents(folders: Folders) -> None:
    base, adapter, _, _, _ = folders
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["modules_to_save"], config["use_dora"], config["bias"]) == (8, None, False, "none")
    model = AutoModelForCausalLM.from_pretrained(base)
    tensors = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    adapted = set()
    for name, tensor in tensors.items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        assert found is not None
        model.get_submodule(found[1])
        adapted.add(found[1].rpartition(".")[2])
        assert tensor.shape[0 if found[2] == "A" else 1] == 8
    assert adapted == set(config["target_modules"])
    assert not list(adapter.glob("*.bin"))


def test_the_merged_folder_has_the_files_that_servers_and_converters_read(
    folders: Folders,
) -> None:
    base, _, merged, template, _ = folders
    names = {path.name for path in merged.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed | {"chat_template.jinja"} <= names
    assert (merged / "chat_template.jinja").read_text() == template
    assert json.loads((merged / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    ours, theirs = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (merged, base))
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: one.shape for name, one in theirs.items()}
