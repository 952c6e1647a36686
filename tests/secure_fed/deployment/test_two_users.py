"""A node of two users: the agent's, who has key, ledger and data, and the SuperNode's, who runs what a SuperLink sends.

The agent is the real one, in a process of its own. `tests/secure_fed/flower/test_two_users.py` has the same with Flower.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from secure_fed.commands.cli import main
from secure_fed.deployment import home, relay
from secure_fed.deployment.agent import Shared, serve
from secure_fed.deployment.home import HomeError, require_apart
from secure_fed.deployment.relay import AgentError
from tests.cells import chosen
from tests.users import given_to, place, python, under

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
