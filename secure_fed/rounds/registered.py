"""Clients of a large federation, made when they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import overload

from secure_fed.rounds.client import Client


class Registered(Sequence[Client]):
    """The registered clients, of which only the needed ones exist as objects.

    A client is made by `make(index)` at its first access. It stays the same object until `let_go`, which keeps only clients
    with personal tensors: nothing else of a client outlives its round.
    """

    def __init__(self, count: int, make: Callable[[int], Client]) -> None:
        self._count = count
        self._make = make
        self._made: dict[int, Client] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...
    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = range(self._count)[index]
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

    @property
    def made(self) -> list[Client]:
        """The clients that exist, by their index."""
        return [self._made[index] for index in sorted(self._made)]

    def let_go(self) -> None:
        """Forget the clients that keep nothing between rounds."""
        self._made = {index: client for index, client in self._made.items() if client.kept}


class Joined(Sequence[Client]):
    """Two sequences of clients, one after the other, without copies."""

    def __init__(self, first: Sequence[Client], second: Sequence[Client]) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...
    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._first[number] if number < len(self._first) else self._second[number - len(self._first)]


def existing(clients: Sequence[Client]) -> Iterable[Client]:
    """The clients that may keep anything: all that exist."""
    return clients.made if isinstance(clients, Registered) else clients
