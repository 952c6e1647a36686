"""The audit pool of a run that has phantoms: who they are, and what their coins say."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from secure_fed.config import RunConfig
from secure_fed.learning.audit_pool.phantom_plan import Count
from secure_fed.learning.audit_pool.pool import AuditPool, draws, kind_of
from secure_fed.learning.audit_pool.unit import Unit
from secure_fed.learning.data.pointing import Pointing


def phantoms(config: RunConfig, count: Count, names: Sequence[str], units: Sequence[int]) -> AuditPool:
    """The phantoms of a federation of these clients, with their coins tossed. units: how many each client has.

    Beside clients they are clients of their own, "phantom-0007". Beside examples or groups each is an example at a client,
    "client-0003/phantom-0007": spread over the clients in proportion to their units.
    A coin is a keyed hash of the name under the seed. It depends on nobody's data, and neither does the direction.
    """
    kind, seed = kind_of(config), config.federation.seed
    word = "phantom"
    while any(name.startswith(f"{word}-") for name in names):
        word = f"{word}_"  # a client of the user's is called so
    called = [f"{word}-{number:04d}" for number in range(count.phantoms)]
    if kind == "client":
        found = [Unit(name, name, ()) for name in called]
    else:
        hosts = _hosts(count.phantoms, units)
        placed = [(names[host], f"{names[host]}/{name}") for host, name in zip(hosts, called, strict=True)]
        found = [Unit(name, client, (Pointing(None, name, seed),)) for client, name in placed]
    key = hashlib.sha256(f"phantoms of seed {seed}".encode()).digest()
    coins = np.array([draws(key, unit.name.encode())[1] < 0.5 for unit in found], dtype=bool)
    return AuditPool(
        kind, tuple(names), (), units=tuple(found), members=coins, why=count.why, of="phantoms", directions=True
    )


def _hosts(count: int, units: Sequence[int]) -> list[int]:
    """(count,) indices of clients, evenly over all units that there are."""
    upto = np.cumsum(units)
    at = (np.arange(count) + 0.5) / max(count, 1) * (upto[-1] if len(upto) else 0)
    return [int(host) for host in np.searchsorted(upto, at, side="right")]
