"""`fra_over_rounds.py` on real clients' changes: 500 clients of 5 built-in notes each, 50 in a round, 10 rounds.

    python benchmarks/fra_real_changes.py [--seed 0]

FRA-LoRA trains builtin/tiny without privacy, every client once, and each round's mean change of each of the 6 adapted matrices
of 128 x 128 is recorded. Then noise of growing size is added, independent or correlated over rounds at the same epsilon, and
the sum is estimated as in `fra_over_rounds.py`. Printed is |W - sum| / |sum| (Frobenius) after the last round, the mean over
the matrices. `noise` is the standard deviation of the independent noise on an entry of a mean; 0.0024 is its value for 250
clients a round at epsilon 8 and clip norm 1, once each. This noise does not affect training; in `fra_over_rounds.py`,
"learned", it does.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import fra_over_rounds
import torch
from fra_over_rounds import ESTIMATES, Noise, Server, noises
from timing import machine
from torch import Tensor

from privacy import correlation
from privacy.correlation import INDEPENDENT
from secure_fed import Federation, RunConfig
from secure_fed.methods.fra_lora import FraLora
from secure_fed.methods.method import CHANGE, State
from secure_fed.tensors.tensors import Tensors

ROUNDS = 10
STDS = (0.001, 0.002, 0.004, 0.008)


@dataclass(frozen=True)
class Noting(FraLora):
    """FRA that records the mean change of every matrix."""

    seen: list[dict[str, Tensor]] = field(default_factory=list)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        mean = means[CHANGE]
        self.seen.append({name: mean.tensor(name) for name in mean if name.endswith(".delta")})
        return super().apply(state, means, noise_std)


def changes(seed: int) -> list[dict[str, Tensor]]:
    """The mean change of each matrix in each round."""
    config: dict[str, Any] = {
        "data": {"examples": 2500, "test_examples": 500},
        "federation": {"clients": 500, "cohort": 50, "rounds": ROUNDS, "sampling": "schedule", "seed": seed},
        "method": {"name": "fra_lora", "rank": fra_over_rounds.RANK},
        "training": {"lr": 0.02, "lr_schedule": "constant"},
        "evaluation": {"every": ROUNDS},
    }
    federation = Federation(RunConfig.from_dict(config))
    method = federation.assembly.method
    assert isinstance(method, FraLora)
    noting = Noting(method.adapter)
    federation.assembly = replace(federation.assembly, server=replace(federation.assembly.server, method=noting))
    federation.run()
    return noting.seen


def errors(rounds: list[dict[str, Tensor]], kind: Noise) -> dict[str, float]:
    """The error of every estimate, the mean over the matrices."""
    found = dict.fromkeys(ESTIMATES, 0.0)
    for number, name in enumerate(rounds[0]):
        total, size = sum((each[name] for each in rounds), torch.zeros(())), len(rounds[0][name])
        servers = {estimate: Server(estimate, kind, size) for estimate in ESTIMATES}
        for round_, noise in zip(
            range(ROUNDS), noises(kind, size, torch.Generator().manual_seed(number)), strict=False
        ):
            for server in servers.values():
                server.take(rounds[round_][name] + noise, round_)
        for estimate, server in servers.items():
            found[estimate] += float((server.product - total).norm() / total.norm()) / len(rounds[0])
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    print(machine("torch") + "; one thread\n")
    rounds = changes(given.seed)
    print(f"| noise | over rounds | {' | '.join(ESTIMATES)} |\n|---:|---|{'---:|' * len(ESTIMATES)}")
    for std in STDS:
        for name, made in (("independent", INDEPENDENT), ("banded", correlation.best(ROUNDS, ROUNDS, 1))):
            found = errors(rounds, (std, made))
            print(f"| {std:g} | {name} | {' | '.join(f'{found[each]:.2f}' for each in ESTIMATES)} |", flush=True)


if __name__ == "__main__":
    main()
