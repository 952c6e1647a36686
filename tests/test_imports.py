"""Importing the packages and asking for help stays cheap: nothing that takes seconds to load is loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from secure_fed.commands import cli
from tests.golden import said

HEAVY = (
    *("torch", "transformers", "peft", "datasets", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn"),
    *("dp_accounting", "opacus"),
)

# Runs the statements of argv[1] one after another; the last line lists the modules of argv[2] that each of them has loaded.
PROBE = """
import json, sys
statements, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])
found = []
for statement in statements:
    before = set(sys.modules)
    try:
        exec(statement, {})
    except SystemExit as end:
        status = end.code or 0
    else:
        status = 0
    found.append({"loaded": [name for name in names if name in set(sys.modules) - before], "status": status})
print()
print(json.dumps(found))
"""

HELP = "import runpy, sys; sys.argv = ['secure-fed', {}]; runpy.run_module('secure_fed', run_name='__main__')"
MAIN = "from secure_fed.commands.cli import main; raise SystemExit(main({}))"
NOTHING: dict[str, object] = {"loaded": [], "status": 0}
REFUSED: dict[str, object] = {"loaded": [], "status": 2}


def probe(*statements: str, names: tuple[str, ...] = HEAVY) -> tuple[dict[str, dict[str, object]], str, str]:
    """Run `statements` in a fresh interpreter: for each its exit status and the `names` it loaded; and what they printed."""
    command = [sys.executable, "-c", PROBE, json.dumps(statements), json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed, _, last = done.stdout.rstrip().rpartition("\n")
    return dict(zip(statements, json.loads(last), strict=True)), printed, done.stderr


def test_the_probe_sees_what_was_loaded() -> None:
    found, *_ = probe("import decimal", "import sys; sys.exit(3)", names=("decimal", "torch"))
    assert list(found.values()) == [{"loaded": ["decimal"], "status": 0}, {"loaded": [], "status": 3}]


def test_packages_ledgers_and_curves_load_nothing_heavy_and_the_public_names_are_listed_without() -> None:
    of_ledgers = ("ledger", "ledger_file", "book", "filters", "statement", "errors", "entropy", "participation")
    names = "import secure_fed; assert {'Federation', 'RunConfig'} <= set(dir(secure_fed))"
    packages = [
        *("secure_fed", "privacy", "protocols", "attacks", "secure_fed.runs.roc"),
        *map("privacy.{}".format, of_ledgers),
    ]
    found, *_ = probe(*map("import {}".format, packages), names)
    assert found == dict.fromkeys(found, NOTHING)
    assert len(found) == 14


INTERRUPTED = """
class Interrupts:
    def find_spec(self, name, *rest):
        if name == "secure_fed.commands.cli":
            raise KeyboardInterrupt
import sys; sys.meta_path.insert(0, Interrupts())
from secure_fed.__main__ import main; raise SystemExit(main())
"""


def test_an_interruption_while_the_commands_are_imported_is_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "secure-fed: interrupted\n")


ROWS = '{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n'
PRINTING = [
    *(HELP.format(arguments) for arguments in ("'--help'", "'train', '--help'", "'budget', '--help'")),
    *(MAIN.format(words) for words in (["methods"], ["methods", "--json"], ["config", "init", "--all"], ["--version"])),
    MAIN.format(["coordinator", "sizes"]),
]
WRONG = {  # settings of `train`, and what is said of them
    "method.name=lora": "'lora' is not a method",
    "data.max_length=3": "there is no setting data.max_length",
    "data.train=nowhere.csv": "there is no file nowhere.csv",
    "data.train=rows.jsonl data.label=topic": "has no column 'topic': it has 'text', 'label'",
    "data.train=rows.csv data.client=site": "rows.csv has no column 'site'",
    "data.train=rows.jsonl data.test=rows.csv data.text=note": "rows.jsonl has no column 'note'",
    "data.client=ward": "builtin/notes has one such column, 'site'",
    "model.name=./no_model": "there is no such folder",
    "privacy.ledger=no.sqlite privacy.unit=client privacy.epsilon=8": "there is no ledger no.sqlite",
}
NOWHERE = [  # other commands, without what they read
    "audit nowhere",
    "audit share nowhere flu",
    "audit lying nowhere.toml",
    "audit model m --members rows.jsonl --non-members no.csv",
    "audit model m --members rows.jsonl --non-members rows.csv --task chat --label b",
    "audit extract m no.csv",
    "audit prepare no.csv --out new",
    "export nowhere new",
    "export run .",
    "predict nowhere",
    "report nowhere",
    "coordinator found nowhere --name x node/card.json",
]


@pytest.mark.skipif(sys.platform == "win32", reason="coordinators and nodes need Unix")
def test_commands_print_and_refuse_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    """Help and lists; settings that are wrong, and a run directory that is taken."""
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "rows.csv").write_text("text,label\na,0\nb,1\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"label_names": [], "clients": []}')
    node = ["--train", tmp_path / "rows.jsonl", "--coordinator", "-".join(["00ff"] * 10)]
    assert cli.main(["node", "init", *map(str, (tmp_path / "node", *node, "--units", 5))]) == 0
    there = f"import os; os.chdir({str(tmp_path)!r})"
    wrong = [MAIN.format(["train", *(f"--set={setting}" for setting in settings.split())]) for settings in WRONG]
    taken = MAIN.format(["train", "--out", "."])
    others = [MAIN.format(words.split()) for words in NOWHERE]
    found, printed, errors = probe(*PRINTING, there, *wrong, taken, *others)
    assert found == dict.fromkeys([*PRINTING, there], NOTHING) | dict.fromkeys([*wrong, taken, *others], REFUSED)
    for words in ("usage: secure-fed [", "usage: secure-fed train", "usage: secure-fed budget", "fra_then_ffa"):
        assert words in printed
    lines = [line for line in errors.splitlines() if line.startswith("secure-fed: ")]
    assert len(lines) == len(WRONG) + 1 + len(NOWHERE)
    assert all(words in line for words, line in zip(WRONG.values(), lines, strict=False))
    assert not (tmp_path / "runs").exists()


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import secure_fed

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = secure_fed.no_such_name


TOP = r"^import ([\w.]+)|^from ([\w.]+) import ([^(\n]+|[(][^)]*)"  # an import at the top of a file


def loaded_with(module: str) -> set[str]:
    """The modules that importing `module` loads: the imports at the top of its file, and theirs in turn within the project."""
    root, seen, left = Path(__file__).parents[1], set[str](), [module]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        path = root.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.exists():
            continue
        for whole, base, names in re.findall(TOP, file.read_text(encoding="utf-8"), re.MULTILINE):
            left += [whole] if whole else [base, *(f"{base}.{name}" for name in re.findall(r"\w+", names))]
        left += [name.rpartition(".")[0]] if "." in name else []
    return {name.partition(".")[0] for name in seen} | seen


def test_no_file_of_a_federation_imports_accounting_at_its_top() -> None:
    of_federations = loaded_with("secure_fed.federation")
    assert {"torch", "transformers", "secure_fed.rounds.server", "privacy.mechanisms"} <= of_federations
    assert not {"dp_accounting", "opacus"} & of_federations
    assert "dp_accounting" in loaded_with("privacy.accounting")


@pytest.mark.nightly
def test_a_federation_without_privacy_loads_no_accounting() -> None:
    found, *_ = probe("import secure_fed.federation", names=("dp_accounting", "opacus"))
    assert list(found.values()) == [NOTHING]


def test_modules_of_unix_are_imported_by_deployments_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything else runs on Windows, where the commands of deployments end with one sentence."""
    of_unix, root, found = "fcntl|grp|pwd|pty|resource|termios", Path(__file__).parents[1], set()
    for package in ("secure_fed", "privacy", "protocols", "attacks"):
        for path in (root / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for before in re.findall(rf"(.*\n) *import (?:{of_unix})\b", text):
                if before.strip() != "try:":
                    found.add(path.parent.relative_to(root).as_posix())
    assert found == {"secure_fed/deployment"}
    monkeypatch.setattr(sys, "platform", "win32")
    for command in (["node", "status", "x"], ["coordinator", "sizes"], ["flower", "init", "x", "--coordinator", "y"]):
        assert cli.main(command) == 2
        said(capsys.readouterr().err)
