"""Vectors under wrong masks, out of bounds, or with appended data."""

from __future__ import annotations

import random

import numpy as np

from protocols.errors import MessageError, Tampering
from protocols.keys import Mask, pair_mask
from protocols.masking import add_masks
from protocols.messages import Masked
from protocols.rig.attack import Attack, lie
from protocols.rig.scene import Scene
from protocols.rig.tampering.means import sent

VECTORS: list[Attack] = []

_METADATA = b'{"examples": 412, "loss": 0.31}'


@lie(VECTORS, "weak-masks", "server", "unmask", Tampering, "send", sent("mask", at_once=False))
def _weak_masks(scene: Scene, answer: bytes) -> bytes:
    """A client's masks come from a Mersenne Twister seeded with 32 bits; what is taken off is another stream, so no sum
    comes out.
    """
    message = bytearray(answer)
    vector = Masked.from_bytes(message, scene.parameters, scene.liar).vector
    for secret, sign in _masks(scene):
        add_masks(vector, [(secret, -sign)])
        stream = random.Random(int.from_bytes(secret.reveal()[:4], "little")).randbytes(vector.nbytes)
        combine = np.add if sign > 0 else np.subtract
        combine(vector, np.frombuffer(stream, vector.dtype), out=vector)
    return bytes(message)


def _masks(scene: Scene) -> list[Mask]:
    """The masks that the liar added to its vector."""
    client = scene.clients[scene.liar]
    keys, session = client._keys, scene.parameters.session
    if keys is None:
        return []
    adverts = client._agreed.adverts
    partners = client._graph.partners(client.me) if scene.parameters.active else client._held
    pairs = [pair_mask(keys.mask, adverts[other].mask, session, client.me, other) for other in partners]
    return [(keys.seed, 1), *pairs]


@lie(VECTORS, "beyond-bound", "server", "unmask", Tampering, "send", sent("mask", at_once=False))
def _beyond_bound(scene: Scene, answer: bytes) -> bytes:
    """A client adds a quarter of all that a word holds to each coordinate of its vector."""
    message = bytearray(answer)
    vector = Masked.from_bytes(message, scene.parameters, scene.liar).vector
    vector += vector.dtype.type(2 ** (scene.parameters.bits - 2))
    return bytes(message)


@lie(VECTORS, "clear-metadata", "server", "mask", MessageError, "send", sent("mask"), exact=True)
def _metadata(scene: Scene, answer: bytes) -> bytes:
    """A client appends its example count and a metric, in clear, to its masked vector."""
    return answer + _METADATA
