"""What a round costs beyond local training, against averaging the same numbers in place with numpy.

    python benchmarks/round_overhead.py [--rounds 50]

Ten clients return 300,000 float32 numbers unchanged. Medians over rounds, in milliseconds, of

    numpy    the average, in place
    server   our round with replies that lie ready: request, check, sum, apply, load into the model for evaluation
    clients  the same with clients that have no examples: also set up training, make and check their contribution
    saved    the same with a run directory: also make the round durable on disk

and `start`, the seconds from the objects given to the first round. ratio = server / numpy.
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
from timing import Limit, at_most, machine, show, timed
from torch import Tensor, nn

from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.methods.method import CHANGE
from secure_fed.rounds.transport import InProcess, Reply, Request

CLIENTS, WIDTH = 10, 390
NUMBERS = 300_000
ALLOWED = {4: 5.0, 24: 8.0}  # milliseconds of a round, by layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


@dataclass
class Ready:
    """A client whose answer is always the same."""

    reply: Reply

    def handle(self, request: Request) -> Reply:
        return self.reply


def no_loss(model: nn.Module, batch: Any) -> Tensor:
    raise AssertionError("nobody has examples to train on")


def make(method: str, layers: int, rounds: int) -> Federation:
    """Clients that answer at once, with about NUMBERS numbers where A and B both travel."""
    rank = round(NUMBERS / (layers * 4 * WIDTH))
    settings = {("method", "name"): method, ("method", "rank"): rank, ("federation", "rounds"): rounds}
    made = Federation(
        RunConfig().replace(settings),
        model=nn.Sequential(*(Block() for _ in range(layers))),
        train=[[0]] * CLIENTS,
        test=[0],
        collate=list,
        loss=no_loss,
        metrics=lambda model, batches: {},
    )
    for client in made.assembly.clients:
        client.examples = ()
    return made


def a_round(federation: Federation, out: Path | None = None) -> float:
    """Median seconds a round."""
    ticks: list[float] = []

    class Clock:
        def on_round_end(self, record: Any, state: Any) -> None:
            ticks.append(time.perf_counter())

    federation.callbacks.append(Clock())
    federation.run(out)
    return statistics.median(np.diff(ticks).tolist())


def with_replies_ready(federation: Federation) -> Federation:
    """The same federation, its clients asked beforehand."""
    assembly = federation.assembly
    server, start = assembly.server, assembly.initial
    request = server.request(start, server.plan(start), CHANGE, 0.1, {})
    ready = InProcess([Ready(client.handle(request)) for client in assembly.clients])
    federation.assembly = replace(assembly, transport=ready)
    return federation


def in_place(numbers: int, rounds: int) -> float:
    """Median seconds to average as many vectors of as many numbers in place."""
    vectors = [np.ones(numbers, dtype=np.float32) for _ in range(CLIENTS)]
    total = np.zeros(numbers, dtype=np.float32)

    def average() -> None:
        total[:] = 0
        for vector in vectors:
            np.add(total, vector, out=total)
        np.divide(total, CLIENTS, out=total)

    once = timed(average)
    return statistics.median(once() for _ in range(rounds))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=50)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)
    print(machine("torch", "numpy") + "; one thread")
    limits: list[Limit] = []
    print(f"{'method':12}{'tensors':>8}{'numbers':>9}{'start':>7}", end="")
    print("".join(f"{name:>9}" for name in ("numpy", "server", "clients", "saved", "ratio")))
    for method in ("fedlora", "ffa_lora", "fra_lora"):
        for layers in (4, 24):
            started = time.perf_counter()
            federation = make(method, layers, rounds)
            start = time.perf_counter() - started
            assembly = federation.assembly
            sent = assembly.initial.tensors.select(assembly.method.plan(assembly.initial).trainable)
            base, clients = in_place(sent.numel, rounds), a_round(federation)
            with tempfile.TemporaryDirectory() as folder:
                saved = a_round(make(method, layers, rounds), Path(folder) / "run")
            server = a_round(with_replies_ready(make(method, layers, rounds)))
            print(f"{method:12}{len(sent):8}{sent.numel:9,}{start:7.2f}", end="")
            print("".join(f"{1e3 * seconds:9.2f}" for seconds in (base, server, clients, saved)), end="")
            print(f"{server / base:9.1f}", flush=True)
            if method == "fedlora":
                limits.append(at_most(f"ms of a round's server, {len(sent)} tensors", 1e3 * server, ALLOWED[layers]))
    show(limits)


if __name__ == "__main__":
    main()
