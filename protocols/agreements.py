"""How a client comes by the keys that it shares with others.

A client on its own agrees with everybody by X25519. `one_process` has another way, for simulations alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from protocols.keys import AgreementKey, Mask, Secret, channels, pair_mask

Channel = tuple[Secret, Secret]  # the key of what goes out to another, and of what comes in


class Agreements(Protocol):
    """The keys between one client, its private key and its number, and others of whom it has the public keys."""

    def channels(
        self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int
    ) -> Mapping[int, Channel]:
        """`keys.channels` with each of the others."""

    def masks(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> Mapping[int, Mask]:
        """`keys.pair_mask` with each of the others."""


class Alone:
    """`Agreements` of a client that has its own secrets and nobody else's."""

    def channels(
        self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int
    ) -> Mapping[int, Channel]:
        return {other: channels(key, public, session, me, other) for other, public in publics.items()}

    def masks(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> Mapping[int, Mask]:
        return {other: pair_mask(key, public, session, me, other) for other, public in publics.items()}
