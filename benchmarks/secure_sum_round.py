"""One masked round in a simulated federation whose clients reply at once: its CPU seconds and its seconds, as JSON.

    PYTHONPATH=<a checkout> python benchmarks/secure_sum_round.py CLIENTS NUMBERS passive|active CORRUPT DROPOUT ROUNDS [apart]

The whole round except training is counted: requests, encoding, every stage of the protocol at clients and server, decoding, the
mean. The best of ROUNDS after one for warming up. `apart`: clients share nothing, as on separate machines. Without it, only
features of older versions are used, so that checkouts can be compared.
"""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.rounds.engine import run_round

RANK = 8


def no_loss(model: nn.Module, batch: Any) -> Tensor:
    raise AssertionError("nobody has examples to train on")


class Block(nn.Module):
    """A module with one matrix, whose B of rank 8 has `numbers` numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.query = nn.Linear(RANK, max(1, numbers // RANK), bias=False)


def federation(clients: int, numbers: int, active: bool, corrupt: float, dropout: float) -> Federation:
    settings = {
        ("federation", "cohort"): clients,
        ("method", "name"): "ffa_lora",
        ("method", "rank"): RANK,
        ("method", "target_modules"): ["query"],
        ("secure_aggregation", "enabled"): True,
        ("secure_aggregation", "active"): active,
        ("secure_aggregation", "corrupt"): corrupt,
        ("secure_aggregation", "dropout"): dropout,
    }
    made = Federation(
        RunConfig().replace(settings),
        model=nn.Sequential(Block(numbers)),
        train=[[0]] * clients,
        test=[0],
        collate=list,
        loss=no_loss,
        metrics=lambda model, batches: {},
    )
    for client in made.assembly.clients:
        client.examples = ()
    return made


def set_apart() -> None:
    """Make each client in this process compute its key agreements itself, instead of once for each pair."""
    from protocols.keys import Alone
    from secure_fed.rounds.masked import wiring

    class Apart(Alone):
        session = nullcontext

    wiring.__dict__.update(OneProcess=Apart, _WORTH_WORKERS=math.inf)


def main() -> None:
    clients, numbers, kind, corrupt, dropout, rounds, *apart = sys.argv[1:]
    if apart == ["apart"]:
        set_apart()
    assembly = federation(int(clients), int(numbers), kind == "active", float(corrupt), float(dropout)).assembly
    assert assembly.masks is not None
    assembly.masks.begin(None)
    state, found = assembly.initial, []
    for _ in range(1 + int(rounds)):
        cpu, wall = time.process_time(), time.perf_counter()
        state, record = run_round(state, assembly.server, assembly.transport, assembly.config.training.rate)
        found.append((time.process_time() - cpu, time.perf_counter() - wall))
        if record["masked"]["survivors"] != int(clients):
            raise RuntimeError("Somebody is missing in the sum.")
    cpu, wall = (min(each) for each in zip(*found[1:], strict=True))
    choice = assembly.masks.sums.terms.choice(int(clients))
    print(json.dumps({"cpu": cpu, "wall": wall, "k": choice.neighbours, "t": choice.threshold}))


if __name__ == "__main__":
    main()
