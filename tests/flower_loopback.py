"""Flower on one machine: a SuperLink and nodes as processes, for tests over real connections.

    with loopback(folder, homes, tls=True, auth=True, proxy=False) as link:
        link.kill(2)
        output = link.run(project)

Every process has its own process group, Flower home and output file. All ports are free ones. When the block ends, by an error
too, every group is killed; a failure shows the end of every output file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

from secure_fed.deployment.relay import SOCKET
from secure_fed.flower.supernode import LOG
from tests.flower_keys import auth_keys, certificates, documented_certificates
from tests.flower_proxy import Recording, recording

ROOT = Path(__file__).resolve().parents[1]
CONNECTION = "loopback"
HOST = "127.0.0.1"
ON_DISK, IN_MEMORY = "superlink.db", ":flwr-in-memory:"  # databases of a SuperLink


@dataclass
class Loopback:
    """A SuperLink with its nodes.

    homes: the folder of each node. database: the SuperLink's. recording: the bytes between nodes and SuperLink. ahead: how far
    the clock was ahead that dated the certificates.
    """

    folder: Path
    homes: Sequence[Path]
    tls: bool = False
    auth: bool = False
    ahead: timedelta = timedelta()
    database: str = ON_DISK
    recording: Recording | None = None
    command: Callable[[Loopback, int], list[str]] | None = None
    port: int = field(default_factory=lambda: free_port())
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The address at which nodes reach the SuperLink: its own, or that of the proxy in front of it."""
        return f"{HOST}:{self.recording.port if self.recording else self.port}"

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    def key(self, node: int) -> Path:
        """The private key that a node authenticates itself with to the SuperLink."""
        return self.folder / f"node-{node}.key"

    def secured(self) -> list[str]:
        """The connection options of the SuperLink's clients."""
        return ["--root-certificates", str(self.certificate)] if self.tls else ["--insecure"]

    def start_superlink(self) -> None:
        """Start or restart the SuperLink, on the same port and with the same database; return when it listens."""
        served = ["--insecure"]
        if self.tls:
            served = ["--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "ca.pem"]
        self._start(
            "superlink",
            ["flower-superlink", *served, "--host", HOST, "--port", str(self.port), "--database", self.database]
            + ["--disable-runtime-dependency-installation"]
            + (["--enable-supernode-auth"] if self.auth else []),
        )
        self._await("superlink", lambda: _listens(self.port))

    def start(self, node: int) -> None:
        """Start a node, or start it again."""
        self._start(f"node-{node}", self.command(self, node) if self.command else supernode(self, node))

    def await_nodes(self) -> None:
        """Return when the SuperLink has given every node an ID, so that a new run finds all of them."""
        for node, home in enumerate(self.homes):
            logs = (self.folder / f"node-{node}.log", home / LOG)  # of Flower's SuperNode, or of `secure-fed node run`
            self._await(f"node-{node}", partial(_say, logs, "SuperNode ID:"))

    def kill(self, node: int) -> None:
        """Kill a node with all of its processes, as a loss of power does."""
        self.kill_process(f"node-{node}")

    def alive(self, node: int) -> bool:
        """Whether a node's first process runs."""
        return self.status(f"node-{node}") is None

    def status(self, name: str) -> int | None:
        """The exit status of the first process of "conductor" or "node-3"; None while it runs, and before it is started."""
        return self._processes[name].poll() if name in self._processes else None

    def kill_process(self, name: str) -> None:
        """Kill the process group of "superlink" or "node-3"."""
        process = self._processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for other in _marked(self.folder / name.partition("-run-")[0]):  # Flower gives its apps sessions of their own
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        process.wait()

    def run(self, project: Path, *options: str, seconds: float = 300) -> str:
        """Run a Flower project to its end and return what it printed. AssertionError, with every output, if it failed."""
        started = self.begin(project, *options)
        try:
            output = started.communicate(timeout=seconds)[0].decode()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end in {seconds:g} s\n{self.outputs()}") from None
        (self.folder / "run.log").write_text(output, encoding="utf-8")
        assert started.returncode == 0, f"{output}\n{self.outputs()}"
        assert (status := self.statuses()[0]) == "finished:completed", f"{status}\n{output}\n{self.outputs()}"
        return output

    def begin(self, project: Path, *options: str) -> subprocess.Popen[bytes]:
        """Start a run of a Flower project; its standard output is the run's."""
        command = ["flwr", "run", str(project), CONNECTION, "--stream", *options]
        process = self._open("user", command, subprocess.PIPE)
        self._processes[f"user-run-{process.pid}"] = process
        return process

    def conduct(self, project: Path) -> subprocess.Popen[bytes]:
        """Start or resume the run of a project of `flower init`, as the coordinator's unit does."""
        command = [sys.executable, "-m", "secure_fed", "flower", "run", str(project)]
        self._start("conductor", command)
        return self._processes["conductor"]

    def statuses(self) -> list[str]:
        """Flower's status of each run so far, the latest first."""
        process = self._open("user", ["flwr", "ls", CONNECTION, "--format", "json"], subprocess.PIPE)
        output = process.communicate(timeout=60)[0].decode()
        runs = json.loads(output[output.index("{") :])["runs"]
        return [run["status"] for run in runs]

    def register(self, node: int) -> None:
        """Register a node's public key with the SuperLink: with node authentication it admits no other."""
        command = ["flwr", "supernode", "register", str(self.key(node).with_suffix(".pub")), CONNECTION]
        done = self._open("user", command, subprocess.PIPE)
        output = done.communicate(timeout=60)[0].decode()
        assert done.returncode == 0, output

    def output(self, name: str) -> str:
        """The output of a process so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def outputs(self, lines: int = 60) -> str:
        """The last lines of every process's output."""
        names = sorted(path.stem for path in self.folder.glob("*.log"))
        return "\n".join(f"== {name}\n" + "\n".join(self.output(name).splitlines()[-lines:]) for name in names)

    def prepare(self) -> None:
        """Write keys, certificates and the connection that `flwr` uses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.tls:
            certificates(self.folder, HOST, self.ahead) if self.ahead else documented_certificates(self.folder)
        for node in range(len(self.homes)) if self.auth else ():
            auth_keys(self.key(node))
        user = self.folder / "user"
        user.mkdir(exist_ok=True)
        secured = f'root-certificates = "{self.certificate}"' if self.tls else "insecure = true"
        text = f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\naddress = "{HOST}:{self.port}"\n{secured}\n'
        (user / "config.toml").write_text(text, encoding="utf-8")

    def kill_all(self) -> None:
        for name in list(self._processes):
            self.kill_process(name)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = self._open(name, command, log.fileno())

    def _open(self, name: str, command: list[str], output: int) -> subprocess.Popen[bytes]:
        (self.folder / name).mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "FLWR_HOME": str(self.folder / name),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _await(self, name: str, ready: Callable[[], bool], seconds: float = 400) -> None:
        until = time.monotonic() + seconds
        while not ready():
            assert self._processes[name].poll() is None, f"{name} ended\n{self.outputs()}"
            assert time.monotonic() < until, f"{name} was not ready in {seconds:g} s\n{self.outputs()}"
            time.sleep(0.1)


@contextmanager
def loopback(
    folder: Path,
    homes: Sequence[Path],
    *,
    tls: bool = False,
    auth: bool = False,
    proxy: bool = False,
    ahead: timedelta = timedelta(),
    database: str = ON_DISK,
    command: Callable[[Loopback, int], list[str]] | None = None,
) -> Iterator[Loopback]:
    """A SuperLink and a node for each home, until the block ends. command: a node's command, if not `supernode`.

    auth needs tls. proxy: record all bytes between nodes and SuperLink, in `link.recording`.
    """
    link = Loopback(folder, homes, tls=tls, auth=auth, ahead=ahead, database=database, command=command)
    link.prepare()
    try:
        link.start_superlink()
        with recording(link.port) if proxy else nullcontext() as link.recording:
            for node in range(len(homes)):
                if auth:
                    link.register(node)
                link.start(node)
            yield link
    finally:
        link.kill_all()


def supernode(link: Loopback, node: int) -> list[str]:
    """The command of Flower's SuperNode, configured with the socket of the node's agent."""
    return [
        *("flower-supernode", *link.secured(), "--superlink", link.address),
        *("--host", HOST, "--port", str(free_port())),
        *("--node-config", f'secure-fed-agent="{link.homes[node] / SOCKET}"'),
        *(["--auth-supernode-private-key", str(link.key(node))] if link.auth else []),
    ]


def node_run(link: Loopback, node: int) -> list[str]:
    """The command with which an owner starts a node, `secure-fed node run`: to be passed as `command`."""
    known = ["--auth-key", str(link.key(node))] if link.auth else []
    run = [sys.executable, "-m", "secure_fed", "node", "run", str(link.homes[node])]
    return [*run, "--superlink", link.address, *link.secured(), *known]


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _say(logs: Sequence[Path], words: str) -> bool:
    return any(log.exists() and words in log.read_text(encoding="utf-8", errors="replace") for log in logs)


def _marked(home: Path) -> list[int]:
    """The processes, however detached, that descend from one started with this home of Flower's."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process ended, or is another user's
            if f"FLWR_HOME={home}\0".encode() in environment.read_bytes() + b"\0":
                found.append(int(environment.parent.name))
    return found


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex((HOST, port)) == 0
