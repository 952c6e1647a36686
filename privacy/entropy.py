"""The source of released noise and secret coins: a ChaCha20 keystream with a key from the operating system.

`SystemEntropy` takes a fresh key from the operating system for every stream, so streams are independent of each other and of
everything else, nobody can reproduce one, and a process forked later cannot use one: it would draw the same numbers as the
process that made the stream. `KeyedEntropy` derives the keys of a run's streams from one secret key from the
operating system, so that the run itself can reproduce a stream. `SeededEntropy` derives the keys from a seed: it exists so that
tests can inject noise, and releases made with it are not private.

The normal law is Box and Muller's transform of 53-bit uniforms in float64. It is exact up to floating point: |x| stays below
8.6 (a probability of 1e-17 is missing), and the last bits of a float64 differ from a real number's. `mechanisms` rounds its
releases to a far coarser grid.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from privacy.errors import PlanError, PrivacyError

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


class ForkError(PrivacyError):
    """A secret stream is used in another process than the one that made it; nothing was drawn."""


class Stream:
    """Random numbers of one key, in sequence. A nonce gives 2^38 bytes, the next nonce continues."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = 0
        self._begin()

    def _begin(self) -> None:
        nonce = bytes(8) + self._nonce.to_bytes(8, "little")  # a block counter, and the nonce
        self._keystream = Cipher(algorithms.ChaCha20(self._key, nonce), mode=None).encryptor()
        self._left = _OF_A_NONCE

    def words(self, count: int) -> Words:
        """(count,) independent integers, each uniform in 0 .. 2^64 - 1: every other draw is made of these bits."""
        wanted, parts = 8 * count, list[bytes]()
        while wanted > self._left:
            parts.append(self._keystream.update(bytes(self._left)))
            wanted -= self._left
            self._nonce += 1
            self._begin()
        self._left -= wanted
        parts.append(self._keystream.update(bytes(wanted)))
        return np.frombuffer(b"".join(parts), dtype="<u8")

    def uniform(self, count: int) -> Floats:
        """(count,) multiples of 2^-53 in [0, 1)."""
        uniform: Floats = (self.words(count) >> np.uint64(11)).astype(np.float64)
        uniform *= 2.0**-53
        return uniform

    def normal(self, shape: tuple[int, ...]) -> Floats:
        """Independent N(0, 1) of that shape."""
        count = math.prod(shape)
        out = np.empty(count + count % 2)
        for start in range(0, len(out), _AT_ONCE):
            part = out[start : start + _AT_ONCE]
            half = len(part) // 2
            radius = np.sqrt(-2 * np.log1p(-self.uniform(half)))  # 1 - u is in (0, 1], whose logarithm is finite
            angle = 2 * np.pi * self.uniform(half)
            np.multiply(radius, np.cos(angle), out=part[:half])
            np.multiply(radius, np.sin(angle), out=part[half:])
        return out[:count].reshape(shape)


class OwnStream(Stream):
    """A stream that gives numbers in the process that made it alone: after a fork, both would have the same noise and coins."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._process = os.getpid()

    def words(self, count: int) -> Words:
        if os.getpid() != self._process:
            raise ForkError(
                f"process {os.getpid()} uses secret random numbers of process {self._process}, of which it is a fork, and both "
                "would have the same noise; start the private training after the fork, in the process that trains"
            )
        return super().words(count)


class Entropy(Protocol):
    """A source of streams."""

    @property
    def private(self) -> bool:
        """Whether nobody can predict or reproduce its numbers."""

    def stream(self, *label: str | int) -> Stream:
        """The stream for one use; a label is used once."""


@dataclass(frozen=True)
class SystemEntropy:
    """A fresh 256-bit key of the operating system for every stream, whatever its label; ForkError after a fork."""

    @property
    def private(self) -> bool:
        return True

    def stream(self, *label: str | int) -> Stream:
        return OwnStream(os.urandom(32))


@dataclass(frozen=True)
class KeyedEntropy:
    """The streams of one secret key: a holder of the key can reproduce all of them, and nobody else can predict a number.

    Keys of different labels are HMAC-SHA-256 values under the secret key: independent of each other to everybody without it.
    """

    key: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyedEntropy:
        """With a fresh key of the operating system."""
        return cls(os.urandom(_KEY_BYTES))

    def __post_init__(self) -> None:
        if len(self.key) != _KEY_BYTES:
            raise PlanError(f"a noise key has {_KEY_BYTES} bytes; this key has {len(self.key)}")

    @property
    def private(self) -> bool:
        return True

    def stream(self, *label: str | int) -> Stream:
        return Stream(hmac.digest(self.key, json.dumps(label).encode(), "sha256"))


@dataclass(frozen=True)
class SeededEntropy:
    """The same streams for the same seed: for tests alone. A run that uses it reports that it is NOT PRIVATE."""

    seed: int

    @property
    def private(self) -> bool:
        return False

    def stream(self, *label: str | int) -> Stream:
        return Stream(hashlib.sha256(json.dumps([self.seed, *label]).encode()).digest())


_KEY_BYTES = 32
_OF_A_NONCE = 2**38  # bytes, after which the block counter of ChaCha20 would repeat
_AT_ONCE = 1 << 18  # numbers made per batch: bounds the memory used besides the result
