"""The training rows that serve as test rows if no test set is given.

Without privacy: a random share, except that each class and client keeps one row in training.

With privacy all rows of a unit are on one side: all rows of a client, all rows of a person, or all copies of an example.
Otherwise the accuracy would reveal information on units that train. Whether a unit is held out is a function of that unit alone
(of its content or name, and the seed), like an independent coin: adding or removing a unit moves no other unit, so a guarantee
for a unit of the training rows holds for a unit of all rows. Clients' names and number are public: the clients with the
smallest hash numbers are held out. Held-out rows never train; no guarantee covers measurements on them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fed.errors import DataError
from secure_fed.learning.data.rows import Rows

HELD_OUT = {unit: f"held out by {unit}" for unit in ("row", "example", "person", "client")}
GIVEN = "given in Python"  # the test rows, and the task, of a run on a program's own objects
Indices = NDArray[np.int64]


def is_declared(tested: str) -> bool:
    """Whether the test rows were declared as test rows, and not held out of the training rows."""
    return tested not in HELD_OUT.values()


def at_random(rows: Rows, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """A random `fraction` of the rows as test, at least one; each class and client keeps one in training."""
    order = np.random.default_rng(seed).permutation(len(rows))
    kept = np.zeros(len(rows), dtype=bool)
    for column in (rows.classes, rows.client):
        if column is not None:
            kept[np.unique(np.asarray(column)[order], return_index=True)[1]] = True
    free = np.flatnonzero(~kept)
    if not len(free):
        raise DataError(
            f"{len(rows)} training examples are too few to hold out a test set (data.test_fraction = "
            f"{fraction}) and leave one of every class and client; set data.test to a file of test examples"
        )
    test = order[free[: max(1, round(fraction * len(rows)))]]
    return np.setdiff1d(order, test), np.sort(test)


def whole_clients(rows: Rows, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """All rows of a `fraction` of the clients as test, at least one client; the choice depends on the names alone."""
    owners = rows.client or ()
    names = sorted(set(owners), key=lambda name: _number(name, seed))
    if len(names) < 2:
        raise DataError(
            "privacy.unit is 'client', so whole clients are held out as test rows, and these data have one client at most; set "
            "data.test to a file of test examples"
        )
    out = set(names[: min(len(names) - 1, max(1, round(fraction * len(names))))])
    return _sides([name in out for name in owners])


def each_by_itself(rows: Rows, fraction: float, seed: int, *, persons: bool) -> tuple[Indices, Indices]:
    """Every example (or person) is a test row with probability `fraction`, independently of all others."""
    identities: Any = rows.person if persons else zip(rows.text, rows.text_b or rows.text, strict=True)
    out = [_number(identity, seed) < fraction for identity in identities or ()]
    train, test = _sides(out)
    owners = rows.client or ("everybody",) * len(rows)
    if not len(test) or {owners[i] for i in train} != set(owners):
        raise DataError(
            f"data.test_fraction = {fraction} and federation.seed hold out no test rows, or all rows of a client: set "
            "data.test to a file of test examples"
        )
    return train, test


def _sides(out: list[bool]) -> tuple[Indices, Indices]:
    chosen = np.asarray(out, dtype=bool)
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def _number(identity: Any, seed: int) -> float:
    """A number in [0, 1), uniform over seeds, that depends on this identity alone."""
    key = hashlib.sha256(f"test rows of seed {seed}".encode()).digest()
    said = hashlib.blake2b(json.dumps(identity, default=str).encode(), key=key, digest_size=8).digest()
    return int.from_bytes(said, "big") / 2**64
