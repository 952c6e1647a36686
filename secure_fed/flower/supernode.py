"""Flower's SuperNode, for a node's agent: under a user of its own, or beside the agent.

A SuperNode runs whatever app its SuperLink sends, as the SuperNode's user. So a node in operation has two users, and an app
reads neither key, ledger nor data: `connect` here is one half, `deployment.agent.run` the other. `run` is both halves under
one user, for trials. The SuperNode's output goes to flower.log; a failure to connect is reported in one sentence.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from secure_fed.activity import activity
from secure_fed.deployment import relay
from secure_fed.deployment.agent import LOG as AGENT_LOG
from secure_fed.deployment.agent import attended, ended, rotate
from secure_fed.errors import SecureFedError, UsageError, plainly
from secure_fed.runs.durable import owners_alone

LOG = "flower.log"
_ONE_USER = (
    "secure-fed: agent and SuperNode run under one user, so an app that the SuperLink sends could read this node's key and "
    "data; in operation, give them two users: docs/deployment.md"
)
_KEPT = 100_000  # characters of a log that are looked at
_AGAIN = 5.0  # seconds before a SuperNode that lost its SuperLink is started again


class FlowerError(SecureFedError):
    """Flower's processes cannot be started, or ended on their own."""


class UntrustedError(FlowerError):
    """The SuperLink does not prove by TLS that it is the one that was named. Its owner can mend that, or this machine's."""

    exit_code = 6


class UnknownKeyError(FlowerError):
    """The SuperLink does not know this node's key. Its owner can mend that."""

    exit_code = 7


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

    def command(self, agent: Path, port: int) -> list[str]:
        """The command line of the SuperNode. agent: the socket of the node's agent."""
        beside = Path(sys.executable).with_name("flower-supernode")
        program = str(beside) if beside.exists() else shutil.which(beside.name)
        if not program:
            raise LinkError("Flower is not installed on this machine: install secure-fed[flower]")
        secured = ["--insecure"] if self.insecure else ["--root-certificates", str(self.root_certificates)]
        known = ["--auth-supernode-private-key", str(self.auth_key)] if self.auth_key else []
        own = ["--host", "127.0.0.1", "--port", str(port), "--node-config", f'secure-fed-agent="{agent}"']
        return [program, *secured, *known, "--superlink", self.superlink, *own]


def run(folder: Path, link: Link) -> None:
    """Run agent and SuperNode under this user until interrupted or asked to terminate. Other ends: `_judged`."""
    folder = folder.absolute()
    link.command(folder, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with attended(folder) as agent:
        print(_ONE_USER, file=sys.stderr, flush=True)

        def agent_lives() -> None:
            if agent.poll() is not None:
                raise FlowerError(
                    f"the node's agent ended with status {agent.returncode}; {folder / AGENT_LOG} says why"
                )
            rotate(folder / AGENT_LOG)

        _connected_always(folder, folder / relay.SOCKET, link, agent_lives)


def connect(folder: Path, agent: Path, link: Link) -> None:
    """Run a SuperNode under this user, for the agent of another user behind the socket `agent`, as `run`.

    folder: the SuperNode's own, made if it is missing: its log, and Flower's files. LinkError if the agent is this user's.
    """
    folder, agent = folder.absolute(), agent.absolute()
    link.command(agent, 0)
    os.umask(0o077)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with plainly(LinkError, f"{folder} cannot be used", "give a folder of this user"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.setdefault("FLWR_HOME", str(folder / "flwr"))
    said = ""
    with activity(f"waiting for the agent at {agent}"):
        while reason := _not_for_us(agent):
            if reason != said:
                print(f"secure-fed: waiting for the agent at {agent}: {reason}", file=sys.stderr, flush=True)
            said = reason
            time.sleep(1)
    _connected_always(folder, agent, link, lambda: None)


def _not_for_us(agent: Path) -> str:
    """The reason why this process cannot open the socket now; "" if it can. LinkError if the agent is this very user's."""
    try:
        found = agent.stat()
    except OSError as error:
        return f"{error.strerror}"
    if found.st_uid == os.geteuid():
        raise LinkError(
            f"the agent at {agent} runs under this user, whose files every app of the SuperLink can read: run the SuperNode "
            "under a user of its own"
        ).about("--agent", agent, "the socket of another user's agent")
    if found.st_gid != os.getegid():
        return f"it is for the group {found.st_gid}, and this process's primary group is {os.getegid()}"
    return ""


def _connected_always(folder: Path, agent: Path, link: Link, check: Callable[[], None]) -> NoReturn:
    """Run the SuperNode, again and again. check: called all the while; its exceptions end it."""
    while True:
        with activity("this node answers requests; Ctrl-C ends it"):
            reason = _connected(folder, agent, link, check)
        print(f"secure-fed: {reason}; connecting again", file=sys.stderr, flush=True)
        time.sleep(_AGAIN)


def _connected(folder: Path, agent: Path, link: Link, check: Callable[[], None]) -> str:
    """Run the SuperNode until it ends. Returns the reason, if a restart is worthwhile."""
    port = link.port or _free_port()
    log = folder / LOG
    tail = Tail(log)
    with open(log, "ab", opener=owners_alone) as output:
        process = subprocess.Popen(
            link.command(agent, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(),
            start_new_session=True,
        )
    told = ""
    try:
        while process.poll() is None:
            check()
            if (state := _state(tail.read())) != told and state:
                told = state
                print(f"secure-fed: {state}", file=sys.stderr, flush=True)
            rotate(log)
            time.sleep(0.2)
    finally:
        ended(process, group=True)
    return _judged(tail.read(), link, port, log, connected=told == "connected")


def environment(**more: str) -> dict[str, str]:
    """The environment of Flower's commands, which start further ones of this installation and report to nobody."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": beside, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", **more}


def _state(text: str) -> str:
    """The state of the connection, from the SuperNode's output."""
    at, tries = text.rfind("SuperNode ID:"), text.rfind("Connection attempt failed")
    if at > tries:
        return "connected"
    return "the SuperLink does not answer yet; trying on" if tries >= 0 else ""


def _judged(text: str, link: Link, port: int, log: Path, connected: bool = False) -> str:
    """The reason why a SuperNode ended, if it is connected again at once. connected: it was, lately.

    LinkError where a restart would end in the same way until somebody changes this command; FlowerError for everything else,
    with an exit status of its own where the SuperLink's owner has to act.
    """
    refused = re.search(r"certificate verify failed: ([^(\n]*\w)", text)
    for words, kind, sentence in (
        (
            "CERTIFICATE_VERIFY_FAILED",
            UntrustedError,
            f"the certificate of {link.superlink} is not accepted ({refused[1] if refused else 'it cannot be verified'}): give "
            "--root-certificates the authority that signed it, have it renewed, and check this machine's clock",
        ),
        (
            "WRONG_VERSION_NUMBER",
            UntrustedError,
            f"{link.superlink} does not speak TLS: ask its owner, or give --insecure for trials",
        ),
        (
            "code: 2001",
            LinkError,
            f"{link.superlink} admits only known nodes: give --auth-key, and have the key registered there",
        ),
        (
            "code: 2004",
            UnknownKeyError,
            f"{link.superlink} does not know the key {link.auth_key}: have its public half registered there",
        ),
        ("API failed to start", FlowerError, f"port {port} of this machine is taken: give another --port, or none"),
    ):
        if words in text:
            raise kind(sentence)
    if "SuperNode ID:" not in text and not connected:
        raise FlowerError(f"the SuperNode could not reach {link.superlink}; {log} says why")
    return "the connection was lost"


class Tail:
    """The newest lines of a log that grows, from its present end on. Each byte is read once."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = log.stat().st_size if log.exists() else 0
        self._kept = ""

    def read(self) -> str:
        """The last lines so far, at most `_KEPT` characters."""
        with open(self._log, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._at:  # it was put aside
                self._at = 0
            file.seek(self._at)
            new = file.read(_KEPT)
        self._at += len(new)
        self._kept = (self._kept + new.decode(errors="replace"))[-_KEPT:]
        return self._kept


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
