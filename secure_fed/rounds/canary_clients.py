"""Clients of the audit pool that train along a random direction (`evaluation.canaries = "direction"`)."""

from __future__ import annotations

from dataclasses import replace

from secure_fed.config import RunConfig
from secure_fed.learning.audit_pool.canaries import length_beyond_clipping
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.training.canary_directions import trains_towards
from secure_fed.rounds.client_setup import ClientSetup


def canary_setups(config: RunConfig, held: AuditPool, setup: ClientSetup) -> dict[str, ClientSetup]:
    """The shared part, by client name, of each client of the pool that trains along a direction."""
    if not held.directions or held.kind != "client":
        return {}
    far, seed = length_beyond_clipping(config), config.federation.seed
    return {unit.name: replace(setup, train=trains_towards(unit.name, seed, far)) for unit in held.units}
