"""Results as printed on a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secure_fed.report.terminal import show_methods, show_result
from tests.secure_fed.masked_edit import masked

PrivateEdit = Callable[..., Callable[[dict[str, Any]], None]]
RunFolder = Callable[..., Path]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """A function: run directory -> the printed table of its result."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(folder: Path) -> str:
        show_result(json.loads((folder / "result.json").read_text(encoding="utf-8")))
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        return printed

    return show


def test_a_guarantee_has_a_row_for_everything(
    shown: Callable[[Path], str], run_folder: RunFolder, private_edit: PrivateEdit
) -> None:
    lines = [" ".join(line.split()) for line in shown(run_folder(edit=private_edit())).splitlines()]
    for row in (
        "│ privacy │ epsilon 2.97 at delta 1e-05 │",
        "│ protects │ a client with everything it has │",
        "│ against participants │ epsilon 7.5 │",
        "│ releases │ 12 charged of 12 planned │",
        "│ spent in its ledger │ epsilon 2.97 of 3 │",
        "│ other runs │ not counted: this run has its own ledger │",
        "│ rounds │ 12, each with 4 of 8 clients expected │",
    ):
        assert row in lines
    assert "NOT PRIVATE" not in "".join(lines)


def test_injected_noise_is_not_private(
    shown: Callable[[Path], str], run_folder: RunFolder, private_edit: PrivateEdit
) -> None:
    printed = shown(run_folder(edit=private_edit(private=False)))
    assert printed.index("NOT PRIVATE") < printed.index("epsilon")


def test_an_unprotected_run_says_so(shown: Callable[[Path], str], run_folder: RunFolder) -> None:
    printed = shown(run_folder())
    assert "No differential privacy" in printed
    assert "epsilon" not in printed
    assert "expected" not in printed


def test_a_run_that_ended_early_says_why(
    shown: Callable[[Path], str], run_folder: RunFolder, private_edit: PrivateEdit
) -> None:
    def early(run: dict[str, Any]) -> None:
        private_edit()(run)
        run["result"]["ended_early"] = "the budget is spent"

    printed = shown(run_folder(edit=early))
    assert "ended early" in printed
    assert "the budget is spent" in printed


@pytest.mark.parametrize(
    ("case", "learns"),
    [
        ("nothing", "sums over at least 3 of 4 clients, without noise,"),
        ("coins", "sums over the clients drawn by coins, even a single one, without noise,"),
        ("central", "sums over the clients drawn by coins, even a single one, before it adds noise,"),
        ("central fixed", "sums over at least 3 of 4 clients, before it adds noise,"),
        ("distributed", "sums over at least 3 of 4 clients, with the clients' noise,"),
        ("hidden", "sums over at least 3 of 4 clients, with the clients' noise,"),
        ("local", "sums over at least 3 of 4 clients, with the clients' noise,"),
        ("example", "sums over at least 3 of 4 clients, made by noised training,"),
    ],
)
@pytest.mark.parametrize("active", [False, True])
def test_masks_say_what_the_server_learns_and_what_they_took(
    shown: Callable[[Path], str], run_folder: RunFolder, case: str, learns: str, active: bool
) -> None:
    words = " ".join(shown(run_folder(edit=masked(case, active=active))).replace("│", " ").split())
    assert f"secure aggregation the server learns only {learns}" in words
    assert ("even if it lies about keys or survivors" in words, "if it follows the protocol" in words) == (
        active,
        not active,
    )
    assert "bytes 14.8 MB up, 20.8 MB down, including the model" in words
    timed = case in ("nothing", "coins")  # a private run withholds its times
    assert ("time for masks 4.8 s of the clients, 114 ms of the server" in words) is timed
    assert ("expected" in words) is case.startswith("central")
    assert ("each with all 8 clients, about 4 of whom train" in words) == (case == "hidden")


def test_where_nobody_may_vanish_all_are_in_the_sum(shown: Callable[[Path], str], run_folder: RunFolder) -> None:
    assert "sums over all 4 clients" in shown(run_folder(edit=masked("nothing", least=4)))


def test_methods_say_whom_they_can_protect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    row = {
        "travels": "B",
        "mean_exact": True,
        "lr": 0.005,
        "head_factor": 3.0,
        "trainable": 1,
        "bytes_up": 1,
        "paper": "p",
    }
    rows = [{"name": "one", "units": ["none", "client", "group"], **row}, {"name": "two", "units": ["none"], **row}]
    show_methods("builtin/tiny", 8, rows)
    lines = capsys.readouterr().out.splitlines()
    assert "client, group" in next(line for line in lines if " one " in line)
    assert " none " in next(line for line in lines if " two " in line)
