"""Calls of the command line: the facts that they print, and those that end with one sentence, which is kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from secure_fed.commands.cli import main
from tests.golden import golden

Capsys = pytest.CaptureFixture[str]


def facts_of(call: Sequence[object], capsys: Capsys, status: int = 0, said: str = "") -> dict[str, Any]:
    """What the call prints with --json. It ends with this exit status and says this, among others, on standard error."""
    capsys.readouterr()
    assert main([*map(str, call), "--json"]) == status
    printed = capsys.readouterr()
    assert said in printed.err
    found: dict[str, Any] = json.loads(printed.out, parse_constant=pytest.fail)
    return found


def shown_by(call: Sequence[object], capsys: Capsys) -> str:
    """What the call prints, without line breaks. It ends with exit status 0."""
    capsys.readouterr()
    assert main([*map(str, call)]) == 0
    return " ".join(capsys.readouterr().out.split())


def refusals(name: str, calls: Iterable[Sequence[object]], capsys: Capsys, *, hide: str | None = None) -> None:
    """Every call ends with exit status 2 and one sentence: its line of `tests/golden/attacks/NAME.txt`. hide: as `golden`."""
    told = []
    for call in calls:
        capsys.readouterr()
        assert main([str(part) for part in call]) == 2, call
        said = capsys.readouterr().err
        assert "Traceback" not in said, said
        told.append(said.splitlines()[-1])
    golden(f"attacks/{name}.txt", "\n".join(told) + "\n", hide=hide)
