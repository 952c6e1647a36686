"""A node's processes: its agent and Flower's SuperNode beside it, until both are asked to terminate.

The SuperNode's output goes to flower.log in the node's folder; a failure to connect is reported in one sentence.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from secure_fed.deployment import relay
from secure_fed.deployment.home import Home
from secure_fed.errors import SecureFedError, UsageError

LOG = "flower.log"
AGENT = (sys.executable, "-m", "secure_fed.deployment.agent")  # the command of an agent, before its folder
_AGAIN = 5.0  # seconds before a SuperNode that lost its SuperLink is started again


class FlowerError(SecureFedError):
    """Flower's processes cannot be started, or ended on their own."""


class LinkError(UsageError):
    """The requested connection to a SuperLink is not possible."""


@dataclass(frozen=True)
class Link:
    """A connection to a SuperLink. port: the SuperNode's own on this machine, 0 for a free one."""

    superlink: str
    root_certificates: Path | None = None
    insecure: bool = False
    auth_key: Path | None = None
    port: int = 0

    def __post_init__(self) -> None:
        host, colon, port = self.superlink.rpartition(":")
        if not (host and colon and port.isdecimal()):
            raise LinkError(f"--superlink is {self.superlink!r}: give HOST:PORT, such as fed.example.org:8000")
        if self.insecure and (self.root_certificates or self.auth_key):
            raise LinkError("--insecure excludes the certificate and key, which are for TLS: leave one of them out")
        if not self.insecure and self.root_certificates is None:
            raise LinkError(
                "the connection has no certificate: give --root-certificates FILE, or --insecure for trials"
            )
        for path in (self.root_certificates, self.auth_key):
            if path is not None and not path.is_file():
                raise LinkError(f"{path} is not there: name the file of the certificate or key")

    def command(self, folder: Path, port: int) -> list[str]:
        """The command line of the SuperNode."""
        secured = ["--insecure"] if self.insecure else ["--root-certificates", str(self.root_certificates)]
        known = ["--auth-supernode-private-key", str(self.auth_key)] if self.auth_key else []
        own = ["--host", "127.0.0.1", "--port", str(port), "--node-config", f'secure-fed-home="{folder}"']
        return [_executable("flower-supernode"), *secured, *known, "--superlink", self.superlink, *own]


def run(folder: Path, link: Link) -> int:
    """Run the node until it is interrupted or asked to terminate. LinkError if it never reaches its SuperLink."""
    home, folder = Home.load(folder), folder.absolute()
    if relay.running(folder):
        raise FlowerError(f"an agent runs in {folder} already: end that node first")
    link.command(folder, 0)
    signal.signal(signal.SIGTERM, _ended)
    print(f"secure-fed: node {home.name}, agent starts", file=sys.stderr, flush=True)
    with _agent(folder) as agent:
        while True:
            ended = _connected(folder, link, agent)
            print(f"secure-fed: {ended}; connecting again", file=sys.stderr, flush=True)
            time.sleep(_AGAIN)


@contextmanager
def _agent(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The agent, ended with this process."""
    log = folder / relay.LOG
    with open(log, "ab", opener=_private) as output:
        command = [*AGENT, str(folder), "--attended"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        _await_agent(folder, process, log)
        yield process
    finally:
        _end(process)


def _await_agent(folder: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    while not relay.listens(folder):
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise FlowerError((lines[-1] if lines else "the agent ended").removeprefix("secure-fed: "))
        time.sleep(0.05)


def _connected(folder: Path, link: Link, agent: subprocess.Popen[bytes]) -> str:
    """Run the SuperNode until it ends. Returns the reason, if a restart is worthwhile."""
    port = link.port or _free_port()
    log = folder / LOG
    begun = log.stat().st_size if log.exists() else 0
    beside = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )  # Flower starts further processes itself
    environment = {**os.environ, "PATH": beside, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    with open(log, "ab", opener=_private) as output:
        process = subprocess.Popen(
            link.command(folder, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    told = ""
    try:
        while process.poll() is None:
            if agent.poll() is not None:
                raise FlowerError(
                    f"the node's agent ended with status {agent.returncode}; {folder / relay.LOG} says why"
                )
            if (state := _state(_since(log, begun))) != told and state:
                told = state
                print(f"secure-fed: {state}", file=sys.stderr, flush=True)
            time.sleep(0.2)
    finally:
        _end(process, group=True)
    return _judged(_since(log, begun), link, port, log)


def _state(text: str) -> str:
    """The state of the connection, from the SuperNode's output."""
    at, tries = text.rfind("SuperNode ID:"), text.rfind("Connection attempt failed")
    if at > tries:
        return "connected"
    return "the SuperLink does not answer yet; trying on" if tries >= 0 else ""


def _judged(text: str, link: Link, port: int, log: Path) -> str:
    """The reason why a SuperNode ended. LinkError where a restart would end in the same way."""
    for words, sentence in (
        (
            "CERTIFICATE_VERIFY_FAILED",
            f"the certificate of {link.superlink} is not signed by {link.root_certificates}, or is for another name or time: "
            "give --root-certificates the right authority, and check this machine's clock",
        ),
        (
            "code: 2001",
            f"{link.superlink} admits only known nodes: give --auth-key, and have the key registered there",
        ),
        (
            "code: 2004",
            f"{link.superlink} does not know the key {link.auth_key}: have its public half registered there",
        ),
        ("WRONG_VERSION_NUMBER", f"{link.superlink} does not speak TLS: ask its owner, or give --insecure for trials"),
        ("API failed to start", f"port {port} of this machine is taken: give another --port, or none"),
    ):
        if words in text:
            raise LinkError(sentence)
    if "SuperNode ID:" not in text:
        raise LinkError(f"the SuperNode could not reach {link.superlink}; {log} says why")
    return "the connection was lost"


def _since(log: Path, begun: int) -> str:
    with open(log, "rb") as file:
        file.seek(begun)
        return file.read().decode(errors="replace")


def _executable(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    if found := (str(beside) if beside.exists() else shutil.which(name)):
        return found
    raise LinkError("Flower is not installed on this machine: install secure-fed[flower]")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _ended(*_: object) -> None:
    sys.exit(0)


def _end(process: subprocess.Popen[bytes], *, group: bool = False) -> None:
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
