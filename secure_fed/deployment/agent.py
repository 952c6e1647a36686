"""A node's agent: the process that holds its identity, data, model and session keys, and answers envelopes over a socket.

    python -m secure_fed.deployment.agent FOLDER [--attended]

Only the folder's owner can open the socket. At most one agent runs for a folder. Envelopes are answered one after the other,
whoever delivers them: `node` checks their signatures. The agent loads the model once, for all rounds.
--attended: the agent ends with the process that started it, which has the other end of its standard input.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from secure_fed.deployment.envelope import Envelope, EnvelopeError, frames, read, refusal
from secure_fed.deployment.relay import LOCK, place
from secure_fed.errors import UsageError, plainly, reported

Answer = Callable[[Envelope], Envelope]
_SILENCE = 300.0  # seconds in which a connected peer neither sends nor reads


class AgentError(UsageError):
    """The agent cannot start."""


def serve(folder: Path, answer: Answer) -> None:
    """Answer envelopes until the process is asked to terminate. AgentError if another agent runs for the folder."""
    with _held(folder), _listening(folder) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                if _owner(connection) == os.getuid():
                    _answered(connection, answer)


def _answered(connection: socket.socket, answer: Answer) -> None:
    """Answer one envelope. A peer that disconnects or sends none is ignored."""
    connection.settimeout(_SILENCE)
    with suppress(OSError), connection.makefile("rb") as stream:
        try:
            asked = read(stream)
        except EnvelopeError as error:
            found = refusal(type(error).__name__, str(error))
        else:
            found = _judged(asked, answer)
        for part in frames(found):
            connection.sendall(part)


def _judged(asked: Envelope, answer: Answer) -> Envelope:
    """The answer. An unexpected error is described only in this process's log; the answer says only that one occurred."""
    try:
        return answer(asked)
    except Exception:
        traceback.print_exc()
        return refusal("AgentFailed", "the node's agent failed; its owner finds the reason in agent.log")


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder's lock, held as long as this process lives."""
    with plainly(AgentError, f"{folder} cannot be used", "give the folder of `secure-fed node init`"):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AgentError(f"another agent holds {folder}: end it first") from error
        yield
    finally:
        os.close(lock)


@contextmanager
def _listening(folder: Path) -> Iterator[socket.socket]:
    """A socket that only this user can open. The holder of the lock may replace an earlier agent's socket."""
    path = place(folder)
    with suppress(FileNotFoundError):
        os.unlink(path)
    before = os.umask(0o177)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with plainly(AgentError, f"{path} cannot be opened", "make the folder writable"):
            server.bind(path)
            server.listen(16)
    finally:
        os.umask(before)
    try:
        yield server
    finally:
        server.close()
        with suppress(FileNotFoundError):
            os.unlink(path)


def _owner(connection: socket.socket) -> int:
    """The user of the process at the other end; where the system cannot report it, the socket's mode already restricts it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])


def _end_with_input() -> None:
    """Terminate when the standard input ends."""
    while os.read(0, 1000):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """The entry point. Reports on standard error, in one sentence, why the agent cannot start."""

    def begin() -> None:
        from secure_fed.deployment.node import Node

        if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["--attended"]):
            raise AgentError("give the agent one folder, the folder that `secure-fed node init` made")
        folder = Path(sys.argv[1])
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if sys.argv[2:]:
            threading.Thread(target=_end_with_input, daemon=True).start()
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
        node = Node(folder)
        try:
            serve(folder, node.answer)
        finally:
            node.close()

    return reported(begin)


if __name__ == "__main__":
    sys.exit(main())
