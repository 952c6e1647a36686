"""The cost of proofs of a bounded input beside masks: prints the tables of `docs/bounding_inputs.md`.

Bytes follow from the formats. Seconds are operation counts times this processor's measured time for one operation: a product of
a point of Curve25519 and a number (OpenSSL, by `cryptography`), and a product modulo a prime of 31 bits (numpy). Four of the
latter count as one product in a field of 64 bits, which is several times the time of compiled code. Neither is a measurement of
a proof system. ACORN's row scales its authors' own figure.

    python benchmarks/bounding_inputs.py
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

SIZES = (24_000, 300_000, 1_200_000)
CLIENTS = (50, 1000)
BITS = 16  # bits of a coordinate, in a proof of its range
WORD, POINT, FIELD, LARGE_FIELD = 4, 32, 8, 16  # bytes
TOGETHER = (
    16  # products of points that are added up (Pippenger) cost about a 16th each: 256 / 16 additions, not 256 steps
)
PROVING = 10  # Bulletproofs, per bit: 4 to fold generators, 4 for the inner products, 2 to blind
VERIFYING = 2  # per bit, in one sum for all clients
ACORN = 80.0 / 250_000  # seconds per coordinate of 16 bits, at most (abstract)
ACORN_MORE, PINE_MORE = 1.1, 1.05  # bytes relative to the scheme without proofs (abstracts)


def best(action: Callable[[], object], repeats: int, tries: int = 9) -> float:
    """The least seconds for one action, over several tries of `repeats` actions."""
    found = math.inf
    for _ in range(tries):
        started = time.thread_time()
        for _ in range(repeats):
            action()
        found = min(found, (time.thread_time() - started) / repeats)
    return found


def point_seconds() -> float:
    own, other = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key()
    return best(lambda: own.exchange(other), 200)


def field_seconds() -> float:
    left, right = np.random.default_rng(0).integers(1, 2**31 - 1, (2, 1 << 11), dtype=np.uint64)
    return 4 * best(lambda: left * right % np.uint64(2**31 - 1), 300) / len(left)


def size(count: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    for limit, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= limit:
            return f"{seconds / limit:.2g} {unit}"
    return f"{1000 * seconds:.0f} ms" if seconds else "-"


def schemes(d: int, n: int, point: float, field: float) -> list[tuple[str, float, float, float]]:
    """Name, bytes up and seconds of one client, seconds of the server (of each, if there are two)."""
    bits, together = BITS * d, point / TOGETHER
    return [
        ("masks alone", WORD * d, 0.0, 0.0),
        (
            "range proof of every coordinate",
            2 * POINT * d,
            2 * d * point + PROVING * bits * together,
            (VERIFYING * bits + 2 * n * d) * together,
        ),
        ("ACORN", ACORN_MORE * WORD * d, ACORN * d, math.nan),
        ("shares for every client, checked by all", n * FIELD * d, n * 3 * d * field, 0.0),
        (
            "Prio3SumVec, two servers",
            LARGE_FIELD * bits,
            4 * 3 * bits * math.log2(bits) * field,
            4 * n * 3 * bits * field,
        ),
        ("PINE, two servers", PINE_MORE * FIELD * d, 3 * d * math.log2(d) * field, n * 3 * d * field),
    ]


def main() -> None:
    point, field = point_seconds(), field_seconds()
    print(
        f"{os.cpu_count()} cores, one used; a point times a number {1e6 * point:.0f} us, "
        f"a product in the field {1e9 * field:.0f} ns\n"
    )
    for n in CLIENTS:
        print(f"| n = {n} | " + " | ".join(f"d = {d:,}" for d in SIZES) + " |")
        print("|---" * (len(SIZES) + 1) + "|")
        columns = [schemes(d, n, point, field) for d in SIZES]
        for rows in zip(*columns, strict=True):
            cells = [
                f"{size(up)}, {duration(own)}, {'not said' if math.isnan(server) else duration(server)}"
                for _, up, own, server in rows
            ]
            print(f"| {rows[0][0]} | " + " | ".join(cells) + " |")
        print()


if __name__ == "__main__":
    main()
