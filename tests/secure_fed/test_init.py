"""`secure-fed init` writes short configurations that run, and `train` has plain options for the commonest settings."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from secure_fed.commands.cli import main
from secure_fed.config import RunConfig, commented_toml
from secure_fed.federation import Federation
from tests.cells import chosen
from tests.golden import golden

SITUATIONS: dict[str, list[str]] = {
    "nobody": ["--data", "clinics.csv", "--parties", "clinic", "--protect", "nobody", "--trust", "server"],
    "texts": ["--data", "a.csv", "b.csv", "c.csv", "--protect", "texts", "--trust", "server", "--epsilon", "3"],
    "persons": ["--data", "clinics.csv", "--parties", "clinic", "--protect", "persons", "--trust", "nobody"],
    "parties": ["--data", "builtin", "--parties", "1500", "--protect", "parties", "--trust", "nobody"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Notes of three clinics in a file of all, and in a file of each."""
    rows = [
        {
            "clinic": f"clinic {at % 3}",
            "patient_id": f"p{at % 17}",
            "note": f"word{at} calm word3" if at % 2 else f"wild word{at}",
        }
        | {"category": ("wild", "calm")[at % 2]}
        for at in range(60)
    ]
    for name, some in (("clinics", rows), *((name, rows[at::3]) for at, name in enumerate("abc"))):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(some)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", chosen(SITUATIONS, ["persons", "parties"]))
def test_what_the_file_says_runs(name: str, folder: Path, small_model: Path) -> None:
    """The run is smaller than the file's: a small model, one step, and few of the 1,500 parties."""
    assert main(["init", "run.toml", *SITUATIONS[name]]) == 0
    config = RunConfig.load("run.toml")
    smaller: dict[tuple[str, str], Any] = {("federation", "rounds"): 1, ("model", "name"): str(small_model)}
    if config.privacy.unit in ("none", "example", "person"):
        smaller |= {("training", "steps"): 1, ("training", "microbatch"): None if config.privacy.unit == "none" else 1}
    else:
        smaller |= {("data", "examples"): 60, ("data", "test_examples"): 20, ("federation", "clients"): 16}
        smaller |= {("federation", "cohort"): 8, ("privacy", "even_if_hopeless"): True}
        smaller |= {("training", "together"): 1, ("training", "steps"): 1}
    if config.privacy.unit != "none":
        smaller[("evaluation", "dummies")] = 0
    summary = Federation(config.replace(smaller)).run(folder / "run").summary
    assert (summary["epsilon"] is None) == (name == "nobody")
    protected = {"none": "", "example": "one example", "person": "all examples of one person", "client": "a client"}
    assert (summary["privacy"] or {"unit": ""})["unit"].startswith(protected[config.privacy.unit])
    assert config.secure_aggregation.enabled == (SITUATIONS[name][-1] == "nobody")


def test_every_file_is_short_and_explained(folder: Path) -> None:
    for name, answers in SITUATIONS.items():
        assert main(["init", "run.toml", *answers]) == 0
        text = (folder / "run.toml").read_text(encoding="utf-8")
        golden(f"init/{name}.toml", text)
        assert len(text.splitlines()) <= 25
        (folder / "run.toml").unlink()


class Typing(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_no_option_answers_is_asked_at_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns are recognised, an answer that is none is asked again, and an empty one takes what is recognised."""
    monkeypatch.setattr("sys.stdin", Typing("clinics.csv\neverybody\npersons\n\nnobody\n"))
    assert main(["init", "asked.toml"]) == 0
    golden("init/questions.txt", capsys.readouterr().err)
    assert main(["init", "given.toml", *SITUATIONS["persons"]]) == 0
    as_for_train = [*SITUATIONS["persons"][:4], "--unit", "person", "--masks"]
    assert main(["init", "as_for_train.toml", *as_for_train]) == 0
    assert Path("as_for_train.toml").read_text().splitlines()[1:] == Path("given.toml").read_text().splitlines()[1:]
    said, given = (tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8")) for name in ("asked", "given"))
    assert said == given


def test_the_task_is_recognised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chat by its columns, a label by its name or by its few values; texts without one are continued."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    cases: dict[str, Any] = {
        "chat": lambda at: {"messages": turns},
        "causal_lm": lambda at: {"story": f"once {at}", "id": at},
        "classification": lambda at: {
            "letter": f"dear team {at}",
            "team": ("loans", "cards")[at % 2],
            "branch_id": f"b{at % 2}",
        },
    }
    for name, row in cases.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row(at)) + "\n" for at in range(12)), encoding="utf-8")
        answers = ["--parties", "2", "--protect", "texts", "--trust", "server"][2 * (name == "classification") :]
        assert main(["init", "--data", f"{name}.jsonl", *answers]) == 0
        data = RunConfig.from_dict(tomllib.loads(capsys.readouterr().out)).data
        expected = {"chat": ("", ""), "causal_lm": ("story", ""), "classification": ("letter", "team")}
        assert (data.task, (data.text, data.label)) == (name, expected[name])
    answers += "--parties", "2"  # now the branch may be what is predicted, too
    assert main(["init", "--data", "classification.jsonl", *answers]) == 2
    assert main(["init", "--data", "classification.jsonl", *answers, "--label", "team"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--data", "clinics.csv"],
        ["--data", "nothing.csv", "--protect", "texts", "--parties", "3", "--trust", "server"],
        ["--data", "clinics.csv", "--protect", "texts", "--parties", "ward", "--trust", "server"],
        ["--data", "clinics.csv", "--protect", "persons", "--person", "ward", "--parties", "3", "--trust", "server"],
        ["--data", "builtin", "--protect", "persons", "--parties", "3", "--trust", "server"],
        ["clinics.csv"],
        ["--all", "--epsilon", "3"],
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["init", *arguments]) == 2
    golden(f"init/refused/{request.node.callspec.indices['arguments']}.txt", capsys.readouterr().err)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_every_setting_is_explained_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["init"], ["config", "init"]):
        assert main([*command, "--all"]) == 0
        assert capsys.readouterr().out == commented_toml()


def test_a_plain_option_of_train_is_its_setting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an option and `--set` the later one counts; a value that the setting does not have is refused about it."""
    plain = ["train", "--train", "clinics.csv", "--client", "clinic", "--masks", "--unit", "example", "--epsilon", "8"]
    for last, about in (
        (["--epsilon", "none"], "privacy.epsilon"),
        (["--set", "federation.rounds=1", "--rounds", "0"], "federation.rounds"),
        (["--rounds", "0", "--set", "federation.rounds=1"], "data.text"),  # the first that is wrong of what was read
        (["--set", "data.text=note", "--set", "data.label=category", "--client", "ward"], "data.client"),
    ):
        assert main([*plain, *last]) == 2
        assert about in capsys.readouterr().err
