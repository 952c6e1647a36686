"""The digest by which the members of a session know that they mean the same identities."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

from protocols.errors import ParameterError


def registry_digest(identities: Mapping[int, bytes], clients: Sequence[int]) -> bytes:
    """(32,) SHA-256("secure-fed/registry" | number of clients u32 | for each, ascending: number u32, public key 32).

    ParameterError for a client without a key of 32 bytes, and for a key that two clients have: who holds one key is one party.
    """
    invited = sorted(set(clients))
    owners: dict[bytes, int] = {}
    parts = [b"secure-fed/registry", struct.pack("<I", len(invited))]
    for client in invited:
        key = identities.get(client)
        if key is None:
            raise ParameterError(f"client {client} has no registered identity: register its public key")
        if len(key) != 32:
            raise ParameterError(f"the identity of client {client} is not 32 bytes: register an Ed25519 public key")
        if key in owners:
            raise ParameterError(
                f"clients {owners[key]} and {client} have one identity between them: register one key for each"
            )
        owners[key] = client
        parts.append(struct.pack("<I", client) + key)
    return hashlib.sha256(b"".join(parts)).digest()
