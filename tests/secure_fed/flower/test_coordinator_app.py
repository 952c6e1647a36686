"""The ServerApp without Flower's processes: its run-config and its failures."""

from __future__ import annotations

import io
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from privacy.errors import BudgetExhausted
from secure_fed.deployment.coordinator import Settings
from secure_fed.deployment.home import ENDED
from secure_fed.errors import ConfigError, ModelError
from secure_fed.flower import coordinator_app
from secure_fed.flower.coordinator_app import RunFailed, of_run_config


class GivenContext:
    run_config = {"coordinator": "/srv/coordinator"}  # noqa: RUF012


def test_every_key_is_read() -> None:
    given = {"coordinator": "/srv/c", "deadline": 60, "wait": 0.5, "too-few": "lose"}
    assert of_run_config(given) == (Path("/srv/c"), Settings(deadline=60.0, wait=0.5, too_few="lose"))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "coordinator"),
        ({"coordinator": "relative"}, "relative"),
        ({"coordinator": 3}, "3"),
        ({"coordinator": "/c", "deadline": 0}, "deadline"),
        ({"coordinator": "/c", "deadline": "60"}, "deadline"),
        ({"coordinator": "/c", "deadline": True}, "deadline"),
        ({"coordinator": "/c", "deadline": float("nan")}, "deadline"),
        ({"coordinator": "/c", "wait": -1}, "wait"),
        ({"coordinator": "/c", "too-few": "stop"}, "too-few"),
        ({"coordinator": "/c", "too_few": "lose"}, "too_few"),
    ],
)
def test_a_run_config_that_is_wrong_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        of_run_config(given)


@pytest.mark.parametrize("error", [ModelError("the base model is another"), OSError(28, "No space left"), None])
def test_a_run_that_fails_is_logged_in_one_sentence(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower logs the exception at its own logger. A known failure is logged as one sentence; a bug keeps its stack trace."""

    def conduct(*_: Any) -> None:
        raise error or RuntimeError("a bug")

    monkeypatch.setattr(coordinator_app, "conduct", conduct)
    flower, written = logging.getLogger("flwr"), io.StringIO()
    handler = logging.StreamHandler(written)
    flower.addHandler(handler)
    try:
        with pytest.raises(RunFailed if error else RuntimeError) as raised:
            coordinator_app.app(None, GivenContext())  # type: ignore[arg-type]
        flower.error("%s raised an exception", "ServerApp", exc_info=raised.value)
    finally:
        flower.removeHandler(handler)
        flower.removeFilter(coordinator_app.in_one_sentence)
    assert ("Traceback" in written.getvalue()) == (error is None)
    if error:
        assert written.getvalue() == f"secure-fed: {error}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 0), (OSError(28, "No space left"), 1), (ModelError("another"), 2), (BudgetExhausted("spent"), 3)],
)
def test_the_folder_keeps_how_the_run_ended(
    error: Exception | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conduct(*_: Any) -> None:
        if error:
            raise error

    monkeypatch.setattr(coordinator_app, "conduct", conduct)
    monkeypatch.setattr(GivenContext, "run_config", {"coordinator": str(tmp_path)})
    with pytest.raises(RunFailed) if error else nullcontext():
        coordinator_app.app(None, GivenContext())  # type: ignore[arg-type]
    logging.getLogger("flwr").removeFilter(coordinator_app.in_one_sentence)
    kept = json.loads((tmp_path / ENDED).read_text())
    assert kept == {"status": status, "sentence": str(error) if error else ""}
