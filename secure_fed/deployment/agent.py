"""A node's agent: the process that holds its identity, data, model and session keys, and answers envelopes over a socket.

    python -m secure_fed.deployment.agent FOLDER [--socket FILE --group GROUP] [--attended]

At most one agent runs for a folder. Envelopes are answered one after the other, whoever delivers them: `node` checks their
signatures. The agent loads the model once, for all rounds.

Without --socket the socket is in the node's folder, and processes of the agent's own user alone may open it. With --socket it
is elsewhere, and processes of *other* users alone, whose primary group is GROUP. That is the way of a node in operation: the
processes that run a SuperLink's code then have a user of their own, who can read neither key, ledger nor data.

--attended: the agent ends with the process that started it, which has the other end of its standard input. `attended` starts
such an agent. Its output goes to agent.log in the node's folder, which the owner alone can read: errors may quote the data.
"""

from __future__ import annotations

import argparse
import grp
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from secure_fed.activity import activity
from secure_fed.deployment import relay
from secure_fed.deployment.envelope import MOST_BYTES, Envelope, EnvelopeError, frames, read, refusal
from secure_fed.deployment.home import Home, require_apart
from secure_fed.deployment.relay import SOCKET, AgentError, held, place
from secure_fed.errors import SecureFedError, plainly, reported
from secure_fed.runs.durable import owners_alone

Answer = Callable[[Envelope], Envelope]
LOG = "agent.log"
AGENT = (sys.executable, "-m", "secure_fed.deployment.agent")  # the command of an agent, before its folder
_KNOWS_PEERS = hasattr(socket, "SO_PEERCRED")
_log = logging.getLogger(__name__)
_SILENCE = 15.0  # seconds in which a connected peer neither sends nor reads
_MOST_LOG = 10_000_000  # bytes of a log, before it is put aside: ".1" is appended to its name


class AgentEnded(SecureFedError):  # noqa: N818 - a state
    """The agent cannot start, or ended on its own."""


@dataclass(frozen=True)
class Shared:
    """A socket for processes of other users. at: its path, in a folder of the agent's user. group: the primary group of these
    processes, by number.
    """

    at: Path
    group: int

    @classmethod
    def of(cls, at: Path, group: str) -> Shared:
        """group: its name, or its number. AgentError if the system has no such group."""
        try:
            return cls(at.absolute(), int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid)
        except KeyError as error:
            wrong = AgentError(f"--group is {group!r:.80}, and this system has no such group: make it with groupadd")
            raise wrong.about("--group", group, "a group of this system") from error


def serve(
    folder: Path, answer: Answer, shared: Shared | None = None, most: Callable[[], int] = lambda: MOST_BYTES
) -> None:
    """Answer envelopes until the process is asked to terminate. AgentError if another agent runs for the folder.

    most: the bytes that the arrays of the next envelope may have. No more is read before its signature is checked.
    """
    refused: set[tuple[int, int]] = set()
    if shared and not _KNOWS_PEERS:
        raise AgentError("this system does not report the user behind a connection: run a node of two users on Linux")
    with held(folder), _listening(folder, shared) as server, activity("this node answers requests; Ctrl-C ends it"):
        while True:
            connection, _ = server.accept()
            with connection:
                user, group = _peer(connection)
                mine = user == os.getuid()
                if mine if shared is None else not mine and group == shared.group:
                    _answered(connection, answer, most())
                elif not mine and (user, group) not in refused:
                    refused.add((user, group))
                    _log.warning("refused: a process of the user %d whose primary group is %d", user, group)


def _answered(connection: socket.socket, answer: Answer, most: int) -> None:
    """Answer one envelope. A peer that disconnects or sends none is ignored.

    An unexpected error is described only in this process's log; the answer says only that one occurred.
    """
    connection.settimeout(_SILENCE)
    with suppress(OSError), connection.makefile("rb") as stream:
        try:
            asked = read(stream, most)
        except EnvelopeError as error:
            found = refusal(type(error).__name__, str(error))
        else:
            try:
                found = answer(asked)
            except Exception:
                traceback.print_exc()
                found = refusal("AgentFailed", "the node's agent failed; its owner finds the reason in agent.log")
        for part in frames(found):
            connection.sendall(part)


@contextmanager
def _listening(folder: Path, shared: Shared | None) -> Iterator[socket.socket]:
    """A socket that nobody may open but the users that it is for. The holder of the lock may replace an earlier agent's."""
    at = shared.at if shared else folder / SOCKET
    path = place(at)
    with plainly(AgentError, f"{path} cannot be opened", "name a socket in a folder of the agent's user"):
        if shared:
            _own_folder(at.parent, shared.group)
        with suppress(FileNotFoundError):
            os.unlink(path)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            server.bind(path)
        finally:
            os.umask(before)
        if shared:
            os.chown(path, -1, shared.group)
            os.chmod(path, 0o660)
        server.listen(16)
    try:
        yield server
    finally:
        server.close()
        with suppress(FileNotFoundError):
            os.unlink(path)


def _own_folder(folder: Path, group: int) -> None:
    """The folder of a shared socket, made if it is missing: the group may look names up in it, and change nothing."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise AgentError(
            f"the folder {folder} belongs to another user, who could put a socket of his own there: name another"
        )
    try:
        os.chown(folder, -1, group)
    except PermissionError as error:
        raise AgentError(
            f"the agent's user is not in the group {group}, and cannot give it the socket: add him with usermod -aG"
        ) from error
    folder.chmod(0o710)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """User and primary group of the process at the other end, from the system. Where it cannot report them, only this user can
    have opened the socket, by its mode.
    """
    if not _KNOWS_PEERS:
        return os.getuid(), os.getgid()
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, group = struct.unpack("3i", found)
    return user, group


def main() -> int:
    """The entry point. Reports on standard error, in one sentence, why the agent cannot start."""

    def begin() -> None:
        from secure_fed.deployment.node import Node

        parser = argparse.ArgumentParser(prog="agent")
        parser.add_argument("folder", type=Path)
        parser.add_argument("--socket", type=Path)
        parser.add_argument("--group")
        parser.add_argument("--attended", action="store_true")
        given = parser.parse_args()
        shared = Shared.of(given.socket, given.group) if given.socket else None
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        os.umask(0o077)  # databases and records: for their owner alone
        if given.attended:
            threading.Thread(target=_end_with_input, daemon=True).start()
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
        node = Node(given.folder)
        try:
            serve(given.folder, node.answer, shared, lambda: node.most)
        finally:
            node.close()

    return reported(begin)


def _end_with_input() -> None:
    """Terminate when the standard input ends."""
    while os.read(0, 1000):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def attended(folder: Path, shared: Shared | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of a node's folder, from when it listens until the block ends. AgentEnded gives the reason if it cannot start;
    HomeError, if the users for whom the socket is shared could read the folder or the data.
    """
    home, folder = Home.load(folder), folder.absolute()
    if relay.running(folder):
        raise AgentEnded(f"an agent runs in {folder} already: end that node first")
    if shared:
        require_apart([folder, *home.train, *home.non_members], shared.group)
    print(f"secure-fed: node {home.name}, agent starts", file=sys.stderr, flush=True)
    apart = ["--socket", str(shared.at), "--group", str(shared.group)] if shared else []
    log = folder / LOG
    with open(log, "ab", opener=owners_alone) as output:
        command = [*AGENT, str(folder), *apart, "--attended"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        while not relay.listens(shared.at if shared else folder / relay.SOCKET):
            require_alive(process, log)
            time.sleep(0.05)
        yield process
    finally:
        ended(process)


def require_alive(process: subprocess.Popen[bytes], log: Path) -> None:
    """AgentEnded, with the agent's last line, if it ended; the exit status is the agent's."""
    if process.poll() is not None:
        lines = log.read_text(errors="replace").strip().splitlines()
        error = AgentEnded((lines[-1] if lines else "the agent ended").removeprefix("secure-fed: "))
        error.exit_code = 2 if process.returncode == 2 else 1
        raise error


def run(folder: Path, shared: Shared) -> None:
    """Run the agent, for a SuperNode under another user, until this process is asked to terminate."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with attended(folder, shared) as process:
        print(f"secure-fed: the agent listens at {shared.at}", file=sys.stderr, flush=True)
        while process.poll() is None:
            rotate(folder / LOG)
            time.sleep(1)
        raise AgentEnded(f"the node's agent ended with status {process.returncode}; {folder / LOG} says why")


def ended(process: subprocess.Popen[bytes], *, group: bool = False) -> None:
    """End a process, or its whole group: first by a request, then by force."""
    for how, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        try:
            (os.killpg if group else os.kill)(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
            if not group:
                return
        except subprocess.TimeoutExpired:
            continue


def rotate(log: Path) -> None:
    """Put a long log aside, by copying: its writers, who append, go on with the empty file."""
    with suppress(OSError):
        if log.stat().st_size > _MOST_LOG:
            aside = log.with_name(f"{log.name}.1")
            with open(log, "rb") as old, open(aside, "wb", opener=owners_alone) as new:
                shutil.copyfileobj(old, new)
            os.truncate(log, 0)


if __name__ == "__main__":
    sys.exit(main())
