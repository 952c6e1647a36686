"""The command line without errors: printed output, written files, and that both agree."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet
import pytest

from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.methods import METHODS
from secure_fed.methods.method import State
from secure_fed.report.progress import ConsoleProgress
from secure_fed.runs.directory import claimed, require_begun
from secure_fed.tensors.tensors import Tensors
from tests.cells import every
from tests.secure_fed.conftest import Ran, Refuses

pytestmark = pytest.mark.usefixtures("never_drawn")

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "result.schema.json"
Told = Callable[..., str]


@pytest.fixture
def told(ran: Ran) -> Told:
    """Runs a command that must succeed; returns its standard output."""

    def run(*arguments: str | Path) -> str:
        status, out, error = ran(*arguments)
        assert status == 0, error
        return out

    return run


@pytest.fixture(scope="module")
def settings(small_model: Path, small_data: Path) -> list[str]:
    files = [f"model.name={small_model}", *(f"data.{split}={small_data / split}.jsonl" for split in ("train", "test"))]
    small = ["federation.clients=4", "federation.cohort=2", "federation.rounds=2", "training.lr=0.02"]
    small.append("training.lr_schedule=constant")  # stays the same if a resumed run gets more rounds
    return [part for setting in files + small for part in ("--set", setting)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> tuple[Path, str]:
    """The folder of a finished run, and the output of its `train --json`."""
    out = tmp_path_factory.mktemp("runs") / "first"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["train", *settings, "--set", "evaluation.keep_best=true", "--out", str(out), "--json"]) == 0
    return out, printed.getvalue()


def test_train_prints_the_result_it_writes_and_a_directory_holds_what_the_run_did(finished: tuple[Path, str]) -> None:
    run_dir, printed = finished
    result = json.loads(printed)
    assert printed.count("\n") == 1
    assert result == json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    jsonschema.validate(result, json.loads(SCHEMA.read_text(encoding="utf-8")), cls=jsonschema.Draft202012Validator)
    assert (result["rounds"], result["clients"], result["cohort"]) == (2, 4, 2)
    assert result["label_names"] == ["calm", "wild"]
    assert result["run_dir"] == str(run_dir)
    rounds = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["round"] for record in rounds] == [1, 2]
    assert sum(record["bytes_up"] for record in rounds) == result["bytes_up"]
    assert rounds[-1]["accuracy"] == result["accuracy"]
    assert RunConfig.from_dict(json.loads((run_dir / "config.json").read_text(encoding="utf-8"))).federation.rounds == 2
    assert "<html" in (run_dir / "report.html").read_text(encoding="utf-8")


def test_poisson_cohorts_keep_the_schema_too(told: Told, settings: list[str], tmp_path: Path, small_data: Path) -> None:
    """49 * (1 / 49) is not 1 in floating point, and the schema requires a whole number of clients."""
    files = json.dumps([str(small_data / f"{split}.jsonl") for split in ("train", "test")])
    changes = [f"data.train={files}", "data.partition=iid", "federation.clients=49", "federation.cohort=1"]
    changes += ["federation.sampling=poisson", "federation.rounds=1"]
    more = [part for change in changes for part in ("--set", change)]
    result = json.loads(told("train", *settings, *more, "--out", tmp_path / "run", "--json"))
    jsonschema.validate(result, json.loads(SCHEMA.read_text(encoding="utf-8")), cls=jsonschema.Draft202012Validator)
    assert result["cohort"] == 1


def test_a_person_gets_a_table_and_the_places_with_names_as_they_are(
    ran: Ran, settings: list[str], small_model: Path, tmp_path: Path
) -> None:
    """And is told before the first round what is held out of training."""
    model, out = tmp_path / "[red]", tmp_path / "a [/nothing]"
    shutil.copytree(small_model, model)
    one = [f"--set=model.name={model}", "--set=federation.rounds=1", "--set=evaluation.audit_fraction=0.5"]
    _, shown, progressed = ran("train", *settings, *one, "--out", out)
    printed = " ".join(shown.replace(str(tmp_path), "").split())
    assert "accuracy" in printed
    assert "/[red]" in printed
    assert "report: /a [/nothing]/report.html" in printed
    assert "secure-fed export '/a [/nothing]' OUT_DIR" in printed
    assert "1, each with 2 of 4 clients" in printed
    listed = ran("methods", "--model", model)[1]
    assert "for [red]" in " ".join(listed.replace(f"{tmp_path}/", "").split())
    assert all(name in listed for name in METHODS)
    lines = progressed.splitlines()
    units = json.loads((out / "private" / "membership.json").read_text(encoding="utf-8"))["units"]
    (said,) = (place for place, line in enumerate(lines) if "are not trained on" in line)
    assert lines[said].startswith(f"secure-fed: {sum(not unit['member'] for unit in units)} of ")
    assert "evaluation.audit_fraction; 0 trains on all" in lines[said]
    assert said < min(place for place, line in enumerate(lines) if line.startswith("round 1"))


def test_what_to_do_next_is_a_command_that_can_be_pasted(
    finished: tuple[Path, str], tmp_path: Path, refuses: Refuses
) -> None:
    """The folder has a space in its name; its run has no audit, then no result, then no finished round."""
    run_dir = tmp_path / "a run"
    shutil.copytree(finished[0], run_dir)
    refuses("audit", finished[0], "--beside", run_dir)
    (run_dir / "result.json").unlink()
    refuses("audit", run_dir)
    (run_dir / "checkpoint.safetensors").unlink()
    refuses("export", run_dir, tmp_path / "out")


def test_runs_without_a_place_go_under_runs_and_those_of_one_second_have_places_of_their_own(
    told: Told, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Noon:
            return cls(2026, 1, 2, 12)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("secure_fed.commands.train.datetime", Noon)
    results = [json.loads(told("train", *settings, "--set", "federation.rounds=1", "--json")) for _ in range(2)]
    first = str(Path("runs") / "20260102-120000-fra_lora")
    assert [result["run_dir"] for result in results] == [first, f"{first}-2"]
    assert {one.name for one in (tmp_path / "runs").iterdir()} == {Path(result["run_dir"]).name for result in results}


def test_the_place_of_a_run_is_taken_before_it_is_prepared(tmp_path: Path) -> None:
    with (
        claimed(tmp_path / "runs" / "a", rename=True) as first,
        claimed(tmp_path / "runs" / "a", rename=True) as second,
    ):
        assert (first.name, second.name) == ("a", "a-2")
        (second / "config.json").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-2"]
    with claimed(tmp_path / "other" / "b", rename=False):
        require_begun(tmp_path / "other" / "b")
    assert not (tmp_path / "other").exists()
    (tmp_path / "mine").mkdir()
    with claimed(tmp_path / "mine", rename=False):
        pass
    assert (tmp_path / "mine").exists()


def round_of(number: int, **more: Any) -> dict[str, Any]:
    return {"round": number, "bytes_up": 600_000, "bytes_down": 399_700, "rejected": [], **more}


def test_progress_names_clients_as_they_are_called_and_counts_on(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress(3, [round_of(1, accuracy=0.5)]) as progress:
        progress.on_round_end(round_of(2, rejected=["[bold]ward[/]", "[/]"]), State(Tensors({}), 2))
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "round 2: left out client [bold]ward[/]: its update is not finite"
    assert told[1] == "round 2: left out client [/]: its update is not finite"
    assert told[2].startswith("round 2/3: accuracy 50.0 % after round 1, 2.00 MB sent")
    with ConsoleProgress(3) as progress:
        progress.on_round_end(round_of(1, rejected=["ward"], masked={}), State(Tensors({}), 1))
    said = "round 1: left out client ward: its message violates the secure aggregation protocol"
    assert capsys.readouterr().err.splitlines()[0] == said


def test_progress_shows_f1_first_of_entities_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress(3, task="tokens") as progress:
        progress.on_round_end(round_of(1, accuracy=0.97, f1=0.125), State(Tensors({}), 1))
    assert capsys.readouterr().err.startswith("round 1/3: F1 0.125, accuracy 97.0 %, ")


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("closed file")]
)
def test_progress_that_cannot_be_shown_stops_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(text: str) -> int:
        raise error

    gone = io.StringIO()
    monkeypatch.setattr(gone, "write", fail)
    monkeypatch.setattr(sys, "stderr", gone)
    with ConsoleProgress(3) as progress:
        progress.on_round_end(round_of(1, accuracy="good"), State(Tensors({}), 1))
        progress.on_round_end(round_of(2, rejected=None), State(Tensors({}), 2))


def test_output_that_is_refused_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["config", "init", "--all"]) == 1
    assert capsys.readouterr().err == "secure-fed: [Errno 28] No space left on device\n"


def test_output_that_nobody_reads_on_ends_quietly() -> None:
    command = [sys.executable, "-m", "secure_fed", "config", "init", "--all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_resuming_goes_on_to_more_rounds_and_tensorboard_gets_what_metrics_have(
    told: Told, settings: list[str], tmp_path: Path, finished: tuple[Path, str]
) -> None:
    out = tmp_path / "run"
    told(
        "train", *settings, "--set=evaluation.tensorboard=true", "--out", out, "--json", "--set", "federation.rounds=1"
    )
    more = json.loads(told("train", "--resume", "--out", out, "--json", "--set", "federation.rounds=2"))
    assert more["rounds"] == 2
    assert (out / "checkpoint.safetensors").read_bytes() == (finished[0] / "checkpoint.safetensors").read_bytes()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "private" / "tensorboard"))
    events.Reload()
    rounds = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    written = events.Scalars("accuracy")
    assert [event.step for event in written] == [1, 2]
    assert [event.value for event in written] == pytest.approx([record["accuracy"] for record in rounds])


def typed(content: bytes) -> io.TextIOWrapper:
    """Standard input, on a system whose own encoding is not UTF-8."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="ascii")


def test_predict_answers_in_order_from_a_file_and_from_standard_input(
    told: Told, finished: tuple[Path, str], tmp_path: Path, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON lines, or as CSV where the name of the output says so."""
    lines = ["word1 calm word2", "wild, \u00fcber", " ", "calm " * 30]
    texts = [line for line in lines if line.strip()]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [{"id": f"note {n}", "text": text, "ward": n} for n, text in enumerate(texts)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "texts.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in texts), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": text} for text in texts]), tmp_path / "t.parquet")
    monkeypatch.setattr(sys, "stdin", typed(("\ufeff" + "\r\n".join(lines)).encode()))
    from_stdin = told("predict", finished[0])
    answers = [json.loads(line) for line in from_stdin.splitlines()]
    assert [answer.pop("line") for answer in answers] == [1, 2, 4]
    assert [answer["text"] for answer in answers] == [*texts[:2], texts[2][:79] + "…"]
    for answer in answers:
        assert answer["label"] in ("calm", "wild")
        assert 0.5 <= answer["probability"] <= 1
    assert told("predict", finished[0], tmp_path / "texts.txt") == from_stdin
    places = {"texts.jsonl": ("id", ["note 0", "note 1", "note 2"]), "texts.csv": ("line", [2, 3, 4])}
    for name, (column, values) in {**places, "t.parquet": ("row", [1, 2, 3])}.items():
        again = [json.loads(line) for line in told("predict", finished[0], tmp_path / name).splitlines()]
        assert again == [{column: value, **answer} for value, answer in zip(values, answers, strict=True)], name
    ask = ["predict", finished[0], tmp_path / "t.parquet", "--out"]
    for name in ("answers.jsonl", "answers.csv"):
        assert told(*ask, tmp_path / name) == ""
    written = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == again
    with (tmp_path / "answers.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == [{name: str(value) for name, value in row.items()} for row in again]
    for out in ("answers.csv", "a.xlsx", "no/a.csv"):
        refuses(*ask, tmp_path / out)


@every("options", [["--max-new-tokens", "3"], ["--temperature", "1"], ["--seed", "1"]])
def test_options_of_generation_are_refused_for_labels(
    finished: tuple[Path, str], refuses: Refuses, options: list[str]
) -> None:
    refuses("predict", finished[0], *options)


def test_predictions_on_the_test_set_have_the_accuracy_of_the_result(
    told: Told, finished: tuple[Path, str], small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [json.loads(line) for line in told("predict", finished[0], small_data / "test.jsonl").splitlines()]
    truth = [json.loads(line)["label"] for line in (small_data / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    right = sum(answer["label"] == label for answer, label in zip(answers, truth, strict=True))
    assert right / len(truth) == json.loads(finished[1])["accuracy"]
    monkeypatch.setattr(sys, "stdin", typed(b""))
    assert told("predict", finished[0]) == "", "of nothing it is nothing"


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    """The folder of a run that labels pairs of texts, and of its training file."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"text": f"word{n}", "text_2": ("calm", "wild")[n % 2], "label": n % 2} for n in range(20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = [f"model.name={small_model}", f"data.train={folder / 'train.jsonl'}", "data.text_b=text_2"]
    settings = [part for text in [*files, "federation.clients=2", "federation.rounds=1"] for part in ("--set", text)]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", *settings, "--out", str(folder / "run"), "--json"]) == 0
    return folder


def test_pairs_are_labelled_by_both_texts(told: Told, paired: Path) -> None:
    answers = [json.loads(line) for line in told("predict", paired / "run", paired / "train.jsonl").splitlines()]
    assert len(answers) == 20
    assert {answer["label"] for answer in answers} <= {"0", "1"}
    swapped = [json.loads(line) for line in (paired / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    text = "".join(json.dumps({"text": row["text_2"], "text_2": row["text"]}) + "\n" for row in swapped)
    (paired / "swapped.jsonl").write_text(text, encoding="utf-8")
    again = [json.loads(line) for line in told("predict", paired / "run", paired / "swapped.jsonl").splitlines()]
    assert [a["probability"] for a in again] != [a["probability"] for a in answers]


UNREADABLE = {
    "none.jsonl": None,
    "one.jsonl": b'{"text": "calm"}\n',
    "odd.csv": b"note,text_2\ncalm,wild\n",
    "one.txt": b"calm\n",
    "odd.jsonl": b'{"text": "calm", "text_2": 3}\n',
    "half.jsonl": b'{"text": "\\ud800", "text_2": "wild"}\n',
    "none.txt": None,
    "odd.pdf": b"calm",
}


def test_what_predict_cannot_read(
    paired: Path, finished: tuple[Path, str], tmp_path: Path, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in UNREADABLE.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        refuses("predict", paired / "run", tmp_path / name)
    refuses("predict", paired / "run")  # no pairs are typed
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    refuses("predict", finished[0], tmp_path / "latin.txt")
    monkeypatch.setattr(sys, "stdin", typed(b"caf\xe9\n"))
    refuses("predict", finished[0])


def test_a_run_whose_model_has_changed_is_refused(
    finished: tuple[Path, str], tmp_path: Path, small_model: Path, refuses: Refuses
) -> None:
    from transformers import BertConfig, BertForMaskedLM

    run = shutil.copytree(finished[0], tmp_path / "run")
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    config["model"]["name"] = str(shutil.copytree(small_model, tmp_path / "model"))
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    BertForMaskedLM(BertConfig.from_pretrained(small_model, hidden_size=32)).save_pretrained(tmp_path / "model")
    refuses("predict", run)


def test_the_best_model_is_exported_and_predicts(told: Told, finished: tuple[Path, str], tmp_path: Path) -> None:
    told("export", finished[0], tmp_path / "best", "--best")
    assert (tmp_path / "best" / "adapter_config.json").exists()
    (tmp_path / "texts.txt").write_text("one note\n")
    assert "label" in told("predict", finished[0], tmp_path / "texts.txt", "--best")


def test_report_is_written_again(told: Told, finished: tuple[Path, str]) -> None:
    page = finished[0] / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert Path(told("report", finished[0]).strip()) == page
    assert page.read_bytes() == before


def test_methods(told: Told, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted: `methods/test_catalogue.py`."""
    monkeypatch.setattr("secure_fed.methods.catalogue.METHODS", {"ffa_lora": METHODS["ffa_lora"]})
    listed = json.loads(told("methods", "--model", small_model, "--json"))
    assert [(row["name"], row["mean_exact"]) for row in listed["methods"]] == [("ffa_lora", True)]
    listed = json.loads(told("methods", "--model", small_model, "--task", "regression", "--json"))
    assert (listed["task"], listed["classes"]) == ("regression", None)
    assert main(["methods", "--task", "regression", "--classes", "3"]) == 2


def test_an_interrupt_says_how_to_go_on(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("secure_fed.rounds.engine.run_round", interrupt)
    assert main(["train", *settings, "--out", str(tmp_path / "run")]) == 130
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == f"secure-fed: interrupted; go on with `secure-fed train --resume --out {tmp_path / 'run'}`"


@pytest.mark.parametrize("command", ["audit", "report"])
@pytest.mark.parametrize("instant", ["secure_fed.commands.cli.parser", "secure_fed.runs.directory.read_facts"])
def test_an_interrupt_of_what_is_no_run_is_one_sentence_from_the_first_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, instant: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(instant, interrupt)
    monkeypatch.setattr("attacks.command.read_facts", interrupt)
    assert main([command, "some_run"]) == 130
    assert capsys.readouterr().err == "secure-fed: interrupted\n"
