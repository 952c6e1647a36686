"""The cost of FRA-LoRA's merge at real size, beside summing the same contributions.

    python benchmarks/fra_merge.py [--turns 3]

100 clients, rank 8, one thread. Prints seconds of this thread, the least over the turns, for

    add      form every client's change B A and add it to one dense float32 matrix, as any server of products must
    merge    ours: sum, mean, and the best approximation of rank 8 of B A + mean, split into the next B and A

in a first round (B = 0), for 48 matrices of 1024 x 1024 (RoBERTa-large's queries and values) and one of 4096 x 4096. Clients
either share half of their changes ("agreeing") or nothing ("unrelated"). In the latter case their mean is noise, whose singular
values lie close together: the hardest case. `private` is the same mean under the noise of client-level privacy, denoised and
merged.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from timing import Limit, at_most, machine, show, timed, turns

from secure_fed.config import RunConfig
from secure_fed.methods import build
from secure_fed.methods.fra_lora import FraLora, delta
from secure_fed.methods.method import CHANGE, State
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, LowRank, Tensors

CLIENTS, RANK = 100, 8


@dataclass(frozen=True)
class Case:
    """A state of `matrices` adapted matrices, and the clients' contributions."""

    state: State
    sent: Sequence[Tensors]

    def added(self) -> dict[str, torch.Tensor]:
        """The mean of the changes, as dense matrices."""
        total = {name: torch.zeros(member.shape) for name, member in self.sent[0].items()}
        for contribution in self.sent:
            for name, member in contribution.items():
                assert isinstance(member, LowRank)
                total[name].addmm_(member.left, member.right, alpha=1 / CLIENTS)
        return total

    def merged(self, method: FraLora) -> State:
        total = PlainSum(Layout.of(self.sent[0]))
        for contribution in self.sent:
            total.add(contribution)
        return method.apply(self.state, {CHANGE: total.total() * (1 / CLIENTS)})


def case(size: int, matrices: int, *, agreeing: bool) -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    modules = [f"layer.{number}.query" for number in range(matrices)]
    state = {}
    for module in modules:
        state |= {
            f"{module}.lora_A.default.weight": normal(RANK, size),
            f"{module}.lora_B.default.weight": torch.zeros(size, RANK),
        }
    common = {module: (normal(size, 2 * RANK), normal(2 * RANK, size)) for module in modules}
    sent = []
    for _ in range(CLIENTS):
        own = {}
        for module, (left, right) in common.items():
            noise = normal(size, 2 * RANK), normal(2 * RANK, size)
            factors = (left + noise[0], right + noise[1]) if agreeing else noise
            own[delta(module)] = LowRank(factors[0] / size, factors[1] / size)
        sent.append(Tensors(own))
    return Case(State(Tensors(state)), sent)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--turns", type=int, default=3)
    repeats = arguments.parse_args().turns
    torch.set_num_threads(1)
    print(machine("torch") + "; one thread")
    method = build(RunConfig().replace({("method", "name"): "fra_lora", ("method", "rank"): RANK}))
    assert isinstance(method, FraLora)
    print(
        f"{'matrices':>16}{'clients':>12}{'add':>9}{'merge':>9}{'private':>9}{'merge / add':>13}{'private / add':>15}"
    )
    limits: list[Limit] = []
    for size, matrices in ((1024, 48), (4096, 1)):
        for agreeing in (True, False):
            made = case(size, matrices, agreeing=agreeing)
            mean = made.added()
            std = float(mean[next(iter(mean))].norm()) / size  # noise as large as the change
            noised = Tensors((name, change + std * torch.randn(change.shape)) for name, change in mean.items())
            ways = {
                "add": timed(made.added, time.thread_time),
                "merge": timed(partial(made.merged, method), time.thread_time),
                "private": timed(partial(method.apply, made.state, {CHANGE: noised}, std), time.thread_time),
            }
            found = {name: min(each) for name, each in turns(ways, repeats).items()}
            add, kind = found["add"], "agreeing" if agreeing else "unrelated"
            print(f"{f'{matrices} of {size}':>16}{kind:>12}", end="")
            print("".join(f"{found[name]:9.2f}" for name in ways) + f"{found['merge'] / add:13.2f}", end="")
            print(f"{found['private'] / add:15.2f}", flush=True)
            limits.append(at_most(f"merge / add, {matrices} of {size}, {kind}", found["merge"] / add, 3.0))
    show(limits)


if __name__ == "__main__":
    main()
