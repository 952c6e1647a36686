"""Sessions weaker than clients require, to which a server invites them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from protocols.errors import ParameterError
from protocols.keys import Identity, registry_digest
from protocols.parameters import Parameters
from protocols.rig.attack import Attack, lie
from protocols.rig.scene import PARAMETERS

PROPOSALS: list[Attack] = []
_proposed = partial(lie, PROPOSALS, catcher="clients", stage=PARAMETERS, error=ParameterError, hook="propose")


@_proposed("low-threshold")
def _low_threshold(parameters: Parameters) -> Parameters:
    """The server asks its clients into a session with a lower threshold."""
    # The lowest threshold that an active session can have; in a passive one, a single share opens everything.
    least = parameters.holders // 2 + 1 if parameters.active else 1
    return replace(parameters, threshold=min(least, parameters.threshold - 1))


@_proposed("small-sum")
def _small_sum(parameters: Parameters) -> Parameters:
    """The server asks its clients into a session that releases sums of fewer than they agreed on, of two if it can."""
    # Where clients choose, the smallest number that can agree on one list of survivors.
    least = len(parameters.clients) // 2 + 1 if parameters.chosen else 2
    return replace(parameters, survivors=min(least, parameters.survivors - 1))


@_proposed("downgrade", active=True)
def _passive(parameters: Parameters) -> Parameters:
    """The server asks clients that want an active session into a passive one."""
    return replace(parameters, active=False, registry=bytes(32), partners=0)


@_proposed("foreign-registry", active=True)
def _foreign_registry(parameters: Parameters) -> Parameters:
    """The server asks its clients into a session with identities that it has made itself."""
    identities = {client: Identity.new().public for client in parameters.clients}
    return replace(parameters, registry=registry_digest(identities, parameters.clients))
