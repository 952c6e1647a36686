"""Results as printed on a terminal of 80 columns."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from secure_fed.report.terminal import show_methods, show_result
from tests.golden import golden
from tests.secure_fed.conftest import make_private
from tests.secure_fed.masked_edit import CASES, masked
from tests.secure_fed.pages import RunFolder, changed, compared
from tests.secure_fed.test_report_measured import NONE, measured, of_dummies

RESULTS: dict[str, Any] = {
    "no protection": changed({}),
    "membership": measured(),
    "membership without a figure": NONE,
    "private": make_private,
    "NOT PRIVATE: injected noise": lambda run: make_private(run, private=False),
    "private, one epsilon for all but the server": changed(
        {"result.privacy.holds_against": ["reader", "participant"]}, make_private
    ),
    "private, one epsilon for all": changed(
        {"result.privacy.holds_against": ["reader", "participant", "server"]}, make_private
    ),
    "private, from a ledger, with dummy clients": changed({"result.privacy.ledger": "/notes.sqlite"}, of_dummies(1.5)),
    "private, ended early": changed({"result.ended_early": "the budget is spent"}, make_private),
    "masks from which nobody may vanish": masked("nothing", least=4),
    **{f"masks, {case.replace('coins', 'secret coins')}": masked(case) for case in CASES},
    "masks, a server that may lie": masked("nothing", active=True),
}


def test_every_result_in_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run_folder: RunFolder
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for name, edit in RESULTS.items():
        folder = run_folder(edit=edit)
        show_result(json.loads((folder / "result.json").read_text(encoding="utf-8")))
        shutil.rmtree(folder)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        shown[name] = [" ".join(line.split()) for line in lines if set(line) & set("│")]
    injected = "\n".join(shown["NOT PRIVATE: injected noise"])
    assert injected.index("NOT PRIVATE") < injected.index("epsilon")
    assert not any("expected" in line or "epsilon" in line for line in shown["no protection"])
    golden("secure_fed/terminal.txt", compared(shown))


def test_methods_say_whom_they_can_protect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    row = {
        **{"travels": "B", "mean_exact": True, "lr": 0.005, "head_factor": 3.0},
        **{"trainable": 1, "bytes_up": 1, "paper": "p"},
    }
    rows = [{"name": "one", "units": ["none", "client", "person"], **row}, {"name": "two", "units": ["none"], **row}]
    show_methods("builtin/tiny", 8, rows)
    golden("secure_fed/terminal_methods.txt", capsys.readouterr().out)
