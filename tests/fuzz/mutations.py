"""Mutated messages: one function for the fuzzer and for hypothesis, each with its own source of choices."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from protocols.wire import HEADER

Pick = Callable[[int, int], int]  # a number from the first to the second, both included
Noise = Callable[[int], bytes]  # at most this number of bytes

KINDS = ("noise", "cut", "flip", "splice", "body", "count", "longer", "another", "header")


def mutated(message: bytes, pool: Sequence[bytes], pick: Pick, noise: Noise) -> bytes:
    """`message` changed in one of nine ways, with pieces of the messages in `pool`. It may stay unchanged."""
    kind = KINDS[pick(0, len(KINDS) - 1)]
    other = pool[pick(0, len(pool) - 1)]
    at = pick(0, len(message))
    if kind == "noise":
        return noise(400)
    if kind == "cut":
        return message[:at]
    if kind == "splice":
        return message[:at] + other[pick(0, len(other)) :]
    if kind == "body":
        return message[: HEADER.size] + noise(400)
    if kind == "longer":
        return message[:at] + noise(40) + message[at:]
    if kind == "another":
        return other
    if kind == "header":
        return message[: HEADER.size] + other[HEADER.size :]
    return _flipped(message, pick) if kind == "flip" else _miscounted(message, pick)


def _flipped(message: bytes, pick: Pick) -> bytes:
    changed = bytearray(message)
    for _ in range(pick(1, 4) if changed else 0):
        changed[pick(0, len(changed) - 1)] ^= 1 << pick(0, 7)
    return bytes(changed)


def _miscounted(message: bytes, pick: Pick) -> bytes:
    """The message with a number near 0, 2^31 or 2^32 where a count or an id could be."""
    changed, size = bytearray(message), 4
    if len(message) >= HEADER.size + size:
        words = (len(message) - HEADER.size) // size
        place = HEADER.size + size * (pick(0, words - 1) if pick(0, 1) else min(8 * pick(0, 1), words - 1))
        near = (0, 2**31, 2**32)[pick(0, 2)] + pick(-16, 16)
        struct.pack_into("<I", changed, place, near % 2**32)
    return bytes(changed)
