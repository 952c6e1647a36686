"""Signatures on envelopes, independent of the transport.

The coordinator signs every request with the key that the charter names, and a node signs every answer with its identity,
together with the digest of the request. So a carrier of messages (a proxy, the owner of the relaying server) can drop and delay
messages, but can neither make nor change one, nor pass off the answer to one request as the answer to another. Signatures hide
nothing; masks and TLS do.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from protocols.keys import Identity, verify
from secure_fed.deployment.envelope import Envelope
from secure_fed.errors import SecureFedError

SIGNATURE = "signature"
REQUEST, ANSWER = "coordinator request", "node answer"


class Forged(SecureFedError):  # noqa: N818 - a finding, not a failure
    """An envelope without the signature of its supposed sender."""


def digest(envelope: Envelope) -> bytes:
    """(32,) SHA-256 over the header and every array: its name, dtype, shape and bytes; without the signature."""
    found = hashlib.sha256(struct.pack("<Q", len(envelope.header)) + envelope.header)
    for name in sorted(envelope.arrays):
        if name == SIGNATURE:
            continue
        array = np.ascontiguousarray(envelope.arrays[name])
        for part in (name.encode(), array.dtype.str.encode(), struct.pack(f"<{array.ndim}Q", *array.shape)):
            found.update(struct.pack("<Q", len(part)) + part)
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.digest()


def sealed(envelope: Envelope, identity: Identity, purpose: str, charter: bytes, answers: bytes = b"") -> Envelope:
    """The envelope with a signature. charter: its digest. answers: digest of the request that this answers."""
    signature = identity.sign(purpose, charter, answers + digest(envelope))
    return Envelope(envelope.header, {**envelope.arrays, SIGNATURE: np.frombuffer(signature, np.uint8)})


def opened(envelope: Envelope, public: bytes, purpose: str, charter: bytes, answers: bytes = b"") -> Envelope:
    """The envelope without its signature. Forged unless the holder of the key signed it, for this purpose and charter."""
    signature = envelope.arrays.get(SIGNATURE)
    said = b"" if signature is None else signature.tobytes()
    if len(said) != 64 or not verify(public, said, purpose, charter, answers + digest(envelope)):
        raise Forged(
            "an envelope is not signed by the party that it should be from: somebody on the way made or changed it"
        )
    return unsealed(envelope)


def unsealed(envelope: Envelope) -> Envelope:
    """The envelope without its signature, which is not checked."""
    return Envelope(envelope.header, {name: array for name, array in envelope.arrays.items() if name != SIGNATURE})
