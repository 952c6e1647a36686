"""The timed code of `secure_aggregation.py`: our sessions, and the raw cost of masks as a lower limit.

All clients of a session have the same vector, so the sum is known; every finished session is checked against it. Timed code
runs on one thread.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from timing import Timed, timed

from protocols import roster
from protocols.client import Client
from protocols.keys import Secret
from protocols.masking import FixedPoint, add_masks
from protocols.parameters import Parameters, Policy
from protocols.server import Server
from protocols.thresholds import Choice, choose

CORRUPT, DROPOUT = 0.1, 0.2  # shares of the clients for the choice of parameters
COMPLETE = 50  # up to so many clients, all are neighbours of each other
BOUND = 8.0  # of a coordinate, as Flower's default
BLOCK = 1 << 16  # words: blocks that stay in cache; fastest of 2^12 to 2^17 and of whole vectors, by up to a quarter


def chosen(clients: int) -> Choice:
    """Parameters: up to COMPLETE clients a threshold of two thirds, as active sessions need; above, the smallest safe ones."""
    neighbours, threshold = (clients - 1, 2 * clients // 3 + 1) if clients <= COMPLETE else (None, None)
    return choose(clients, corrupt=CORRUPT, dropout=DROPOUT, active=False, neighbours=neighbours, threshold=threshold)


def dropouts(clients: int, share: float) -> int:
    return math.ceil(round(share * clients, 9))


def update(dim: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).uniform(-1, 1, dim).astype(np.float32)


def aes() -> CipherContext:
    return Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()


def chacha() -> CipherContext:
    return Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), None).encryptor()


def keystreams(stream: Callable[[], CipherContext], dim: int, count: int) -> Timed:
    """`count` keystreams of `dim` words, each added in place to one vector."""
    block = min(dim, BLOCK)
    zeros, made = memoryview(bytes(4 * block)), bytearray(4 * block + 16)
    words, total = np.frombuffer(made, np.uint32, block), np.zeros(dim, np.uint32)

    def add() -> None:
        streams = [stream() for _ in range(count)]
        for start in range(0, dim, block):
            part = total[start : start + block]
            for one in streams:
                one.update_into(zeros[: part.nbytes], made)
                np.add(part, words[: len(part)], out=part)

    return timed(add)


def expanded(dim: int, count: int) -> Timed:
    """The same with our own code and one-time secret keys, without messages and agreements."""
    total = np.zeros(dim, np.uint32)
    return timed(lambda: add_masks(total, [(Secret(os.urandom(32)), 1) for _ in range(count)], threads=1))


def forget() -> None:
    """Clear this process's caches of the roster, so that the next client must read it itself."""
    for function in vars(roster).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@dataclass(frozen=True)
class Served:
    """The server's seconds to add masked vectors, and to unmask their sum. uploaded: one client's bytes in all stages."""

    collect: float
    unmask: float
    uploaded: int


class Session:
    """A session of `members` clients, at most the choice's number; fewer clients keep its neighbours and threshold.

    sent: bytes of the last message from `share_one` or `mask_one`.
    """

    def __init__(self, choice: Choice, members: int, dim: int, drops: int = 0, threads: int | None = 1) -> None:
        self.drops, self.uploaded, self.sent = drops, 0, 0
        self.codec = FixedPoint(bits=32, bound=BOUND, clients=members)
        self.update = update(dim)
        self.words = self.encode()
        survivors = min(choice.survivors, members - drops)
        self.parameters = Parameters(
            run="benchmark",
            round=0,
            layout=bytes(32),
            length=dim,
            bits=32,
            clients=tuple(range(members)),
            neighbours=choice.neighbours,
            threshold=choice.threshold,
            survivors=survivors,
            active=False,
            bound=self.codec.largest,
        )
        policy = Policy(choice.threshold, survivors, choice.corrupt, choice.window)
        self.clients = [Client(self.parameters, me, policy, threads=threads) for me in range(members)]
        self.server = Server(self.parameters, threads=1)
        for me, client in enumerate(self.clients):
            self.receive(me, client.advertise())
        self.inbox = self.server.close()
        self.next = 0

    def encode(self) -> Any:
        return self.codec.encode(self.update.astype(np.float64))

    def receive(self, sender: int, message: bytes | bytearray) -> float:
        """Seconds of the server. The bytes of client 0 are counted, because it never drops."""
        if sender == 0:
            self.uploaded += len(message)
        started = time.perf_counter()
        self.server.receive(sender, message)
        return time.perf_counter() - started

    def close(self) -> float:
        started = time.perf_counter()
        self.inbox = self.server.close()
        return time.perf_counter() - started

    def share_one(self) -> float:
        """Seconds of the next client's share stage; its shares go to the server."""
        me, self.next = self.next, self.next + 1
        forget()
        started = time.perf_counter()
        message = self.clients[me].share(self.inbox[me])
        seconds, self.sent = time.perf_counter() - started, len(message)
        self.receive(me, message)
        return seconds

    def share_all(self) -> None:
        for me, client in enumerate(self.clients):
            self.receive(me, client.share(self.inbox[me]))
        self.close()

    def mask_one(self) -> float:
        """Seconds of the next client's masking, whose message is then thrown away."""
        me, self.next = self.next, self.next + 1
        started = time.perf_counter()
        message = self.clients[me].mask(self.inbox[me], self.words)
        seconds, self.sent = time.perf_counter() - started, len(message)
        return seconds

    def serve(self) -> Served:
        """Finish the session, and check its sum."""
        gone = set(random.Random(0).sample(range(1, len(self.clients)), self.drops))
        staying = [me for me in range(len(self.clients)) if me not in gone]
        collect = (
            sum(self.receive(me, self.clients[me].mask(self.inbox[me], self.words)) for me in staying) + self.close()
        )
        opened = {me: self.clients[me].unmask(self.inbox[me]) for me in staying}
        unmask = sum(self.receive(me, message) for me, message in opened.items()) + self.close()
        if not np.array_equal(self.server.total(), self.words * self.words.dtype.type(len(staying))):
            raise RuntimeError("The sum of a session is not the sum of its survivors' vectors.")
        return Served(collect, unmask, self.uploaded)


def served(choice: Choice, members: int, dim: int, drops: int) -> Served:
    """A whole session. Its clients are not timed and may use all cores; the server uses one."""
    session = Session(choice, members, dim, drops, threads=None)
    session.share_all()
    return session.serve()
