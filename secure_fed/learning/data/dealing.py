"""The positions of keys."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def places_of(keys: Iterable[K]) -> dict[K, list[int]]:
    """The positions of each key, in the order of first occurrence."""
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places
