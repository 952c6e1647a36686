"""Clients of a simulation: the keys of a pair computed once for both ends, and processes that play the clients.

For simulations only. The process that starts the others holds the secrets of all clients anyway, so it learns nothing from a
key that one end derived for the other end. No part of the protocol imports this file; in the packages only code that plays both
sides of a session does (`tests/test_layering.py`).

`OneProcess` keeps a pair's key until the second end takes it. A client uses it only if it is passed explicitly, and
`keys.Alone` otherwise.

`Workers` plays the clients in processes on all cores. A client is a state machine that takes bytes and gives bytes, so it can
run in any process: the same class plays it, and its keys come from the operating system in its own process. Keys of a pair are
computed once where both ends are in one process.

A requested step is queued. A process starts to work on its queue at 16 steps, or at `send`; `Waiting.result` sends too, and
waits for one step. The processes end with the object, or with the process that owns it. A process reads batches of tasks from
its standard input and writes the outcome of their steps to its standard output, in order, until its input ends. Both are
pickles that the two processes exchange: a party that could write to either could do anything else too.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from protocols.client import Client, Message, Waiting
from protocols.errors import ProtocolError
from protocols.keys import AgreementKey, Alone, Channel, Identity, Mask, Secret, channels, pair_mask
from protocols.masking import Words, cores
from protocols.parameters import Parameters, Policy
from protocols.record import InMemory

_Answer = Future[tuple[Message, float]]
_AT_ONCE = 16  # steps in a batch: few, so that answers arrive while other steps run
Key = TypeVar("Key", Channel, Mask)
_Entry = tuple[int, int, bytes, bytes]  # the owner of the key, the other client, and the public keys of both


class OneProcess:
    """`Agreements` of all clients of this process: a pair's common key is computed once for both ends.

    The keys equal the keys of `Alone` bit for bit. An entry is stored under both numbers, both public keys and its purpose;
    these and the session determine the keys from either end. So a client that received another key than its peer advertised
    shares no key with that peer, here as elsewhere.

    An entry is deleted when its second end has taken it, and all remaining entries when the session ends. Outside a session,
    and for any session other than the open one, nothing is kept.
    """

    def __init__(self) -> None:
        self._session: bytes | None = None
        self._channels = _Pairs[Channel](channels, lambda channel: channel[::-1])
        self._masks = _Pairs[Mask](pair_mask, lambda mask: (mask[0], -mask[1]))

    @contextmanager
    def session(self, session: bytes) -> Iterator[None]:
        """Keep the keys of this session until it ends."""
        self._session = session
        try:
            yield
        finally:
            self._session = None
            self._channels.kept.clear()
            self._masks.kept.clear()

    @property
    def waiting(self) -> int:
        """The number of keys that wait for their second end."""
        return len(self._channels.kept) + len(self._masks.kept)

    def channels(
        self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int
    ) -> Mapping[int, Channel]:
        if session != self._session:
            return Alone().channels(key, publics, session, me)
        return self._channels.found(key, publics, session, me)

    def masks(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> Mapping[int, Mask]:
        if session != self._session:
            return Alone().masks(key, publics, session, me)
        return self._masks.found(key, publics, session, me)


@dataclass
class _Pairs(Generic[Key]):
    """Keys of one kind. mirrored: the key from the other end's side."""

    derive: Callable[[AgreementKey, bytes, bytes, int, int], Key]
    mirrored: Callable[[Key], Key]
    kept: dict[_Entry, Key] = field(default_factory=dict, repr=False)

    def found(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> dict[int, Key]:
        mine = key.public
        found: dict[int, Key] = {}
        for other, public in publics.items():
            key_of_both = self.kept.pop((me, other, mine, public), None)
            if key_of_both is None:
                key_of_both = self.derive(key, public, session, me, other)
                self.kept[other, me, public, mine] = self.mirrored(key_of_both)
            found[other] = key_of_both
        return found


class Workers:
    """`client.Players` in `count` processes, which start with the first client. Client i is always in the same process."""

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
    """`client.Played` in another process."""

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
            [sys.executable, "-c", "from protocols.workers import main; main()"],
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


class Open(NamedTuple):
    """A session begins."""

    parameters: Parameters
    policy: Policy


class Close(NamedTuple):
    """The session has ended: its clients and their keys are dropped."""


class Step(NamedTuple):
    """A step of a client. identity: in the first step of an active session, the private key of its identity."""

    client: int
    name: str  # of `Client`'s methods
    arguments: tuple[Any, ...]
    identity: bytes | None = None


class Outcome(NamedTuple):
    """The result of a step: the message, or the error that ended the client. seconds: the time it took."""

    message: bytes | bytearray
    error: Exception | None
    seconds: float


Task = Open | Close | Step


class Worker:
    """The clients of one process: of one session at a time, and each one's record of the sessions that it has opened."""

    def __init__(self) -> None:
        self._records: dict[int, InMemory] = {}
        self._clients: dict[int, Client] = {}
        self._agreements = OneProcess()
        self._during = ExitStack()

    def play(self, tasks: list[Task]) -> list[Outcome]:
        """The outcome of each step among the tasks."""
        found = []
        for task in tasks:
            match task:
                case Open():
                    self._close()
                    self._session = task
                    self._during.enter_context(self._agreements.session(task.parameters.session))
                case Close():
                    self._close()
                case Step():
                    found.append(self._outcome(task))
        return found

    def _outcome(self, step: Step) -> Outcome:
        started = time.perf_counter()
        message: bytes | bytearray = b""
        failed: Exception | None = None
        try:
            message = getattr(self._client(step), step.name)(*step.arguments)
        except ProtocolError as error:
            failed = error
        except Exception:
            failed = RuntimeError(f"a client's step failed:\n{traceback.format_exc()}")
        return Outcome(message, failed, time.perf_counter() - started)

    def _client(self, step: Step) -> Client:
        if step.name == "advertise":
            identity = None if step.identity is None else Identity.from_secret(Secret(step.identity))
            self._clients[step.client] = Client(
                self._session.parameters,
                step.client,
                self._session.policy,
                identity=identity,
                sessions=self._records.setdefault(step.client, InMemory()),
                threads=1,
                agreements=self._agreements,
            )
        return self._clients[step.client]

    def _close(self) -> None:
        self._clients.clear()
        self._during.close()


def main() -> None:
    """The entry point of a process: play batches until the input ends.

    An interrupt is handled by the process that started this one, which then ends the input.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outbox = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # printed text must not mix with outcomes
    worker = Worker()
    with suppress(BrokenPipeError):
        while True:
            try:
                tasks = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(worker.play(tasks), outbox, protocol=pickle.HIGHEST_PROTOCOL)
            outbox.flush()
