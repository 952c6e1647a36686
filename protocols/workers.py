"""Clients of a simulation, played by processes on all cores.

For simulations alone, like `one_process`: the process that starts the others holds all contributions anyway. A client is a
state machine that takes bytes and gives bytes, so it can run in any process: the same class plays it, and its keys come from
the operating system in its own process. Keys of a pair are computed once where both ends are in one process.

A requested step is queued. A process starts to work on its queue at 16 steps, or at `send`; `Waiting.result` sends too, and
waits for one step. The processes end with the object, or with the process that owns it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from protocols.codec import Words
from protocols.errors import ProtocolError
from protocols.keys import Identity
from protocols.masking import cores
from protocols.parameters import Parameters
from protocols.players import Message, Waiting
from protocols.policy import Policy
from protocols.worker import Close, Open, Outcome, Step, Task

_Answer = Future[tuple[Message, float]]
_AT_ONCE = 16  # steps in a batch: few, so that answers arrive while other steps run


class Workers:
    """`players.Players` in `count` processes, which start with the first client. Client i is always in the same process."""

    def __init__(self, count: int | None = None) -> None:
        self._count = cores() if count is None else count
        self._processes: list[_Process] = []
        self._policies: dict[bytes, Policy] = {}  # of the open session

    def client(self, parameters: Parameters, me: int, policy: Policy, identity: Identity | None) -> Elsewhere:
        if not self._processes:
            self._processes = [_Process() for _ in range(self._count)]
        if self._policies.get(parameters.session) != policy:
            self._policies[parameters.session] = policy
            for process in self._processes:
                process.note(Open(parameters, policy))
        return Elsewhere(self._processes[me % self._count], parameters, me, identity)

    @contextmanager
    def session(self, session: bytes) -> Iterator[None]:
        """A session. Its clients' secrets are dropped when it ends, however it ends."""
        try:
            yield
        finally:
            self._policies.clear()
            for process in self._processes:
                process.note(Close())
            self.send()

    def send(self) -> None:
        """Make the processes work on all queued steps."""
        for process in self._processes:
            process.send()


@dataclass(frozen=True)
class Elsewhere:
    """`players.Played` in another process."""

    _process: _Process
    parameters: Parameters
    _me: int
    _identity: Identity | None

    def advertise(self) -> Waiting:
        private = None if self._identity is None else self._identity.private.reveal()
        return self._process.ask(Step(self._me, "advertise", (), private))

    def share(self, message: bytes) -> Waiting:
        return self._asked("share", message)

    def mask(self, message: bytes, vector: Words) -> Waiting:
        return self._asked("mask", message, vector)

    def confirm(self, message: bytes) -> Waiting:
        return self._asked("confirm", message)

    def unmask(self, message: bytes) -> Waiting:
        return self._asked("unmask", message)

    def _asked(self, name: str, *arguments: Any) -> Waiting:
        return self._process.ask(Step(self._me, name, arguments))


class _Process:
    """One process. Two threads communicate with it, so that neither side blocks on a full pipe."""

    def __init__(self) -> None:
        search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from protocols.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search},
        )
        self._noted: list[Task] = []
        self._answers: list[_Answer] = []
        sent: SimpleQueue[list[Task] | None] = SimpleQueue()
        due: SimpleQueue[list[_Answer] | None] = SimpleQueue()
        self._sent, self._due = sent, due
        for work, queue in ((_write, sent), (_read, due)):
            threading.Thread(target=work, args=(self._process, queue), daemon=True).start()
        self._finalizer = weakref.finalize(self, _end, self._process, sent, due)

    def note(self, task: Task) -> None:
        """Queue a task before the next step."""
        self._noted.append(task)

    def ask(self, step: Step) -> Waiting:
        answer: _Answer = Future()
        self._noted.append(step)
        self._answers.append(answer)
        if len(self._answers) >= _AT_ONCE:
            self.send()
        return Waiting(answer, self.send)

    def send(self) -> None:
        if self._noted:
            self._due.put(self._answers)
            self._sent.put(self._noted)
            self._noted, self._answers = [], []


def _write(process: subprocess.Popen[bytes], sent: SimpleQueue[list[Task] | None]) -> None:
    assert process.stdin is not None
    while (tasks := sent.get()) is not None:
        try:
            pickle.dump(tasks, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
        except OSError:  # it has ended; the thread that reads its answers reports this
            return


def _read(process: subprocess.Popen[bytes], due: SimpleQueue[list[_Answer] | None]) -> None:
    assert process.stdout is not None
    while (answers := due.get()) is not None:
        try:
            outcomes: list[Outcome] = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            error = ProtocolError("a process that plays clients of the simulation has ended")
            outcomes = [Outcome(b"", error, 0.0)] * len(answers)
        for answer, outcome in zip(answers, outcomes, strict=True):
            if outcome.error is not None:
                answer.set_exception(outcome.error)
            else:
                answer.set_result((outcome.message, outcome.seconds))


def _end(process: subprocess.Popen[bytes], *queues: SimpleQueue[Any]) -> None:
    """End the process without waiting for its current work."""
    for queue in queues:
        queue.put(None)
    process.terminate()
    process.wait()
