"""When is a product of factors better kept as factors?   python benchmarks/low_rank.py [--size 768]

For an m x m matrix given as factors of inner size k, one thread, medians in milliseconds:

    factors   its truncated SVD from two QRs and a k x k SVD, float64
    dense     the same from the formed matrix, float64
    single    the dense one in float32

`low_rank` and `summation` choose between the first two by k / m.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from timing import medians, timed, turns


def from_factors(left: torch.Tensor, right: torch.Tensor) -> None:
    q, a = torch.linalg.qr(left)
    p, b = torch.linalg.qr(right.T)
    u, _, vt = torch.linalg.svd(a @ b.T)
    q @ u, vt @ p.T


def from_matrix(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.linalg.svd(left @ right, full_matrices=False)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--size", type=int, default=768)
    arguments.add_argument("--runs", type=int, default=5)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print(f"{'k / m':>6}{'factors':>9}{'dense':>9}{'single':>9}{'dense / factors':>17}")
    for share in (0.25, 0.5, 2 / 3, 1.0):
        k = round(share * given.size)
        left = torch.randn(given.size, k, generator=generator, dtype=torch.float64)
        right = torch.randn(k, given.size, generator=generator, dtype=torch.float64)
        ways = {
            "factors": timed(partial(from_factors, left, right)),
            "dense": timed(partial(from_matrix, left, right)),
            "single": timed(partial(from_matrix, left.float(), right.float())),
        }
        found = medians(turns(ways, given.runs, warm=1))
        print(f"{share:6.2f}" + "".join(f"{1e3 * seconds:9.1f}" for seconds in found.values()), end="")
        print(f"{found['dense'] / found['factors']:17.1f}")


if __name__ == "__main__":
    main()
