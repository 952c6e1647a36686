"""No run here is probed before it trains: test_hopeless.py has the tests of probes."""

from __future__ import annotations

import pytest

from secure_fed.runs import run


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "probe", lambda assembly: None)
