"""Every example runs and prints what it promises: some in this process on every change, all at night, as a user runs them."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.deployment.home import CoordinatorHome, Home
from secure_fed.deployment.policy import require
from secure_fed.methods import build
from tests import accounts
from tests.cells import chosen

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str | Path) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_recipes_of_choosing_are_configurations() -> None:
    page = (EXAMPLES.parent / "docs" / "choosing.md").read_text(encoding="utf-8")
    for unit in ("example", "client"):
        texts = re.findall(r"```toml\n(.*?)```", page.replace('unit = "example"', f'unit = "{unit}"'), re.DOTALL)
        recipes = [RunConfig.from_dict(tomllib.loads(text)) for text in texts]
        assert [(recipe.privacy.unit, build(recipe).card.name) for recipe in recipes] == [
            (unit, "head"),
            (unit, "federa"),
        ]


def test_every_example_is_run_here() -> None:
    """This file names each; what those in examples/deployment set up runs in tests/secure_fed/flower."""
    beside = {"tiny_decoder.py", "ask.py"}  # which other examples run
    beside |= {
        "compose.yaml",
        "secure-fed-coordinator.service",
        "secure-fed-supernode.service",
    }  # which a person copies
    own = Path(__file__).read_text(encoding="utf-8")
    files = [path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert [path.name for path in files if path.name not in own and f'"{path.stem}"' not in own] == []
    assert beside <= {path.name for path in files}


@pytest.mark.parametrize("name", ["secure-fed-agent.service", "secure-fed-superlink.service"])
def test_a_service_can_write_the_heads_of_ledgers(name: str) -> None:
    """Without this, they would go to the user's home folder, which the unit protects."""
    text = (EXAMPLES / "deployment" / name).read_text(encoding="utf-8")
    writable = re.search("^ReadWritePaths=(.+)$", text, re.MULTILINE)
    state = re.search("^Environment=XDG_STATE_HOME=(.+)$", text, re.MULTILINE)
    assert writable is not None
    assert state is not None
    assert Path(writable[1]) in Path(state[1]).parents


def test_the_files_of_a_try_on_one_machine_found_a_federation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps of loopback.sh that need no process of Flower's."""
    folder = EXAMPLES / "deployment"
    run(folder / "notes.py", tmp_path, "4")
    assert main(["coordinator", "init", str(tmp_path / "coordinator")]) == 0
    key = capsys.readouterr().out.strip()
    for number in range(1, 5):
        files = ["--train", str(tmp_path / f"notes-{number}.jsonl"), "--coordinator", key, "--units", "600"]
        assert main(["node", "init", str(tmp_path / f"node-{number}"), *files]) == 0
    cards = [str(tmp_path / f"node-{number}" / "card.json") for number in range(1, 5)]
    test = f"data.test={tmp_path / 'test.jsonl'}"
    terms = ["--name", "clinics", "--config", str(folder / "run.toml"), "--set", test]
    assert main(["coordinator", "found", str(tmp_path / "coordinator"), *terms, *cards]) == 0
    charter = CoordinatorHome.load(tmp_path / "coordinator").charter
    for number in range(1, 5):
        require(Home.load(tmp_path / f"node-{number}").policy, charter)


@pytest.mark.nightly
def test_hospitals(tmp_path: Path) -> None:
    out = run("-m", "secure_fed", "train", EXAMPLES / "hospitals.toml", "--json", "--out", tmp_path / "run")
    result = json.loads(out)
    assert result["clients"] > 20
    assert result["accuracy"] > 0.7
    assert 0 <= result["metrics"]["clients_accuracy"]["worst_decile"] <= result["metrics"]["clients_accuracy"]["mean"]


@pytest.mark.nightly
def test_private_notes(tmp_path: Path) -> None:
    out = run("-m", "secure_fed", "train", EXAMPLES / "private_notes.toml", "--json", "--out", tmp_path / "run")
    result = json.loads(out)
    assert result["unit"] == "example"
    assert 7.92 < result["epsilon"] <= 8
    assert result["privacy"]["private"]


@pytest.mark.nightly
def test_the_trainer_makes_every_planned_step_and_logs_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    main_ = runpy.run_path(str(EXAMPLES / "hugging_face_trainer.py"))["main"]
    main_.__globals__.update(EXAMPLES=100, EPOCHS=2)
    with accounts.coarse():
        main_()
    out = capsys.readouterr().out
    assert "\n2 of 2 steps, epsilon 7.9" in out
    assert "Unit: one example." in out
    assert "train_runtime" in out
    assert not re.search("'(train_)?loss'|grad_norm", out)


_TRL = {
    "trl_sft": r"^round \d: training loss [\d.]+, test loss ([\d.]+)$",
    "trl_dpo": r"^round \d: DPO loss ([\d.]+), accuracy [\d.]+$",
}


@pytest.mark.parametrize("name", chosen(_TRL, ["trl_sft"]))
def test_a_trainer_of_trl_is_the_local_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    main_ = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    main_.__globals__.update(CLINICS=3, ROUNDS=1, STEPS=2)
    main_()
    (loss,) = re.findall(_TRL[name], capsys.readouterr().out, re.MULTILINE)
    at_the_start = {"trl_sft": math.log(400), "trl_dpo": math.log(2)}[name]  # of weights that know nothing
    assert float(loss) < at_the_start - 0.02
    if name == "trl_sft":
        assert (tmp_path / "adapter" / "adapter_config.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", _TRL)
def test_examples_of_trl(name: str) -> None:
    losses = [float(loss) for loss in re.findall(_TRL[name], run(EXAMPLES / f"{name}.py"), re.MULTILINE)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


# What the output of each has. Some take a folder for what they write.
SAYS = {
    "own_loop.py": [r"\A60 steps, epsilon 7\.9[2-9]\d*, accuracy ([4-9]\d|100)\b"],
    "hugging_face_trainer.py": [r"^60 of 60 steps, epsilon 7\.9\d+, accuracy ([4-9]\d|100)\b"],
    "own_model.py": [r"^round 20: accuracy (0\.[89]|1)", r"^\d+ of \d+ parameters trained$"],
    "own_files.py": ["^12 clinics", "^PEFT says:"],
    "one_budget.py": [r"(?s)spent so far.*spent so far.*third run refused"],
    "planted_secrets.py": ["secrets that were in the training have a mean exposure of", "The training gave them away"],
    "audit_any_model.py": ["LEAK", "report:"],
    "audit_a_run.py": [
        *(r"\Aaccuracy", "lira by outsider", "update_score by server", "regression by server"),
        "A leak was found, and no guarantee covers it. The server without masks .* that guesses which of two texts",
    ],
    "lying_server.py": [r"\Aof 8 notes, [678] ", r"^labels: \[", r"^plain +traps +10 of", r"^with noise +traps +0 of"],
}
WRITES = {"own_files.py": "adapter/adapter_model.safetensors", "audit_a_run.py": "audit.html", "one_budget.py": ""}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAYS)
def test_an_example_says_what_it_promises(name: str, tmp_path: Path) -> None:
    out = run(EXAMPLES / name, *([tmp_path] if name in WRITES else []))
    assert [pattern for pattern in SAYS[name] if not re.search(pattern, out, re.MULTILINE)] == [], out
    assert (tmp_path / WRITES.get(name, "")).exists()


@pytest.mark.nightly
def test_compare_methods() -> None:
    rows = [line.split() for line in run(EXAMPLES / "compare_methods.py").splitlines()[1:]]
    trained = {row[0]: int(row[2]) for row in rows}
    assert list(trained) == ["fedlora", "ffa_lora", "fra_lora", "federa"]
    assert trained["ffa_lora"] < trained["fedlora"]
    assert all(float(row[1]) > 0.6 for row in rows)


@pytest.mark.nightly
def test_every_command_of_the_first_hour_works() -> None:
    """They run tickets.py and load_tickets.py too."""
    run(EXAMPLES / "replay.py", EXAMPLES.parent / "docs" / "first_hour.md")


@pytest.mark.nightly
def test_the_chat_of_eight_clinics_with_a_small_model(tmp_path: Path, chatty: Path) -> None:
    """Every command of the first chat, with a model of sixteen hidden units in SmolLM2's place."""
    clinics = runpy.run_path(str(EXAMPLES / "chat" / "clinics.py"))
    few = [row for row, _ in zip(clinics["conversations"](0), range(50), strict=False)]
    for row in few:
        assert clinics["is_right"](row, row["messages"][2]["content"])
        wrong = {**row, "day": next(day for day in clinics["DAYS"] if day != row["day"])}
        assert not clinics["is_right"](wrong, row["messages"][2]["content"])
    folder, page = tmp_path / "chat", tmp_path / "page.md"
    shutil.copytree(chatty, folder / "smollm2")  # there already, so nothing is downloaded
    small = ["federation.rounds=1", "training.steps=1", "evaluation.dummies=0", "model.max_length=256"]
    text = (EXAMPLES.parent / "docs" / "first_chat.md").read_text(encoding="utf-8")
    train = "secure-fed train examples/chat/chat.toml"
    assert text.count(f"$ {train}") == 1
    page.write_text(text.replace(train, " --set ".join([train, *small])), encoding="utf-8")
    said = run(EXAMPLES / "replay.py", page, "--in", folder, "--write")
    assert "of 80 answers 0 name the right department, 0 the right day, 0 both" in said
    assert '"continuation"' in page.read_text(encoding="utf-8").partition("secure-fed predict")[2]
    assert (folder / "merged" / "model.safetensors").exists()
    assert (folder / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.nightly
def test_every_row_of_the_language_model_benchmark_trains_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    script = EXAMPLES.parent / "benchmarks" / "language_model_gpu.py"
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    lines = run(script, "--device", "cpu", "--tiny").splitlines()
    for row in runpy.run_path(str(script))["ROWS"]:
        (line,) = (line for line in lines if line.startswith(f"{row!s:44}"))
        first, step, over_plain, tokens, _ = map(float, line[44:].split()[:5])
        assert min(first, step, over_plain, tokens) > 0
    (ratio,) = (line for line in lines if "private over plain" in line and "time of a step" in line)
    assert float(ratio.split("  ")[-2]) > 0


SMALL = {
    "SETTINGS": ["data.examples=200", "data.test_examples=20", "federation.clients=4", "federation.rounds=2"],
    "PRIVATE": [
        *("data.examples=60", "data.test_examples=20", "federation.clients=20", "federation.cohort=10"),
        *("federation.rounds=2", "method.name=ffa_lora", "privacy.unit=client", "privacy.epsilon=8"),
    ],
}


def notebook() -> tuple[dict[str, Any], ...]:
    """The code cells of the notebook."""
    read = json.loads((EXAMPLES / "first_run.ipynb").read_text(encoding="utf-8"))
    assert (read["nbformat"], read["nbformat_minor"] >= 5) == (4, True)
    return tuple(cell for cell in read["cells"] if cell["cell_type"] == "code")


@pytest.mark.nightly
def test_the_cells_of_the_notebook_run_as_a_script() -> None:
    """Small settings replace the notebook's own, which have the same names."""
    names: dict[str, Any] = {"__name__": "notebook"}
    with accounts.coarse():
        for cell in notebook():
            exec("".join(cell["source"]), names)
            for name in SMALL.keys() & names.keys():
                names[name] = [*SMALL[name], "training.together=1", "training.steps=1"]
    assert {"SETTINGS", "PRIVATE"} <= names.keys()
    assert names["result"].summary["rounds"] == names["private"].summary["rounds"] == 2
    assert names["private"].summary["epsilon"] <= 8
    assert names["audit"]["verdict"]["text"]


def test_the_notebook_holds_its_outputs_and_nothing_of_a_machine() -> None:
    path = EXAMPLES / "first_run.ipynb"
    assert path.stat().st_size < 200_000
    text = path.read_text(encoding="utf-8")
    assert "/tmp/" not in text
    assert "/home/" not in text
    assert " at 0x" not in text
    assert "jupyter execute --inplace examples/first_run.ipynb" in text
    cells = notebook()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] in ("execute_result", "stream", "display_data") for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]
    shown = ["".join(output["data"].get("text/html", "")) for output in outputs if "data" in output]
    assert sum("membership AUC" in html for html in shown) == 2  # of both results
    assert sum("1 is always, 0.5 is chance" in html for html in shown) == 1  # of the audit
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
