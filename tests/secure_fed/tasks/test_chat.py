"""Runs on conversations: what has no room is left out and counted, and deployed runs are the simulated ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from privacy.entropy import SeededEntropy
from secure_fed import Federation, RunConfig
from secure_fed.commands.cli import main
from secure_fed.errors import ConfigError, DataError, ModelError, RunDirectoryError
from secure_fed.export.trained import load_run
from secure_fed.flower.project import Connection, write_project
from secure_fed.runs.dry_run import foreseen
from secure_fed.runs.store import read_checkpoint
from tests.cells import chosen
from tests.flower_loopback import loopback
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.deployment.parties import founded
from tests.secure_fed.flower.test_deployed import seeded_run
from tests.secure_fed.tasks.conftest import Write, settings_of
from tests.secure_fed.tasks.test_chat_template import CHATML
from tests.secure_fed.tasks.toy_tasks import TOYS

ROWS = [{**row, "site": f"s{at % 4}"} for at, row in enumerate(TOYS["chat"].rows(24))]
ROOM = 64  # tokens of the rows above, of the small tokenizer


def config(model: Path, train: Path, test: Path, **settings: Any) -> RunConfig:
    usual = {
        **{"model.name": str(model), "model.max_length": ROOM, "method.name": "fedlora", "training.batch_size": 4},
        **{"data.task": "chat", "data.train": str(train), "data.test": str(test), "data.client": "site"},
        **{"federation.rounds": 1, "federation.cohort": 4, "evaluation.audit_fraction": 0.0},
    }
    return settings_of(usual, **settings)


def chatted(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def long(row: dict[str, Any], *, all_of_it: bool) -> dict[str, Any]:
    """The row with a first question that has no room, or with a last one."""
    turns = [dict(turn) for turn in row["messages"]]
    turns[2 if all_of_it else 0]["content"] = "word1 " * 100
    return {**row, "messages": turns}


@pytest.mark.parametrize("unit", chosen(["none", "example", "client"], ["none"]))
def test_rows_without_room_are_left_out_and_counted(unit: str, chatty: Path, write: Write, tmp_path: Path) -> None:
    """They change nothing: the run is that of the other rows, and a client may have none left."""
    changed = [long(row, all_of_it=at < 6) if at in (3, 4, 5, 9, 10) else row for at, row in enumerate(ROWS)]
    shorter = [{**row, "messages": row["messages"][2:]} if at in (9, 10) else row for at, row in enumerate(ROWS)]
    own: dict[str, Any] = {"privacy__unit": unit, "federation__sampling": "fixed" if unit != "client" else "auto"}
    if unit != "none":
        own |= {"privacy__noise_multiplier": 1.0, "evaluation__dummies": 0, "federation__clients": None}
    test = write("test", ROWS[:8])
    runs = [
        config(chatty, write("changed", changed), test, **own),
        config(chatty, write("others", [row for at, row in enumerate(shorter) if at not in (3, 4, 5)]), test, **own),
    ]
    finals = [Federation(one, entropy=SeededEntropy(0)).run() for one in runs]
    if unit == "none":
        found = foreseen(runs[0])["data"]
        assert (found["rows"], found["rows_left_out"], found["rows_at_the_limit"]) == (21, 3, 2)
        assert toys.same(finals[0].state.tensors, finals[1].state.tensors)
        assert "3 of 24 training conversations are left out" in " ".join(Federation(runs[0]).warnings)
    assert finals[0].records[-1]["loss"] == pytest.approx(finals[1].records[-1]["loss"], rel=1e-5)


def test_a_client_whose_rows_have_no_room_takes_part_with_nothing(chatty: Path, write: Write) -> None:
    changed = [long(row, all_of_it=True) if row["site"] == "s1" else row for row in ROWS]
    test = write("test", ROWS[:8])
    assert Federation(config(chatty, write("train", changed), test)).run().state.round == 1
    with refused(DataError, "model.max_length"):
        Federation(config(chatty, write("train", [long(row, all_of_it=True) for row in ROWS]), test))


@pytest.mark.parametrize("how", chosen(["in memory", "masked, in memory", "masked, over Flower"], ["in memory"]))
def test_a_deployed_run_on_chats_is_the_simulated_one(how: str, chatty: Path, write: Write, tmp_path: Path) -> None:
    """The charter holds the template, not the path of its file."""
    own = tmp_path / "own.jinja"
    own.write_text(CHATML.replace("assistant\n", "assistant\n "), encoding="utf-8")
    parts = [[row for row in ROWS if row["site"] == f"s{number}"] for number in range(4)]
    parts[1][0] = long(parts[1][0], all_of_it=False)
    tables: dict[str, Any] = {
        "data__chat_template": str(own),
        "data__client": "",
        "federation__sampling": "fixed",
        "secure_aggregation__enabled": how.startswith("masked"),
    }
    whole = config(chatty, tmp_path / "none.jsonl", write("test", ROWS[:8]), **tables)
    party = founded(tmp_path, whole, parts, lambda number: SeededEntropy(5), tested=ROWS[:8])
    assert party.charter.config.data.chat_template == own.read_text(encoding="utf-8")
    if how.endswith("Flower"):
        with loopback(tmp_path / "link", party.homes, command=seeded_run) as link:
            link.await_nodes()
            link.run(
                write_project(tmp_path / "app", party.folder, Connection(link.address, insecure=True)), seconds=900
            )
        checkpoint = read_checkpoint(party.folder / "run")
        assert checkpoint is not None
        deployed = checkpoint.state
    else:
        deployed = party.conduct().state
    files = [str(shutil.copy(tmp_path / f"node-{n}" / "train.jsonl", tmp_path / f"c{n}.jsonl")) for n in range(4)]
    simulated = whole.replace({("data", "train"): files, ("training", "together"): 1})
    state = Federation(simulated, entropy=SeededEntropy(5)).run().state
    assert toys.same(deployed.tensors, state.tensors)


def test_test_rows_without_room_are_counted_and_not_asked(chatty: Path, write: Write) -> None:
    tested = [long(row, all_of_it=True) if at else row for at, row in enumerate(ROWS[:8])]
    own: dict[str, Any] = {"evaluation__generate": 8, "data__metric": "f1"}
    federation = Federation(config(chatty, write("train", ROWS), write("test", tested), **own))
    assert "7 of 8 test conversations are left out" in " ".join(federation.warnings)
    problem = federation.assembly.problem
    assert problem.asked is not None
    assert (len(problem.test), len(problem.asked.rows)) == (1, 1)


@pytest.mark.parametrize("where", chosen(["a file", "the model's folder"], ["a file"]))
def test_a_run_keeps_its_template(where: str, chatty: Path, write: Write, tmp_path: Path) -> None:
    """A resumed run with another one is refused; a finished run reads by its own."""
    model = tmp_path / "model"
    shutil.copytree(chatty, model)
    file = tmp_path / "own.jinja" if where == "a file" else model / "chat_template.jinja"
    file.write_text(CHATML, encoding="utf-8")
    own = {"data__chat_template": str(file)} if where == "a file" else {}
    train, test = write("train", ROWS), write("test", ROWS[:8])
    Federation(config(model, train, test, **own)).run(tmp_path / "run")
    file.write_text(CHATML.replace("assistant\n", "assistant "), encoding="utf-8")
    with refused(RunDirectoryError):
        Federation(config(model, train, test, federation__rounds=3, **own)).run(tmp_path / "run", resume=True)
    if where == "a file":
        file.unlink()
        assert load_run(tmp_path / "run").tokenizer.chat_template == CHATML


def test_a_template_without_the_assistants_texts_is_refused(chatty: Path, write: Write, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(CHATML.replace("m['content']", "(m['content'] if m['role'] == 'user' else '')"), encoding="utf-8")
    with refused(ModelError, "data.chat_template"):
        Federation(config(chatty, write("train", ROWS), write("test", ROWS[:8]), data__chat_template=str(own)))


def test_the_dry_run_names_the_units_that_are_held_out(chatty: Path, write: Write) -> None:
    """Copies of a unit that is held out are, too."""
    rows = [{**chatted(f"word{at % 12} word{at % 7}", "calm"), "site": f"s{at % 4}"} for at in range(90)]
    own = config(chatty, write("train", rows), write("test", ROWS[:8]), evaluation__audit_fraction=0.5)
    found, said = foreseen(own)["data"]["held_out_for_an_audit"], Federation(own).notes[0]
    assert found > 0
    assert said.startswith(f"{found} of {len(rows)} examples")


def test_an_export_keeps_the_template(gpt2: Path, write: Write, tmp_path: Path) -> None:
    """Also ChatML's, of a model that has none."""
    rows = write("rows", ROWS)
    Federation(config(gpt2, rows, rows, model__max_length=100)).run(tmp_path / "run")
    run = load_run(tmp_path / "run")
    for merged in (False, True):
        folder = run.export(tmp_path / f"export-{merged}", merged=merged)
        kept = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        assert "<|im_start|>assistant" in kept
    found = list(run.predict([json.loads(json.dumps(ROWS[0]["messages"])), "word1"]))
    assert found[0]["tokens"] > 0
    assert found[1] == {}


def test_answers_are_measured_and_written(chatty: Path, write: Write, tmp_path: Path) -> None:
    """A conversation that ends with an answer is answered anew, from what stands before it."""
    rows = write("rows", ROWS)
    asked = {"evaluation__generate": 4, "evaluation__max_new_tokens": 4, "data__metric": "f1"}
    result = Federation(config(chatty, rows, rows, **asked)).run(tmp_path / "run")
    assert 0 <= result.records[-1]["f1"] <= 1
    run, talk = load_run(tmp_path / "run"), ROWS[0]["messages"]
    first, again, question, whole = run.generate([talk, talk[:-1], "word1", [{"role": "user", "content": "word1"}]], 4)
    assert first == again
    assert question == whole
    with refused(ConfigError, "max_new_tokens"):
        run.generate(["word1"], -1)


def test_predict_reads_a_line_as_a_question_whatever_column_was_learned(
    chatty: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write("rows", [{"talk": row["messages"], "site": row["site"]} for row in ROWS])
    Federation(config(chatty, rows, rows, data__text="talk")).run(tmp_path / "run")
    (tmp_path / "asked.txt").write_text("word1 word2\n", encoding="utf-8")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "asked.txt"), "--max-new-tokens", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "word1 word2"
    mixed, out = write("mixed", [{"talk": ROWS[0]["messages"][:turns]} for turns in (1, 2)]), tmp_path / "answers.csv"
    assert main(["predict", str(tmp_path / "run"), str(mixed), "--out", str(out), "--max-new-tokens", "2"]) == 0
    assert len(out.read_text(encoding="utf-8").splitlines()) == 3  # an answer that was there is scored, too
