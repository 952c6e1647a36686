"""The cost of a round beyond local training, compared with averaging the same numbers in place with numpy.

    python benchmarks/round_overhead.py [--rounds 50]

Ten clients return 300,000 float32 numbers unchanged. Prints medians over rounds, in milliseconds of one thread, for

    numpy    the average, in place, once after each of our rounds
    server   our round with prepared replies: request, check, sum, apply, load into the model for evaluation
    round    the same with clients whose local training returns at once: also creating and checking their contribution
    train    the same with the set-up of a local training without examples
    saved    as `round`, with a run folder: also storing the round durably on disk

and `start`, the seconds from the given objects to the first round. ratio = round / numpy.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import Limit, at_most, machine, show
from torch import Tensor, nn

from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.learning.training.local import Job, Trained
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.method import CHANGE
from secure_fed.rounds.transport import InProcess, Reply, Request

CLIENTS, WIDTH = 10, 390
NUMBERS = 300_000
ALLOWED = {4: 5.0, 24: 8.0}  # milliseconds of a round, by layers


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)


@dataclass
class Ready:
    """A client with a constant reply."""

    reply: Reply

    def handle(self, request: Request) -> Reply:
        return self.reply


def no_loss(model: nn.Module, batch: Any) -> Tensor:
    raise AssertionError("nobody has examples to train on")


def make(
    method: str, layers: int, rounds: int, *, rank: int | None = None, width: int = WIDTH, clients: int = CLIENTS
) -> Federation:
    """Clients that reply at once. rank: None chooses the rank for about NUMBERS numbers if A and B are sent."""
    settings = {
        ("method", "name"): method,
        ("method", "rank"): rank or round(NUMBERS / (layers * 4 * width)),
        ("federation", "rounds"): rounds,
        ("federation", "cohort"): clients,
    }
    made = Federation(
        RunConfig().replace(settings),
        model=nn.Sequential(*(Block(width) for _ in range(layers))),
        train=[[0]] * clients,
        test=[0],
        collate=list,
        loss=no_loss,
        metrics=lambda model, batches: {},
    )
    for client in made.assembly.clients:
        client.examples = ()
    return made


def a_round(federation: Federation, numbers: int, out: Path | None = None) -> tuple[float, float]:
    """Median seconds of a round, and of averaging as many vectors of `numbers` numbers in place between rounds."""
    ends: list[float] = []
    begins: list[float] = []
    vectors = [np.ones(numbers, dtype=np.float32) for _ in range(CLIENTS)]
    total = np.zeros(numbers, dtype=np.float32)

    class Clock:
        def on_round_end(self, record: Any, state: Any) -> None:
            ends.append(time.thread_time())
            total[:] = 0
            for vector in vectors:
                np.add(total, vector, out=total)
            np.divide(total, CLIENTS, out=total)
            begins.append(time.thread_time())

    federation.callbacks.append(Clock())
    federation.run(out)
    rounds = [end - begin for begin, end in zip(begins, ends[1:], strict=False)]
    averages = [begin - end for begin, end in zip(begins, ends, strict=True)]
    return statistics.median(rounds), statistics.median(averages)


def trained_at_once(federation: Federation) -> Federation:
    """The same federation with a local training that returns its input."""
    after: list[Trained] = []

    def train(objective: Objective, job: Job) -> Trained:
        after[:] = after or [Trained(job.before.select(job.trainable) * 1.0, 0.0)]
        return after[0]

    for client in federation.assembly.clients:
        client._setup = replace(client._setup, train=train)
    return federation


def with_replies_ready(federation: Federation) -> Federation:
    """The same federation, with replies prepared by its clients beforehand."""
    assembly = federation.assembly
    server, start = assembly.server, assembly.initial
    request = server.request(start, server.plan(start), CHANGE, assembly.config.training.rate, {})
    ready = InProcess([Ready(client.handle(request)) for client in assembly.clients])
    federation.assembly = replace(assembly, transport=ready)
    return federation


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=50)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)
    print(machine("torch", "numpy") + "; one thread")
    limits: list[Limit] = []
    print(f"{'method':12}{'tensors':>8}{'numbers':>9}{'start':>7}", end="")
    print("".join(f"{name:>9}" for name in ("numpy", "server", "round", "train", "saved", "ratio")))
    for method in ("fedlora", "ffa_lora", "fra_lora"):
        for layers in (4, 24):
            started = time.perf_counter()
            federation = make(method, layers, rounds)
            start = time.perf_counter() - started
            assembly = federation.assembly
            sent = assembly.initial.tensors.select(assembly.method.plan(assembly.initial).trainable)
            training, _ = a_round(federation, sent.numel)
            server, _ = a_round(with_replies_ready(make(method, layers, rounds)), sent.numel)
            whole, average = a_round(trained_at_once(make(method, layers, rounds)), sent.numel)
            with tempfile.TemporaryDirectory() as folder:
                saved, _ = a_round(trained_at_once(make(method, layers, rounds)), sent.numel, Path(folder) / "run")
            print(f"{method:12}{len(sent):8}{sent.numel:9,}{start:7.2f}", end="")
            print("".join(f"{1e3 * seconds:9.2f}" for seconds in (average, server, whole, training, saved)), end="")
            print(f"{whole / average:9.1f}", flush=True)
            if method == "fedlora":
                limits.append(at_most(f"ms of a round, {len(sent)} tensors", 1e3 * whole, ALLOWED[layers]))
    show(limits)


if __name__ == "__main__":
    main()
