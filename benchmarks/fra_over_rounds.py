"""Should FRA-LoRA denoise the mean of each round, or the sum of all means so far?

    python benchmarks/fra_over_rounds.py [--sizes 128 1024] [--seeds 3] [--epsilon 8]

20 rounds, one n x n matrix, rank 8. A round's mean is a planted change under noise of one of three kinds, at the same epsilon
(delta 1e-5) and in units of clip norm / cohort:

    coins     clients drawn by secret coins at rate 1/20, independent noise: epsilon holds only against readers of the model
    turns     each client once in a public order, independent noise
    banded    the same order, noise correlated by the banded square root, with the plan's band

Planted. The mean change of round t is X_t of rank 8 with equal singular values, `signal` times the smallest visible value in
one mean under the independent noise of `turns` (`privacy.denoise.visible`). Its subspaces: `same` in all rounds; `fading`, the
same, each change .8 of the one before; `drifting`, each turned out of the one before by 30 degrees; `new` in every round.
Printed is |W_t - (X_1 + .. + X_t)| / |X_1 + .. + X_t| (Frobenius) at t = 20, and in brackets its root mean square over all t.

Learned. The mean change comes from one local step from the model: factors B, A descend |B A - X|^2 / 2 for an X of rank 8, and
the change of B A is clipped to norm 1, so that later means depend on earlier noise. `signal` is the singular value of X as a
multiple of the smallest visible value in one mean. Printed is |W_t - X| / |X|.

The estimates W_t, always of rank 8:

    as it is         best(W + mean)                                       method.denoise = "none"
    mean, truncate   best(W + best(mean))                                 "truncate"
    mean, shrink     best(W + shrunk(mean, its noise))                    "shrink"
    sum, truncate    best(the sum of all means)
    sum, shrink      shrunk(the sum of all means, the sum's noise)
    tangent          best(W + P(mean)), P the projection on all X A + B Y           "tangent"; for learned changes alone

Seeds 0, 1, ... draw everything; the same noise serves all estimates. One thread.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from timing import machine
from torch import Tensor

from privacy import accounting, correlation
from privacy.correlation import INDEPENDENT, Correlation
from privacy.denoise import visible
from privacy.participation import Poisson
from secure_fed.tensors.low_rank import balanced, denoised, tangent, truncated
from secure_fed.tensors.tensors import LowRank

ROUNDS, RANK, DELTA, CLIENTS, COHORT = 20, 8, 1e-5, 5000, 250
SHAPES = ("same", "fading", "drifting", "new")
STEP = 1.0  # step size of local descent
Noise = tuple[float, Correlation]  # the standard deviation of the underlying independent noise, and C
ESTIMATES = ("as it is", "mean, truncate", "mean, shrink", "sum, truncate", "sum, shrink")
OF_LEARNED = (
    *ESTIMATES,
    "tangent",
)  # planted changes do not come from the factors, so they lie in no tangent space


def kinds(epsilon: float) -> dict[str, Noise]:
    """The noise of a round's mean, in units of clip norm / cohort."""
    coins = accounting.calibrate(Poisson(CLIENTS, COHORT / CLIENTS).release, ROUNDS, epsilon, DELTA)
    once = accounting.calibrate(accounting.unamplified, 1, epsilon, DELTA)
    banded = correlation.best(ROUNDS, ROUNDS, 1)
    assert banded.exposures(ROUNDS, ROUNDS, 1)[-1] <= 1 + 1e-9
    return {"coins": (coins, INDEPENDENT), "turns": (once, INDEPENDENT), "banded": (once, banded)}


def noises(kind: Noise, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """An endless iterator of the noise of each round's mean: row t of C^-1 Z."""
    std, c = kind
    drawn: list[Tensor] = []
    for round_ in itertools.count():
        drawn.append(std * torch.randn(size, size, generator=generator))
        weights = c.weights(round_ + 1).tolist()
        yield sum((weight * z for weight, z in zip(weights, reversed(drawn), strict=True) if weight), torch.zeros(()))


class Server:
    """One estimate, updated with one mean after the other."""

    def __init__(self, name: str, kind: Noise, size: int) -> None:
        self.of, _, self.rule = name.partition(", ")
        std, c = kind
        self.mean_std = [std * float(np.linalg.norm(c.weights(t + 1))) for t in range(ROUNDS)]
        self.sum_std = (std * c.errors(ROUNDS)).tolist()
        self.sum, self.product = torch.zeros(size, size), torch.zeros(size, size)
        self.factors = (torch.zeros(size, RANK), torch.zeros(RANK, size))

    def take(self, mean: Tensor, round_: int) -> None:
        shrink = self.rule == "shrink"
        self.sum += mean
        if self.of == "sum":
            product = denoised(self.sum, RANK, self.sum_std[round_], shrink=shrink).dense()
        elif self.of == "mean":
            product = self.product + denoised(mean, RANK, self.mean_std[round_], shrink=shrink).dense()
        elif self.of == "tangent":
            product = self.product + tangent(mean, LowRank(*self.factors)).dense()
        else:
            product = self.product + mean
        b, a = balanced(truncated(product, RANK))
        self.factors = (b.float(), a.float())
        self.product = self.factors[0] @ self.factors[1]


def orthonormal(size: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, RANK, generator=generator)).Q


def planted(shape: str, value: float, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The change of each round: rank 8, all singular values equal."""
    u, v = orthonormal(size, generator), orthonormal(size, generator)
    for round_ in range(ROUNDS):
        yield value * (0.8**round_ if shape == "fading" else 1.0) * u @ v.T
        if shape in ("drifting", "new"):
            share = math.tan(math.radians(30)) if shape == "drifting" else 1e6
            u, v = (torch.linalg.qr(side + share * orthonormal(size, generator)).Q for side in (u, v))


@dataclass(frozen=True)
class Case:
    """Changes of kind `changes` on a size x size matrix under noise `kind`. once: the noise that is the unit of `signal`."""

    changes: str
    signal: float
    size: int
    kind: Noise
    once: float
    seed: int

    def value(self, scale: float = 1.0) -> float:
        """The singular value of the signal, with the noise scaled by `scale`."""
        return self.signal * visible((self.size, self.size), self.once * scale)


def in_open_loop(case: Case) -> dict[str, list[float]]:
    """The error of each estimate after each round, for changes that do not depend on the estimate."""
    generator = torch.Generator().manual_seed(case.seed)
    changes = list(planted(case.changes, case.value(), case.size, generator))
    servers = {name: Server(name, case.kind, case.size) for name in ESTIMATES}
    found: dict[str, list[float]] = {name: [] for name in ESTIMATES}
    total = torch.zeros(case.size, case.size)
    for round_, noise in zip(range(ROUNDS), noises(case.kind, case.size, generator), strict=False):
        total += changes[round_]
        for name, server in servers.items():
            server.take(changes[round_] + noise, round_)
            found[name].append(float((server.product - total).norm() / total.norm()))
    return found


def in_closed_loop(case: Case) -> dict[str, list[float]]:
    """The same for clients that learn from the estimate. The clip norm is 1 and the cohort `size`."""
    generator, size = torch.Generator().manual_seed(case.seed), case.size
    target = case.value(1 / size) * orthonormal(size, generator) @ orthonormal(size, generator).T
    start, kind = orthonormal(size, generator).T, (case.kind[0] / size, case.kind[1])
    made = list(itertools.islice(noises(kind, size, generator), ROUNDS))
    found: dict[str, list[float]] = {name: [] for name in OF_LEARNED}
    for name in OF_LEARNED:
        server = Server(name, kind, size)
        server.factors = (torch.zeros(size, RANK), start)
        for round_, noise in enumerate(made):
            server.take(learned(server, target) + noise, round_)
            found[name].append(float((server.product - target).norm() / target.norm()))
    return found


def learned(server: Server, target: Tensor) -> Tensor:
    """The change of B A by one step of descent in both factors, clipped to norm 1."""
    b, a = server.factors
    gradient = b @ a - target
    change = (b - STEP * gradient @ a.T) @ (a - STEP * b.T @ gradient) - b @ a
    return change * min(1.0, 1.0 / float(change.norm()))


def cell(runs: Sequence[Sequence[float]]) -> str:
    """The error after the last round, and over all rounds: means over the seeds."""
    errors = np.array(runs)
    return f"{errors[:, -1].mean():.2f} ({np.sqrt(np.square(errors).mean()):.2f})"


@dataclass(frozen=True)
class Table:
    """once: the noise of a mean under `turns`, which defines the unit of signals."""

    size: int
    once: float
    noise: dict[str, Noise]
    seeds: int

    def show(self, changes: str, signal: float, errors: Callable[[Case], dict[str, list[float]]]) -> None:
        """The rows of these changes, one for each kind of noise."""
        for kind, given in self.noise.items():
            found = [errors(Case(changes, signal, self.size, given, self.once, seed)) for seed in range(self.seeds)]
            cells = [cell([each[name] for each in found]) for name in found[0]]
            print(f"| {changes} | {signal:g} | {kind} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sizes", type=int, nargs="+", default=[128])
    arguments.add_argument("--signals", type=float, nargs="+", default=[2.0, 1.0, 0.5], help="of planted changes")
    arguments.add_argument(
        "--targets", type=float, nargs="+", default=[8.0, 4.0, 2.0], help="signals of what is learned"
    )
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--epsilon", type=float, default=8.0)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    print(machine("torch") + "; one thread\n")
    noise = kinds(given.epsilon)
    once = noise["turns"][0]
    print("| noise | on the first mean | on the last mean | on the sum |\n|---|---:|---:|---:|")
    for name, (std, c) in noise.items():
        on_mean = [std * float(np.linalg.norm(c.weights(t + 1))) for t in (0, ROUNDS - 1)]
        print(f"| {name} | {on_mean[0]:.2f} | {on_mean[1]:.2f} | {std * c.errors(ROUNDS)[-1]:.2f} |")
    for size in given.sizes:
        table = Table(size, once, noise, given.seeds)
        print(f"\n{size} x {size}")
        head(ESTIMATES)
        for shape in SHAPES:
            for signal in given.signals:
                table.show(shape, signal, in_open_loop)
        head(OF_LEARNED)
        for signal in given.targets:
            table.show("learned", signal, in_closed_loop)


def head(estimates: Sequence[str]) -> None:
    print(f"\n| changes | signal | noise | {' | '.join(estimates)} |\n|---|---:|---|{'---:|' * len(estimates)}")


if __name__ == "__main__":
    main()
