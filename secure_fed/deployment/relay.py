"""The connection from a node's message receiver to the node's agent, over a socket in the node's folder.

Needs no torch and no key: a process may be started for each message, by code from third parties. Errors of the connection are
printed for the node's owner, on standard error. The coordinator gets a sentence without the node's paths.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from secure_fed.deployment.envelope import Envelope, EnvelopeError, frames, read, refusal

SOCKET, LOCK, LOG = "agent.sock", "agent.lock", "agent.log"
_STARTING = 120.0  # seconds until a new agent listens
_LONGEST = 107  # bytes of a socket's path, a limit of the system
UNREACHABLE = "this node's agent gave no answer; its owner finds the reason in the SuperNode's log"


class NoAgent(EnvelopeError):  # noqa: N818 - named for the missing process
    """The node's agent is not running."""


def ask(folder: Path, envelope: Envelope, seconds: float) -> Envelope:
    """The agent's answer; a refusal if there is none within `seconds`. Starts the agent if it is not running."""
    try:
        return _exchanged(folder, envelope, seconds)
    except NoAgent:
        pass
    except (EnvelopeError, OSError) as error:
        return unreachable("NoAnswer", error)
    try:
        started(folder)
        return _exchanged(folder, envelope, seconds)
    except (EnvelopeError, OSError) as error:
        return unreachable("NoAgent", error)


def unreachable(kind: str, error: Exception) -> Envelope:
    """The refusal that leaves the node; the reason, which may name the owner's folders, is printed."""
    print(f"secure-fed: the node's agent gave no answer: {error or type(error).__name__}", file=sys.stderr, flush=True)
    return refusal(kind, UNREACHABLE)


def running(folder: Path) -> bool:
    """Whether an agent runs for this folder."""
    try:
        with open(folder / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def listens(folder: Path) -> bool:
    """Whether an agent accepts connections."""
    try:
        with _connected(folder):
            return True
    except OSError:
        return False


def started(folder: Path) -> None:
    """Start an agent that outlives this process, and wait until it listens. NoAgent, with one sentence, if it does not."""
    log = folder / LOG
    with open(log, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as output:
        command = [sys.executable, "-m", "secure_fed.deployment.agent", str(folder)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    until = time.monotonic() + _STARTING
    while time.monotonic() < until:
        if listens(folder):
            return
        if process.poll() is not None and not running(folder):  # a second agent ends in favour of the first
            raise NoAgent(f"it ended with status {process.returncode}, and {log.name} in its folder says why")
        time.sleep(0.1)
    raise NoAgent(f"it did not listen within {_STARTING:g} s, and {log.name} in its folder may say why")


def place(folder: Path) -> str:
    """The path of the agent's socket."""
    path = str((folder / SOCKET).absolute())
    if len(os.fsencode(path)) > _LONGEST:
        raise NoAgent(
            f"the path {path} is longer than the {_LONGEST} bytes of a socket's: move the folder to a shorter one"
        )
    return path


def _connected(folder: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(place(folder))
    except BaseException:
        made.close()
        raise
    return made


def _exchanged(folder: Path, envelope: Envelope, seconds: float) -> Envelope:
    try:
        connection = _connected(folder)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NoAgent("no agent listens") from error
    with connection:
        connection.settimeout(seconds)
        for part in frames(envelope):
            connection.sendall(part)
        with connection.makefile("rb") as stream:
            return read(stream)
