"""Agreements of clients that all live in one process: what both ends of a pair compute is computed once.

For simulations alone. The process holds the secrets of all clients anyway, so a key that one end has derived tells it nothing
when it is kept for the other end. A client is given it explicitly and is `agreements.Alone` otherwise; nothing of the protocol
imports this file, and of the packages only what plays both sides of a session does (`tests/test_layering.py`).

Guarantees:

- The keys are those that `Alone` has, to the bit. An entry stands under both numbers, both public keys and what it is for;
  these and the session determine the keys from either end. So a client that was shown another key than its peer has
  advertised shares nothing with that peer here, as it shares nothing with it elsewhere.
- An entry leaves when its second end has taken it, and all that are left leave when the session ends. Outside a session, and
  for any session but the open one, nothing is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from protocols.agreements import Alone, Channel
from protocols.keys import AgreementKey, Mask, channels, pair_mask
from protocols.masking import cores

Key = TypeVar("Key", Channel, Mask)
_Entry = tuple[int, int, bytes, bytes]  # whose key, with whom, and the public keys of both
_WORTH_THREADS = 8  # agreements


class OneProcess:
    """`Agreements` of all clients of this process. threads: as many as there are cores if None."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = cores() if threads is None else threads
        self._session: bytes | None = None
        self._channels = _Pairs[Channel](channels, lambda channel: channel[::-1], self._threads)
        self._masks = _Pairs[Mask](pair_mask, lambda mask: (mask[0], -mask[1]), self._threads)

    @contextmanager
    def session(self, session: bytes) -> Iterator[None]:
        """Keep the keys of this session until it ends."""
        with ThreadPoolExecutor(self._threads) as pool:
            self._session = session
            try:
                self._channels.pool = self._masks.pool = pool
                yield
            finally:
                self._session = self._channels.pool = self._masks.pool = None
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
    """Keys of one kind. mirrored: the key as the other end has it."""

    derive: Callable[[AgreementKey, bytes, bytes, int, int], Key]
    mirrored: Callable[[Key], Key]
    threads: int
    kept: dict[_Entry, Key] = field(default_factory=dict, repr=False)
    pool: ThreadPoolExecutor | None = None

    def found(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> dict[int, Key]:
        mine = key.public
        kept = {other: self.kept.pop((me, other, mine, public), None) for other, public in publics.items()}
        missing = [other for other, one in kept.items() if one is None]
        made = self._spread(lambda other: self.derive(key, publics[other], session, me, other), missing)
        self.kept.update(((other, me, publics[other], mine), self.mirrored(one)) for other, one in made.items())
        return {other: made[other] if one is None else one for other, one in kept.items()}

    def _spread(self, derive: Callable[[int], Key], others: list[int]) -> dict[int, Key]:
        """Over the threads, a share each: an agreement lets go of the interpreter's lock."""
        if self.pool is None or len(others) < _WORTH_THREADS:
            return {other: derive(other) for other in others}
        shares = [others[first :: self.threads] for first in range(self.threads)]
        made = self.pool.map(lambda share: [(other, derive(other)) for other in share], shares)
        return dict(itertools.chain.from_iterable(made))


_ALONE = Alone()
