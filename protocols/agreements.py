"""How a client obtains the keys that it shares with others.

A client on its own machine agrees with every other by X25519. `one_process` has another way, for simulations only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from protocols.keys import AgreementKey, Mask, Secret, channels, pair_mask

Channel = tuple[Secret, Secret]  # the keys for messages to another client, and for messages from it


class Agreements(Protocol):
    """The keys between one client, with its private key and its number, and other clients, with their public keys."""

    def channels(
        self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int
    ) -> Mapping[int, Channel]:
        """`keys.channels` with each client in `publics`."""

    def masks(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> Mapping[int, Mask]:
        """`keys.pair_mask` with each client in `publics`."""


class Alone:
    """`Agreements` of a client that has only its own secrets."""

    def channels(
        self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int
    ) -> Mapping[int, Channel]:
        return {other: channels(key, public, session, me, other) for other, public in publics.items()}

    def masks(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> Mapping[int, Mask]:
        return {other: pair_mask(key, public, session, me, other) for other, public in publics.items()}
