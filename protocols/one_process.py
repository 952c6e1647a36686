"""Agreements of clients that all run in one process: a pair's common key is computed once for both ends.

For simulations only. The process holds the secrets of all clients anyway, so it learns nothing from keeping a key that one end
derived for the other end. A client uses it only if it is passed explicitly, and `agreements.Alone` otherwise. No part of the
protocol imports this file; in the packages only code that plays both sides of a session does (`tests/test_layering.py`).

Guarantees:

- The keys equal the keys of `Alone` bit for bit. An entry is stored under both numbers, both public keys and its purpose; these
  and the session determine the keys from either end. So a client that received another key than its peer advertised shares no
  key with that peer, here as elsewhere.
- An entry is deleted when its second end has taken it, and all remaining entries when the session ends. Outside a session, and
  for any session other than the open one, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from protocols.agreements import Alone, Channel
from protocols.keys import AgreementKey, Mask, channels, pair_mask

Key = TypeVar("Key", Channel, Mask)
_Entry = tuple[int, int, bytes, bytes]  # the owner of the key, the other client, and the public keys of both


class OneProcess:
    """`Agreements` of all clients of this process."""

    def __init__(self) -> None:
        self._session: bytes | None = None
        self._channels = _Pairs[Channel](channels, lambda channel: channel[::-1])
        self._masks = _Pairs[Mask](pair_mask, lambda mask: (mask[0], -mask[1]))

    @contextmanager
    def session(self, session: bytes) -> Iterator[None]:
        """Keep the keys of this session until it ends."""
        self._session = session
        try:
            yield
        finally:
            self._session = None
            self._channels.kept.clear()
            self._masks.kept.clear()

    @property
    def waiting(self) -> int:
        """The number of keys that wait for their second end."""
        return len(self._channels.kept) + len(self._masks.kept)

    def channels(
        self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int
    ) -> Mapping[int, Channel]:
        if session != self._session:
            return _ALONE.channels(key, publics, session, me)
        return self._channels.found(key, publics, session, me)

    def masks(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> Mapping[int, Mask]:
        if session != self._session:
            return _ALONE.masks(key, publics, session, me)
        return self._masks.found(key, publics, session, me)


@dataclass
class _Pairs(Generic[Key]):
    """Keys of one kind. mirrored: the key from the other end's side."""

    derive: Callable[[AgreementKey, bytes, bytes, int, int], Key]
    mirrored: Callable[[Key], Key]
    kept: dict[_Entry, Key] = field(default_factory=dict, repr=False)

    def found(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> dict[int, Key]:
        mine = key.public
        found: dict[int, Key] = {}
        for other, public in publics.items():
            key_of_both = self.kept.pop((me, other, mine, public), None)
            if key_of_both is None:
                key_of_both = self.derive(key, public, session, me, other)
                self.kept[other, me, public, mine] = self.mirrored(key_of_both)
            found[other] = key_of_both
        return found


_ALONE = Alone()
