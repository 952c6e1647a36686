"""The agent and the relay to it: one agent per folder, a socket that only its owner can use, and an answer to every request.

A node of two users: the agent's, who has key, ledger and data, and the SuperNode's, who runs what a SuperLink sends. There the
agent is the real one, in a process of its own. `tests/secure_fed/flower/test_two_users.py` has the same with Flower.
"""

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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from secure_fed.commands.cli import main
from secure_fed.deployment import agent, home, relay
from secure_fed.deployment.agent import LOG, AgentEnded, Shared, attended, serve
from secure_fed.deployment.envelope import Envelope, refusal
from secure_fed.deployment.home import HomeError, require_apart
from secure_fed.deployment.relay import AgentError
from tests.cells import chosen
from tests.secure_fed.deployment.parties import new_node
from tests.users import given_to, place, python, under

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


STATED = struct.pack("<I", 2) + b"{}" + struct.pack("<IH", 1, 1) + b"a" + struct.pack("<BBQ", 3, 1, 41)


@pytest.mark.parametrize(
    ("content", "answer"),
    [(b"\xff" * 8, b"too large"), (STATED, b"too large: all arrays: 41, above 40")],
    ids=["rubbish", "more than the next message may have"],
)
def test_no_more_is_read_than_the_next_message_may_have(folder: Path, content: bytes, answer: bytes) -> None:
    with serving(folder, doubled, most=lambda: ASKED.arrays["a"].nbytes):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(relay.place(folder / relay.SOCKET))
            peer.sendall(content)
            assert answer in peer.recv(1000)
        assert relay.ask(folder / relay.SOCKET, ASKED, 10).arrays["a"][1] == 2


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


# Two users.


AGENT, SUPERNODE, STRANGER = 64101, 64102, 64103  # users, each with a group of the same number
GROUP = 64110  # the SuperNode's primary group, and another one of the agent's
ASK = """
import sys
from pathlib import Path
from secure_fed.deployment import relay
from secure_fed.deployment.envelope import Envelope
print(relay.ask(Path(sys.argv[1]), Envelope(b'{"kind":"request"}'), 20).header.decode())
"""
TRY = """
import os, sys
for path in sys.argv[1:]:
    try:
        with open(path, "rb") as file:
            file.read(1)
        print("read", path)
    except OSError as error:
        print(error.strerror, path)
"""


@dataclass
class Node:
    """A node whose agent runs. process: of `secure-fed node agent`."""

    folder: Path
    at: Path
    data: Path
    process: subprocess.Popen[bytes]

    def ask(self, user: int, group: int, *others: int) -> str:
        """The agent's answer to a process of this user, or what the relay says in its place."""
        command = [python(), "-c", ASK, str(self.at)]
        done = subprocess.run(command, **under(user, group, *others), capture_output=True, text=True, timeout=60)
        return done.stdout


def node(folder: Path) -> Path:
    """A node's folder and its data, as `secure-fed node init` leaves them."""
    (folder / "data").mkdir(mode=0o700)
    train = folder / "data" / "own.csv"
    train.write_text("text,label\na,b\n")
    made = home.new_node(folder / "node", name="n", train=[str(train)], coordinator="-".join(["abcd"] * 10))
    return made.folder


@pytest.fixture(scope="module")
def running() -> Iterator[Node]:
    python()
    with place() as folder:
        own, at = node(folder), folder / "run" / "agent.sock"
        for name in (home.LEDGER, "journal.jsonl"):
            (own / name).write_text("x")
        (folder / "run").mkdir()
        given_to(AGENT, AGENT, own, folder / "data", folder / "run")
        command = [python(), "-m", "secure_fed", "node", "agent", str(own), "--socket", str(at)]
        output = folder / "output"
        with output.open("wb") as log:
            users = under(AGENT, AGENT, GROUP)
            process = subprocess.Popen([*command, "--group", str(GROUP)], **users, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 120
            while "the agent listens" not in output.read_text():
                assert process.poll() is None, output.read_text()
                assert time.monotonic() < until
                time.sleep(0.1)
            yield Node(own, at, folder / "data" / "own.csv", process)
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.slow
def test_the_agent_answers_the_supernodes_user(running: Node) -> None:
    assert "takes part in no federation" in running.ask(SUPERNODE, GROUP)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("user", "groups", "why"),
    [
        (STRANGER, (STRANGER,), "the socket's mode"),
        (STRANGER, (STRANGER, GROUP), "the socket's mode lets him in, and his primary group does not"),
        (0, (0,), "no mode stops him, and his primary group does"),
        (AGENT, (AGENT, GROUP), "the agent's own user could read the key"),
        (AGENT, (GROUP,), "the agent's own user could read the key, whatever the group"),
    ],
)
def test_the_agent_answers_nobody_else(running: Node, user: int, groups: tuple[int, ...], why: str) -> None:
    assert relay.UNREACHABLE in running.ask(user, *groups), why


@pytest.mark.slow
def test_the_supernodes_user_reads_neither_key_ledger_nor_data(running: Node) -> None:
    ours = [path for path in running.folder.rglob("*") if path.is_file()]
    assert {home.IDENTITY, home.LEDGER, home.NODE, "agent.log"} <= {path.name for path in ours}
    (child,) = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    of_processes = [
        Path(f"/proc/{pid}/{name}") for pid in (running.process.pid, child) for name in ("mem", "environ", "maps")
    ]
    paths = [*map(str, [*ours, running.data, *of_processes])]
    done = subprocess.run([python(), "-c", TRY, *paths], **under(SUPERNODE, GROUP), capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"Permission denied {path}" for path in paths]
    owner = subprocess.run([python(), "-c", TRY, *paths[:3]], **under(AGENT, AGENT), capture_output=True, text=True)
    assert owner.stdout.splitlines() == [f"read {path}" for path in paths[:3]]


@pytest.mark.slow
def test_the_supernodes_user_cannot_put_another_socket_in_the_agents_place(running: Node) -> None:
    code = "import os, sys; os.unlink(sys.argv[1])"
    done = subprocess.run([python(), "-c", code, str(running.at)], **under(SUPERNODE, GROUP), capture_output=True)
    assert b"PermissionError" in done.stderr


def connect(folder: Path, at: Path) -> list[str]:
    options = ["--agent", str(at), "--superlink", "127.0.0.1:1", "--insecure"]
    return ["node", "connect", str(folder / "supernode"), *options]


@pytest.mark.slow
def test_a_supernode_under_the_agents_user_does_not_start(running: Node, tmp_path: Path) -> None:
    command = [python(), "-m", "secure_fed", *connect(Path("/tmp/sf-none"), running.at)]
    done = subprocess.run(command, **under(AGENT, GROUP), capture_output=True, text=True, timeout=60)
    assert (done.returncode, "of its own" in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_a_supernode_says_what_it_waits_for(running: Node) -> None:
    with place() as folder:
        given_to(STRANGER, STRANGER, folder)
        for groups, said in (((STRANGER,), "Permission denied"), ((STRANGER, GROUP), f"for the group {GROUP}")):
            command = [python(), "-m", "secure_fed", *connect(folder, running.at)]
            users = under(STRANGER, *groups)
            with subprocess.Popen(command, **users, stderr=subprocess.PIPE, text=True) as process:
                assert process.stderr is not None
                assert said in process.stderr.readline()
                process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("opened", chosen(["data/own.csv", "node"], ["node"]))
def test_an_agent_whose_files_the_others_can_read_does_not_start(opened: str) -> None:
    with place() as folder:
        own = node(folder)
        for path in {folder / opened, (folder / opened).parent}:
            path.chmod(0o755)
        options = ["--socket", str(folder / "run" / "agent.sock"), "--group", str(GROUP)]
        command = [sys.executable, "-m", "secure_fed", "node", "agent", str(own), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, "chmod go-rwx" in done.stderr) == (2, True), done.stderr


def test_files_are_apart_by_their_own_modes_or_those_above() -> None:
    with place() as folder:
        inner = folder / "inner"
        inner.mkdir()
        path = inner / "file"
        path.touch()
        group = path.stat().st_gid
        for above, mode, whose, apart in [
            (0o755, 0o644, GROUP, False),
            (0o700, 0o644, GROUP, True),
            (0o755, 0o600, GROUP, True),
            (0o755, 0o640, GROUP, True),
            (0o755, 0o640, group, False),
            (0o750, 0o644, GROUP, True),
            (0o750, 0o644, group, False),
            (0o711, 0o644, GROUP, False),
        ]:
            inner.chmod(above)
            path.chmod(mode)
            if apart:
                require_apart([path], whose)
            else:
                with pytest.raises(HomeError) as raised:
                    require_apart([path], whose)
                assert raised.value.setting == "--group"


def test_a_group_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "agent", str(tmp_path), "--socket", str(tmp_path / "s"), "--group", "no such group"]) == 2
    assert "groupadd" in capsys.readouterr().err


def test_a_socket_goes_into_no_folder_of_another_user() -> None:
    python()
    raised: list[AgentError] = []
    with place() as folder:
        (folder / "run").mkdir()
        os.chown(folder / "run", STRANGER, STRANGER)

        def start() -> None:
            try:
                serve(folder, lambda asked: asked, Shared(folder / "run" / "agent.sock", GROUP))
            except AgentError as error:
                raised.append(error)

        thread = threading.Thread(target=start, daemon=True)
        thread.start()
        thread.join(20)
        assert "belongs to another user" in str(raised)
