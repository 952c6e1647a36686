"""The agent and the relay to it: one agent per folder, a socket that only its owner can use, and an answer to every request."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from secure_fed.deployment import agent, relay
from secure_fed.deployment.agent import LOG, AgentEnded, attended
from secure_fed.deployment.envelope import Envelope, refusal
from tests.secure_fed.deployment.parties import new_node

ASKED = Envelope(b'{"kind":"x"}', {"a": np.arange(5)})


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sf") as path:  # a socket's path has a length limit
        yield Path(path)


@contextmanager
def serving(folder: Path, answer: agent.Answer, **bounds: Any) -> Iterator[None]:
    thread = threading.Thread(target=agent.serve, args=(folder, answer), kwargs=bounds, daemon=True)
    thread.start()
    while not relay.listens(folder / relay.SOCKET):  # a socket exists before it accepts connections
        assert thread.is_alive()
    yield


def doubled(envelope: Envelope) -> Envelope:
    return Envelope(envelope.header, {"a": envelope.arrays["a"] * 2})


def test_an_envelope_is_answered_over_a_private_socket(folder: Path) -> None:
    with serving(folder, doubled):
        answer = relay.ask(folder / relay.SOCKET, ASKED, 10)
        assert answer.arrays["a"].tolist() == [0, 2, 4, 6, 8]
        assert stat.S_IMODE((folder / relay.SOCKET).stat().st_mode) == 0o600
        assert relay.running(folder)


def test_a_second_agent_is_refused(folder: Path) -> None:
    with serving(folder, doubled), pytest.raises(relay.AgentError, match="another agent holds"):
        agent.serve(folder, doubled)


def test_an_agent_that_fails_says_nothing_of_why(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fails(envelope: Envelope) -> Envelope:
        raise ValueError("a secret")

    with serving(folder, fails):
        for _ in range(2):  # a failure does not end the agent
            assert b"secret" not in relay.ask(folder / relay.SOCKET, ASKED, 10).header
    assert "a secret" in capfd.readouterr().err


def test_rubbish_is_answered_and_the_next_one_is_served(folder: Path) -> None:
    with serving(folder, doubled):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(relay.place(folder / relay.SOCKET))
            peer.sendall(b"\xff" * 8)
            assert b"too large" in peer.recv(1000)
        assert relay.ask(folder / relay.SOCKET, ASKED, 10).arrays["a"][1] == 2


def test_no_more_is_read_than_the_next_message_may_have(folder: Path) -> None:
    """A size that is only stated is refused, and nothing of it is read or made."""
    with serving(folder, doubled, most=lambda: ASKED.arrays["a"].nbytes):
        assert relay.ask(folder / relay.SOCKET, ASKED, 10).arrays["a"][1] == 2
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(relay.place(folder / relay.SOCKET))
            stated = struct.pack("<I", 2) + b"{}" + struct.pack("<IH", 1, 1) + b"a" + struct.pack("<BBQ", 3, 1, 41)
            peer.sendall(stated)
            assert b"too large: all arrays: 41, above 40" in peer.recv(1000)


def test_a_silent_peer_is_dropped_in_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agent._SILENCE <= 15
    monkeypatch.setattr(agent, "_SILENCE", 0.2)
    with serving(folder, doubled), socket.socket(socket.AF_UNIX) as peer:
        peer.connect(relay.place(folder / relay.SOCKET))
        peer.sendall(b"\x05\0")  # and no more
        assert relay.ask(folder / relay.SOCKET, ASKED, 10).arrays["a"][1] == 2


def test_a_long_log_is_put_aside_and_its_writer_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_MOST_LOG", 10)
    log = folder / LOG
    with open(log, "ab", buffering=0, opener=agent.owners_alone) as writer:
        writer.write(b"ten bytes.")
        agent.rotate(log)
        assert log.read_bytes() == b"ten bytes."
        writer.write(b"!")
        agent.rotate(log)
        writer.write(b"more")
    assert (log.read_bytes(), (folder / f"{LOG}.1").read_bytes()) == (b"more", b"ten bytes.!")
    assert stat.S_IMODE((folder / f"{LOG}.1").stat().st_mode) == 0o600


def test_an_agent_that_does_not_answer_in_time_is_a_refusal(folder: Path) -> None:
    held = threading.Event()

    def waits(envelope: Envelope) -> Envelope:
        held.wait(20)
        return envelope

    with serving(folder, waits):
        assert b"NoAnswer" in relay.ask(folder / relay.SOCKET, ASKED, 0.2).header
        held.set()


def test_no_agent_is_a_refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert relay.ask(folder / relay.SOCKET, ASKED, 10) == refusal("NoAgent", relay.UNREACHABLE)
    assert "no agent listens" in capsys.readouterr().err


@pytest.mark.nightly
def test_an_agent_that_cannot_start_says_why(folder: Path) -> None:
    own = new_node(folder)
    (own / relay.SOCKET).mkdir()  # it cannot be replaced
    with pytest.raises(AgentEnded, match="cannot be opened") as raised, attended(own):
        pass
    assert raised.value.exit_code == 2
    assert stat.S_IMODE((own / LOG).stat().st_mode) == 0o600
    (own / relay.SOCKET).rmdir()
    with serving(own, doubled), pytest.raises(AgentEnded, match="already"), attended(own):
        pass


@pytest.mark.nightly
def test_an_attended_agent_ends_with_whoever_started_it(folder: Path) -> None:
    new_node(folder)
    command = [sys.executable, "-m", "secure_fed.deployment.agent", str(folder / "n"), "--attended"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        while not relay.listens(folder / "n" / relay.SOCKET):
            assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    assert not (folder / "n" / relay.SOCKET).exists()


def test_a_folder_too_deep_for_a_socket_is_one_sentence(folder: Path) -> None:
    deep = folder / ("a" * 100)
    deep.mkdir()
    with pytest.raises(relay.NoAgent, match="longer than the 107 bytes"):
        relay.place(deep)


def test_the_relay_needs_no_torch() -> None:
    code = "import sys, secure_fed.deployment.relay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False).returncode == 0


def test_a_refusal_is_an_envelope() -> None:
    found = json.loads(refusal("NoAgent", 'with "quotes"').header)
    assert found == {"kind": "refused", "error": "NoAgent", "sentence": 'with "quotes"'}
