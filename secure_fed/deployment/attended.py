"""A node's agent as a process of its own that ends with this one.

Its output goes to agent.log in the node's folder, which the owner alone can read: errors may quote the data.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from secure_fed.deployment import relay
from secure_fed.deployment.agent import Shared
from secure_fed.deployment.home import Home
from secure_fed.deployment.home_files import require_apart
from secure_fed.errors import SecureFedError

LOG = "agent.log"
AGENT = (sys.executable, "-m", "secure_fed.deployment.agent")  # the command of an agent, before its folder


class AgentEnded(SecureFedError):  # noqa: N818 - a state
    """The agent cannot start, or ended on its own."""


@contextmanager
def attended(folder: Path, shared: Shared | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of a node's folder, from when it listens until the block ends. AgentEnded gives the reason if it cannot start;
    HomeError, if the users for whom the socket is shared could read the folder or the data.
    """
    home, folder = Home.load(folder), folder.absolute()
    if relay.running(folder):
        raise AgentEnded(f"an agent runs in {folder} already: end that node first")
    if shared:
        require_apart([folder, *home.train], shared.group)
    print(f"secure-fed: node {home.name}, agent starts", file=sys.stderr, flush=True)
    apart = ["--socket", str(shared.at), "--group", str(shared.group)] if shared else []
    log = folder / LOG
    with open(log, "ab", opener=private) as output:
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
        process.wait()
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


def private(name: str, flags: int) -> int:
    """An opener of files that their owner alone can read."""
    return os.open(name, flags, 0o600)
