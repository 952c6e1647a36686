"""Calls of the command line that end with one sentence, which is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from secure_fed.commands.cli import main
from tests.golden import golden

Capsys = pytest.CaptureFixture[str]


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
