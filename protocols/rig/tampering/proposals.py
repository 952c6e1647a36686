"""Sessions into which a server asks clients that want a better one."""

from __future__ import annotations

from dataclasses import replace

from protocols.errors import ParameterError
from protocols.keys import Identity
from protocols.parameters import Parameters, registry_digest
from protocols.rig.attack import Attack
from protocols.rig.scene import PARAMETERS


def _low_threshold(parameters: Parameters) -> Parameters:
    """The least that an active session can have at all; in a passive one, a single share opens everything."""
    least = parameters.holders // 2 + 1 if parameters.active else 1
    return replace(parameters, threshold=min(least, parameters.threshold - 1))


def _small_sum(parameters: Parameters) -> Parameters:
    """Of two, or where clients choose of the fewest that one list of survivors can be agreed on by."""
    least = len(parameters.clients) // 2 + 1 if parameters.chosen else 2
    return replace(parameters, survivors=min(least, parameters.survivors - 1))


def _passive(parameters: Parameters) -> Parameters:
    return replace(parameters, active=False, registry=bytes(32), partners=0)


def _foreign_registry(parameters: Parameters) -> Parameters:
    identities = {client: Identity.new().public for client in parameters.clients}
    return replace(parameters, registry=registry_digest(identities, parameters.clients))


PROPOSALS = (
    Attack(
        "low-threshold",
        "The server asks its clients into a session with a lower threshold.",
        "clients",
        PARAMETERS,
        ParameterError,
        propose=_low_threshold,
    ),
    Attack(
        "small-sum",
        "The server asks its clients into a session that releases sums of fewer than they agreed on, of two if it can.",
        "clients",
        PARAMETERS,
        ParameterError,
        propose=_small_sum,
    ),
    Attack(
        "downgrade",
        "The server asks clients that want an active session into a passive one.",
        "clients",
        PARAMETERS,
        ParameterError,
        active=True,
        propose=_passive,
    ),
    Attack(
        "foreign-registry",
        "The server asks its clients into a session with identities that it has made itself.",
        "clients",
        PARAMETERS,
        ParameterError,
        active=True,
        propose=_foreign_registry,
    ),
)
