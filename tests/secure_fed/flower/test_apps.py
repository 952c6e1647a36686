"""The apps without Flower's processes: a node answers what its agent does, and the coordinator notes how its run ended."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from privacy.errors import BudgetExhausted
from secure_fed.deployment import relay
from secure_fed.deployment.coordinator import Settings
from secure_fed.deployment.envelope import Envelope
from secure_fed.deployment.home import ENDED
from secure_fed.deployment.messages import Refusal, decode
from secure_fed.errors import ConfigError, ModelError
from secure_fed.flower import coordinator_app, node_app
from secure_fed.flower.carrier import packed, unpacked
from secure_fed.flower.coordinator_app import RunFailed, of_run_config

ENVELOPE = Envelope(b'{"kind":"end"}')


@pytest.fixture(autouse=True)
def _task(flower_task: None) -> None:
    """Sets a task identity, so that messages can be created."""


def asked(content: RecordDict, agent: Any = "/srv/clinic/agent.sock") -> Envelope:
    """The app's answer to a message with this content, at a node whose agent has this socket."""
    config = {} if agent is None else {node_app.AGENT: agent}
    context = Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config={})
    message = Message(content, 2, "query.secure_fed", ttl=7.0)
    return unpacked(node_app.app(message, context).content)


def refused(envelope: Envelope) -> Refusal:
    found = decode(envelope)
    assert isinstance(found, Refusal)
    return found


def test_the_agent_of_the_owners_folder_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    answer = Envelope(b'{"kind":"ended"}')
    monkeypatch.setattr(relay, "ask", lambda *given: seen.append(given) or answer)
    assert asked(packed(ENVELOPE)) == answer
    assert seen == [(Path("/srv/clinic/agent.sock"), ENVELOPE, 7.0)]


def test_what_is_no_envelope_does_not_reach_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "ask", lambda *_: pytest.fail("the agent was asked"))
    assert "not one of secure-fed's" in refused(asked(RecordDict())).sentence


@pytest.mark.parametrize("agent", [None, "", 3])
def test_a_node_without_an_agent_says_so_to_its_owner(agent: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(asked(packed(ENVELOPE), agent)).sentence == relay.UNREACHABLE
    assert "without secure-fed-agent in its --node-config" in capsys.readouterr().err


def test_what_goes_wrong_leaves_the_node_without_its_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: Any) -> Envelope:
        raise PermissionError(13, "Permission denied", "/home/clinic/agent.sock")

    monkeypatch.setattr(relay, "ask", ask)
    assert refused(asked(packed(ENVELOPE))) == Refusal("PermissionError", relay.UNREACHABLE)
    assert "/home/clinic/agent.sock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "error"), [("no folder/agent.sock", "NoAgent"), ("a" * 120, "NoAgent"), ("file/agent.sock", "NoAnswer")]
)
def test_an_agent_that_cannot_be_reached_leaves_the_node_without_its_paths(
    tmp_path: Path, name: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real relay: to a socket that is not there, to one whose path is too long, and to a file in a file's place."""
    (tmp_path / "file").touch()
    assert refused(asked(packed(ENVELOPE), str(tmp_path / name))) == Refusal(error, relay.UNREACHABLE)
    assert "secure-fed: the node's agent gave no answer: " in capsys.readouterr().err


def test_the_process_of_a_message_loads_no_torch() -> None:
    code = "import sys, secure_fed.flower.node_app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# The coordinator's.


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
    def conduct(*_: Any) -> tuple[None, str]:
        if error:
            raise error
        return None, "south did not confirm"

    monkeypatch.setattr(coordinator_app, "conduct", conduct)
    monkeypatch.setattr(GivenContext, "run_config", {"coordinator": str(tmp_path)})
    with pytest.raises(RunFailed) if error else nullcontext():
        coordinator_app.app(None, GivenContext())  # type: ignore[arg-type]
    logging.getLogger("flwr").removeFilter(coordinator_app.in_one_sentence)
    kept = json.loads((tmp_path / ENDED).read_text())
    assert kept == {"status": status, "sentence": str(error or "south did not confirm")}
