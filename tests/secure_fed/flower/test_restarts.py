"""A deployment that is killed, restarted and finished: by SIGKILL, and by accidents of its certificate, keys and database.

Every deployment has TLS, with the certificates of docs/deployment.md, and node authentication. What ends is started again, as
systemd does by the shipped units: unless its exit status says that a person has to act.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from secure_fed import RunConfig
from secure_fed.commands.cli import main
from secure_fed.deployment.home import ENDED
from secure_fed.flower.project import KEYS, Connection, write_project
from tests.flower_keys import auth_keys, certificates, documented_certificates
from tests.flower_loopback import HOST, Loopback, node_run
from tests.secure_fed.deployment.parties import Deployed, founded, rows_of
from tests.secure_fed.flower import held
from tests.secure_fed.flower.counted_node_run import DRAWN, PID

pytestmark = pytest.mark.nightly

STEPS, ROUNDS = 2, 3
PARTS = [rows_of(8, seed) for seed in range(3)]
CONFIG = RunConfig.from_dict(
    {
        "data": {"train": "of each member"},
        "federation": {"rounds": ROUNDS, "cohort": 3, "sampling": "fixed"},
        "training": {"batch_size": 4, "steps": STEPS},
        "method": {"name": "ffa_lora", "rank": 1, "target_modules": ["query"]},
        "privacy": {"unit": "example", "epsilon": 50.0, "clip_norm": 0.1},
    }
)
WAIT = 30.0  # seconds before a restart, as in the units
ACTS = (2, 3)  # exit statuses after which the units wait for a person


@dataclass
class Deployment:
    """A started deployment. again: the exit statuses of processes that were started again, by their names."""

    link: Loopback
    party: Deployed
    project: Path
    holds: held.Holds
    again: list[tuple[str, int]] = field(default_factory=list)
    due: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Start the run, and the nodes once their keys are registered."""
        self.link.conduct(self.project)
        self.until(lambda: self.link.output("superlink").count("Created node_id") == len(PARTS))
        for node in range(len(PARTS)):
            self.link.start(node)

    def until(self, done: Callable[[], object], seconds: float = 900) -> None:
        """Restart what ends, until this is true."""
        limit = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < limit, self.link.outputs(30)
            for name in ("conductor", *(f"node-{node}" for node in range(len(PARTS)))):
                status = self.link.status(name)
                if status in (None, 0) or time.monotonic() < self.due.get(name, 0.0):
                    continue
                if name not in self.due:
                    self.due[name] = time.monotonic() + WAIT
                    continue
                del self.due[name]
                assert status not in ACTS, self.link.outputs(30)
                self.again.append((name, status))
                if name == "conductor":
                    self.link.conduct(self.project)
                else:
                    self.link.start(int(name[5:]))
            time.sleep(0.5)

    def ended(self) -> bool:
        return self.link.status("conductor") == 0

    def rounds(self) -> list[bool]:
        """For each round, whether it has a sum."""
        lines = (self.party.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["cohort"] > 0 for line in lines]


@contextmanager
def deployed(tmp: Path, monkeypatch: pytest.MonkeyPatch, deadline: int = 600) -> Iterator[Deployment]:
    """A SuperLink, with nodes and a run that are not yet started."""
    holds = held.Holds(tmp / "held")
    monkeypatch.setenv(held.HELD, str(holds.folder))
    party = founded(tmp, CONFIG, PARTS, lambda number: None, most_epsilon=50.0)
    link = Loopback(tmp / "link", party.homes, tls=True, auth=True, command=counted)
    link.prepare()
    try:
        link.start_superlink()
        project = write_project(tmp / "app", party.folder, Connection(link.address, link.certificate))
        settings = project / "pyproject.toml"
        own = settings.read_text().replace("secure_fed.flower.coordinator_app", "tests.secure_fed.flower.held_app")
        settings.write_text(re.sub("deadline = [0-9]+", f"deadline = {deadline}", own))
        for node in range(len(PARTS)):
            shutil.copy(link.key(node).with_suffix(".pub"), project / KEYS)
        yield Deployment(link, party, project, holds)
    finally:
        link.kill_all()


def counted(link: Loopback, node: int) -> list[str]:
    python, _, _, *rest = node_run(link, node)
    return [python, "-m", "tests.secure_fed.flower.counted_node_run", "run", *rest]


def kill(process: str, at: Deployment, node: int) -> None:
    """SIGKILL for one process of the deployment. "SuperLink": the coordinator's app ends with it, as on a lost machine.

    node: the one whose agent or SuperNode is killed.
    """
    if process == "SuperLink":
        at.link.kill_process("superlink")
        at.link.start_superlink()
        return
    found = processes(process, at, node)
    assert found
    for one in found:
        os.kill(one, signal.SIGKILL)
    if process == "SuperNode":
        at.until(lambda: processes(process, at, node))


def processes(process: str, at: Deployment, node: int) -> list[int]:
    """The agent or SuperNode of a node, or the coordinator's app, as the system has them."""
    if process == "agent":
        return [int((at.party.homes[node] / PID).read_text())]
    words = b"flwr-serverapp" if process == "coordinator" else b"flower-supernode"
    home = at.link.folder / ("superlink" if process == "coordinator" else f"node-{node}")
    return [one for one in running(home) if words in Path(f"/proc/{one}/cmdline").read_bytes()]


def running(home: Path) -> Iterator[int]:
    """The processes that descend from one started with this home of Flower's."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"FLWR_HOME={home}\0".encode() in environment.read_bytes() + b"\0":
                yield int(environment.parent.name)


@dataclass(frozen=True)
class Spent:
    """A member's account. drawn: for each round, how often it drew noise for a step."""

    charged: int
    rounds: int
    drawn: Counter[int]

    @classmethod
    def of(cls, home: Path, capsys: pytest.CaptureFixture[str]) -> Spent:
        main(["node", "status", str(home), "--json"])
        (federation,) = json.loads(capsys.readouterr().out)["federations"]
        lines = (home / DRAWN).read_text().split("\n")[:-1]
        assert len({line.split()[0] for line in lines}) == len(set(lines)), "a round was trained in two processes"
        return cls(federation["charged"], federation["rounds"], Counter(int(line.split()[0]) for line in lines))


# The rounds that have a sum.
SUMS = {
    "agent": [True, True, True],
    "SuperNode": [True, True, True],
    "coordinator": [False, False, True],
    "SuperLink": [False, False, True],
}


@pytest.mark.parametrize("process", SUMS)
def test_the_run_ends_and_every_step_is_charged_once_whatever_is_killed(
    tmp_path: Path, process: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed three times in one deployment: before the first sum, in the middle of the second round, after the last sum.

    Processes of a node are killed in the middle of its training: all of the round's steps are charged, and one is being made.
    In the second round it is another node, since the first may come back too late for it.
    """
    of_node = process in ("agent", "SuperNode")
    instants = {"node-1 0": 1, "node-2 1": 2, "end": 1} if of_node else {"0 train": 0, "1 answered": 0, "end": 0}
    # The coordinator waits for what a SuperNode that was killed had to deliver, until the deadline.
    with deployed(tmp_path, monkeypatch, 200 if process == "SuperNode" else 600) as at:
        at.holds.ask(*instants)
        at.begin()
        for instant, node in instants.items():
            at.until(lambda instant=instant: at.holds.reached(instant))
            kill(process, at, node)
            at.holds.let_go(instant)
        at.until(at.ended)
        spent = [Spent.of(home, capsys) for home in at.party.homes]
        print(at.again, at.rounds(), *spent, at.link.output("conductor"), sep="\n")
        assert at.rounds() == SUMS[process]
        whole = max(max(one.drawn.values()) for one in spent)  # of a round whose steps were all made
        for number, one in enumerate(spent):
            assert one.charged == STEPS * one.rounds
            assert len(one.drawn) == one.rounds
            interrupted = 1 if process == "agent" and number else 0
            assert sum(drawn < whole for drawn in one.drawn.values()) == interrupted


def test_a_certificate_keys_and_a_database_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An expired certificate; then, in the middle of a round, a database that is lost and a key that is replaced."""
    with deployed(tmp_path, monkeypatch) as at:
        link = at.link
        link.kill_process("superlink")
        certificates(link.folder, HOST, -timedelta(days=3))
        link.start_superlink()
        at.holds.ask("1 train")
        link.conduct(at.project)
        link.start(0)
        at.until(lambda: {("conductor", 6), ("node-0", 6)} <= set(at.again))
        assert "certificate has expired" in link.output("conductor")
        assert "certificate has expired" in link.output("node-0")

        link.kill_process("superlink")
        documented_certificates(link.folder)
        link.start_superlink()
        link.start(1)
        link.start(2)
        at.until(lambda: at.holds.reached("1 train"))

        link.kill_process("superlink")
        for file in link.folder.glob("superlink.db*"):
            file.unlink()
        link.kill(0)
        auth_keys(link.key(0))
        shutil.copy(link.key(0).with_suffix(".pub"), at.project / KEYS)
        link.start_superlink()
        link.start(0)
        at.holds.let_go("1 train")
        at.until(at.ended)
        assert {("conductor", 1), ("node-1", 7), ("node-2", 7)} <= set(at.again)
        assert at.rounds() == [True, False, True]
        spent = [Spent.of(home, capsys) for home in at.party.homes]
        assert {one.drawn[1] for one in spent} == {0}
        assert all(one.charged == STEPS * one.rounds == STEPS * len(one.drawn) for one in spent)

        link.kill_process("superlink")
        missed = json.loads((at.party.folder / ENDED).read_text(encoding="utf-8"))["sentence"]  # on a slow machine
        assert link.conduct(at.project).wait(120) == bool(missed), "a run that has ended needs no SuperLink"
