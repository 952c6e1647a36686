"""Masks: keystreams added to a vector of words, or subtracted from it, modulo 2^bits.

A mask is the AES-256-CTR keystream of a full 256-bit secret, from counter zero, read as little-endian words. Each secret is
derived for one mask, so no counter is used twice under a key.

Cost of m masks on d words: m d words of keystream and m additions, each made on a piece that stays in the processor's cache, so
that the addition takes little time beside the cipher. Memory beside the vector, for each thread: at most three pieces, and
AES's state for 256 keys. Cipher and addition both release the interpreter's lock, so threads use as many cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from protocols.codec import _WORDS, Words
from protocols.errors import ParameterError
from protocols.keys import Mask, Secret

_PIECE = 1 << 17  # bytes: two of them fit a second-level cache
_BLOCK = 16  # bytes of AES
_KEY = 32  # bytes of AES-256
_WORTH_THREADS = 1 << 22  # bytes of keystream
_OPEN = 256  # streams at once: each takes about a kilobyte, and a server may subtract as many masks as there are pairs


def add_masks(accumulator: Words, masks: Sequence[Mask], *, threads: int | None = None) -> None:
    """accumulator += sum of sign * PRG(secret), in place, modulo 2^32 or 2^64, by the accumulator's words.

    threads: with None, the number of cores if there is enough work.
    """
    _check(accumulator, masks, threads)
    size = accumulator.nbytes
    if threads is None:
        threads = cores() if size * len(masks) >= _WORTH_THREADS else 1
    share = -(-size // threads // _PIECE) * _PIECE if threads > 1 else size
    starts = range(0, size, max(share, _PIECE))
    words = accumulator.itemsize
    parts = [(start, accumulator[start // words : (start + share) // words]) for start in starts]
    if len(parts) <= 1:
        _add_in_shares(accumulator, masks, threads)
        return
    with ThreadPoolExecutor(len(parts)) as pool:
        for done in [pool.submit(_add, part, masks, start) for start, part in parts]:
            done.result()


def _add_in_shares(accumulator: Words, masks: Sequence[Mask], threads: int) -> None:
    """For a vector too short to split, each thread adds up some of the masks. Sums modulo 2^bits do not depend on order."""
    shares = [masks[first::threads] for first in range(1, min(threads, len(masks)))]
    sums = [np.zeros_like(accumulator) for _ in shares]
    with ThreadPoolExecutor(len(shares)) if shares else nullcontext() as pool:
        going = [pool.submit(_add, one, share, 0) for one, share in zip(sums, shares, strict=True)] if pool else []
        _add(accumulator, masks[::threads], 0)
        for done in going:
            done.result()
    for one in sums:
        np.add(accumulator, one, out=accumulator)


def _check(accumulator: Words, masks: Sequence[Mask], threads: int | None) -> None:
    """ParameterError before any word is changed."""
    if accumulator.dtype not in _WORDS or accumulator.ndim != 1:
        raise ParameterError(
            f"masks are added to vectors of uint32 or uint64, not to {accumulator.dtype} of {accumulator.ndim} axes"
        )
    if not accumulator.flags.writeable:
        raise ParameterError("masks are added in place, and this vector is read-only: give a copy")
    if any(sign not in (1, -1) for _, sign in masks):
        raise ParameterError("the sign of a mask is +1 (added) or -1 (removed)")
    if any(len(secret.reveal()) != _KEY for secret, _ in masks):
        raise ParameterError(f"a mask's secret must have {_KEY} bytes, and one secret here has another length")
    if threads is not None and threads < 1:
        raise ParameterError(f"threads is {threads}: choose at least one")


def _add(part: Words, masks: Sequence[Mask], start: int) -> None:
    """`add_masks` for the words from byte `start` on, a multiple of a block."""
    piece = min(_PIECE, part.nbytes)
    zeros, room = bytes(piece), bytearray(piece)
    for first in range(0, len(masks), _OPEN):
        _add_some(part, masks[first : first + _OPEN], start, zeros, room)


def _add_some(part: Words, masks: Sequence[Mask], start: int, zeros: bytes, room: bytearray) -> None:
    """Pieces are the outer loop and masks the inner one, so that a piece stays in the cache until it is done."""
    streams = [(_keystream(secret, start), np.add if sign > 0 else np.subtract) for secret, sign in masks]
    stream = np.frombuffer(room, f"<u{part.itemsize}")  # explicit, since a machine may have the other byte order
    length = len(stream)
    for begin in range(0, len(part), max(length, 1)):
        here = part[begin : begin + length]
        source, target = memoryview(zeros)[: here.nbytes], stream[: len(here)]
        for keystream, combine in streams:
            keystream.update_into(source, room)
            combine(here, target, out=here)


def _keystream(secret: Secret, start: int) -> Any:
    return Cipher(algorithms.AES256(secret.reveal()), _counter(start // _BLOCK)).encryptor()


@lru_cache(maxsize=256)
def _counter(block: int) -> modes.CTR:
    return modes.CTR(block.to_bytes(_BLOCK, "big"))


def cores() -> int:
    """The number of cores that this process may use, where the system reports it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
