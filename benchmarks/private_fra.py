"""The cost of client-level privacy for FRA-LoRA in one layer.   python benchmarks/private_fra.py [--size 4096] [--rank 8]

For one size x size matrix, one thread; each step runs in its own process, and its peak memory is counted above the memory in
use before the step (from /proc, so only on Linux):

    norm, factors      the norm for clipping, from a client's factors after the transformation into its own factors
    norm, formed       the same from the dense matrix
    noise              noise on every entry of the dense sum, from the operating system's entropy, and rounding
    denoise            shrinkage of the first singular values, and the sum with B A split again
    denoise, SVD       the same estimate from a full SVD, float64
    denoise, SVD f32   the same in float32

Then the excess of a clipped product over the clip norm C by rounding, if the two halves of [dB, B] [A_i ; dA] are longer than
their sum by the given factor, with the original factors and with the client's own factors.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from privacy.denoise import shrunk
from privacy.entropy import SystemEntropy
from privacy.mechanisms import Gaussian, clip_factor
from secure_fed.tensors.low_rank import balanced, denoised, recompressed, truncated
from secure_fed.tensors.tensors import LowRank

CLIENTS = 1000
MIB = 2.0**20


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def contribution(size: int, rank: int) -> LowRank:
    return LowRank(normal(size, 2 * rank), normal(2 * rank, size, seed=1))


def mean(size: int, rank: int) -> Tensor:
    """A mean of rank `rank` and norm 0.7, with the noise for 1000 clients, z = 1 and C = 1."""
    signal = LowRank(normal(size, rank), normal(rank, size, seed=1)).dense()
    return signal * (0.7 / signal.norm()) + normal(size, size, seed=2) / CLIENTS


def norm_from_factors(size: int, rank: int) -> Callable[[], object]:
    factors = contribution(size, rank)
    return lambda: recompressed(factors).square_norm()


def norm_formed(size: int, rank: int) -> Callable[[], object]:
    factors = contribution(size, rank)
    return lambda: torch.linalg.vector_norm(factors.dense(), dtype=torch.float64)


def noise(size: int, rank: int) -> Callable[[], object]:
    total, mechanism = {"matrix": torch.zeros(size, size)}, Gaussian(1.0)
    return lambda: mechanism.noised(total, 1.0, SystemEntropy().stream("benchmark"))


def denoise(size: int, rank: int) -> Callable[[], object]:
    noised, product = mean(size, rank), LowRank(normal(size, rank), normal(rank, size, seed=3))
    return lambda: balanced(truncated(product + denoised(noised, rank, 1 / CLIENTS, shrink=True), rank))


def full_svd(size: int, rank: int, dtype: torch.dtype) -> Callable[[], object]:
    noised = mean(size, rank)

    def work() -> Tensor:
        u, s, vt = torch.linalg.svd(noised.to(dtype), full_matrices=False)
        return u[:, :rank] * shrunk(s, (size, size), 1 / CLIENTS)[:rank] @ vt[:rank]

    return work


def full_svd_double(size: int, rank: int) -> Callable[[], object]:
    return full_svd(size, rank, torch.float64)


def full_svd_single(size: int, rank: int) -> Callable[[], object]:
    return full_svd(size, rank, torch.float32)


STEPS = {
    "norm, factors": norm_from_factors,
    "norm, formed": norm_formed,
    "noise": noise,
    "denoise": denoise,
    "denoise, SVD": full_svd_double,
    "denoise, SVD f32": full_svd_single,
}


def measured(step: str, size: int, rank: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    STEPS[step](64, 4)()  # loads and plans everything for the first call
    work = STEPS[step](size, rank)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
    before = memory("VmRSS")
    started = time.perf_counter()
    work()
    answer.send((time.perf_counter() - started, memory("VmHWM") - before))


def memory(kind: str) -> float:
    """The memory of this process now (VmRSS) or at its peak (VmHWM), in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def regauged(size: int, rank: int, share: float) -> tuple[LowRank, float]:
    """2/3 (B_i A_i - B A) for B_i A_i that differs from B A by a share `share` but has rotated factors; and halves over sum."""
    b, a, r = normal(size, rank), normal(rank, size, seed=1), torch.linalg.qr(normal(rank, rank, seed=2))[0]
    b_i, a_i = (b + share * normal(size, rank, seed=3)) @ r, r.T @ a
    left, right = torch.cat([b_i - b, b], 1) * (2 / 3), torch.cat([a_i, a_i - a], 0)
    halves = [left[:, half].double() @ right[half].double() for half in (slice(rank), slice(rank, None))]
    return LowRank(left, right), float((halves[0].norm() + halves[1].norm()) / (halves[0] + halves[1]).norm())


def excess(product: LowRank) -> float:
    """The relative excess of a product over C after clipping to C, with entries as real numbers or formed in float32."""
    norm = math.sqrt(product.square_norm())
    clip_norm = norm / 1000
    clipped = product * clip_factor(norm, clip_norm)
    exact = (clipped.left.double() @ clipped.right.double()).norm()
    return max(0.0, float(max(exact, clipped.dense().double().norm())) / clip_norm - 1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--size", type=int, default=4096)
    arguments.add_argument("--rank", type=int, default=8)
    given = arguments.parse_args()
    fresh = multiprocessing.get_context("spawn")
    print(f"{'step':<18}{'seconds':>10}{'peak, MiB':>12}    (the matrix in float32: {4 * given.size**2 / MIB:.0f} MiB)")
    for step in STEPS:
        here, there = fresh.Pipe()
        process = fresh.Process(target=measured, args=(step, given.size, given.rank, there))
        process.start()
        there.close()
        seconds, peak = here.recv()
        process.join()
        print(f"{step:<18}{seconds:10.3f}{peak:12.0f}", flush=True)
    torch.set_num_threads(1)
    print(f"\n{'halves / sum':>12}{'over C, as they are':>22}{'over C, own factors':>22}")
    for share in (1.0, 1e-2, 1e-4, 1e-6):
        product, ratio = regauged(512, given.rank, share)
        print(f"{ratio:12.1e}{excess(product):22.1e}{excess(recompressed(product)):22.1e}")


if __name__ == "__main__":
    main()
