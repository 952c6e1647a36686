"""The connection from a node's message receiver to the node's agent: a socket of the system, and a lock that the agent holds.

Needs no torch and no key: a process is started for each message, by code from third parties, under a user who may read neither.
Errors of the connection are printed for the node's owner, on standard error. The coordinator gets a sentence without the node's
paths.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from secure_fed.deployment.envelope import Envelope, EnvelopeError, frames, read, refusal
from secure_fed.errors import UsageError, plainly

SOCKET, LOCK = "agent.sock", "agent.lock"
_LONGEST = 107  # bytes of a socket's path, a limit of the system
UNREACHABLE = "this node's agent gave no answer; its owner finds the reason in the SuperNode's log"


class AgentError(UsageError):
    """The agent cannot start."""


class HeldError(AgentError):
    """Another process holds the node's folder, for now."""

    exit_code = 1


class NoAgent(EnvelopeError):  # noqa: N818 - named for the missing process
    """The node's agent cannot be reached."""


def ask(at: Path, envelope: Envelope, seconds: float) -> Envelope:
    """The answer of the agent whose socket is `at`; a refusal if there is none within `seconds`."""
    try:
        with _connected(at) as connection:
            connection.settimeout(seconds)
            for part in frames(envelope):
                connection.sendall(part)
            with connection.makefile("rb") as stream:
                return read(stream)
    except NoAgent as error:
        return unreachable("NoAgent", error)
    except (EnvelopeError, OSError) as error:
        return unreachable("NoAnswer", error)


def unreachable(kind: str, error: Exception) -> Envelope:
    """The refusal that leaves the node; the reason, which may name the owner's folders, is printed."""
    print(f"secure-fed: the node's agent gave no answer: {error or type(error).__name__}", file=sys.stderr, flush=True)
    return refusal(kind, UNREACHABLE)


def listens(at: Path) -> bool:
    """Whether an agent accepts connections at this socket."""
    try:
        with _connected(at):
            return True
    except (NoAgent, OSError):
        return False


def _connected(at: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(place(at))
    except BaseException as error:
        made.close()
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            raise NoAgent("no agent listens") from error
        raise
    return made


def place(at: Path) -> str:
    """The path of a socket, as the system takes it. NoAgent if it is too long."""
    path = str(at.absolute())
    if len(os.fsencode(path)) > _LONGEST:
        raise NoAgent(
            f"the path {path} is longer than the {_LONGEST} bytes of a socket's: choose a folder with a shorter one"
        )
    return path


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder's lock, held until the block or this process ends."""
    with plainly(AgentError, f"{folder} cannot be used", "give the folder of `secure-fed node init`"):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HeldError(f"another agent holds {folder}, or `secure-fed node release` does: end it first") from error
        yield
    finally:
        os.close(lock)


def running(folder: Path) -> bool:
    """Whether an agent runs for this node's folder."""
    try:
        with open(folder / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True
