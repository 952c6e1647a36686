"""A process that plays clients of a simulation, for `workers.Workers`, which starts it and talks to it.

It reads batches of tasks from its standard input and writes the outcome of their steps to its standard output, in order, until
its input ends. Both are pickles that this process and the process that started it exchange: a party that could write to either
could do anything else too.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from typing import Any, BinaryIO, NamedTuple

from protocols.client import Client
from protocols.errors import ProtocolError
from protocols.keys import Identity, Secret
from protocols.one_process import OneProcess
from protocols.parameters import Parameters
from protocols.policy import Policy
from protocols.record import InMemory


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
    """Clients of one session at a time, and each one's record of the sessions that it has opened."""

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


def serve(inbox: BinaryIO, outbox: BinaryIO) -> None:
    """Play batches until the input ends."""
    worker = Worker()
    while True:
        try:
            tasks = pickle.load(inbox)
        except EOFError:
            return
        pickle.dump(worker.play(tasks), outbox, protocol=pickle.HIGHEST_PROTOCOL)
        outbox.flush()


def main() -> None:
    """The entry point. An interrupt is handled by the process that started this one, which then ends the input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outbox = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # printed text must not mix with outcomes
    try:
        serve(sys.stdin.buffer, outbox)
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
