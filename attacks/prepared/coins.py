"""Sealed fair coins: they decide which candidates train, and prove that this was decided beforehand.

The sealed file holds the coins and a random nonce of 256 bits. Its SHA-256 is published beside the training file. It is
binding: finding other coins with the same digest is as hard as finding a collision. It is hiding: without the nonce nobody can
test guesses of the coins.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privacy.entropy import Entropy
from secure_fed.errors import DataError

Bools = NDArray[np.bool_]
_NONCE_WORDS = 4


@dataclass(frozen=True, eq=False, repr=False)
class Truth:
    """members: (candidates,) whether each is in the training."""

    members: Bools
    nonce: str

    def sealed(self) -> bytes:
        """The content of the sealed file."""
        coins = "".join("1" if one else "0" for one in self.members)
        return json.dumps({"schema": 1, "nonce": self.nonce, "members": coins}).encode() + b"\n"


def tossed(count: int, entropy: Entropy) -> Truth:
    """A fair coin for each of `count` candidates, independent of everything else, and a nonce."""
    coins: Bools = (entropy.stream("coins").words(count) >> np.uint64(63)).astype(bool)
    return Truth(coins, entropy.stream("nonce").words(_NONCE_WORDS).tobytes().hex())


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def unsealed(content: bytes, commitment: str, count: int, place: object) -> Truth:
    """The truth, if it matches the commitment; else DataError."""
    if digest(content) != commitment:
        raise DataError(
            f"{place} was changed after sealing: its SHA-256 is {digest(content):.12}..., and {commitment:.12}... was "
            "published; put back the file that `audit prepare` wrote"
        )
    found: dict[str, Any] = json.loads(content)
    members = np.array([one == "1" for one in found["members"]], dtype=bool)
    if len(members) != count:
        raise DataError(f"{place} holds {len(members)} coins for {count} candidates; prepare the audit again")
    return Truth(members, str(found["nonce"]))
