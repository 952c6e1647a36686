"""The assignment of examples to clients, given each client's share of every class.

A part is a sorted array of example indices; `owner[i]` is the client of example i.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from secure_fed.errors import ConfigError, DataError

Indices = NDArray[np.int64]
_SMALLEST_CONCENTRATION = 1e-290  # below this a logarithm of a Gamma draw overflows
K = TypeVar("K", bound=Hashable)


def places_of(keys: Iterable[K]) -> dict[K, list[int]]:
    """The positions of each key, in the order of first occurrence."""
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def require_enough(count: int, clients: int) -> None:
    """Refuse to divide fewer examples than there are clients."""
    if clients < 1:
        raise ConfigError(f"federation.clients is {clients}; it must be at least 1")
    if count < clients:
        raise DataError(
            f"{count} training examples cannot be divided over {clients} clients with one each; "
            f"set federation.clients to at most {count} or give more data"
        )


def require_positive(alpha: float) -> None:
    if not (alpha > 0 and np.isfinite(alpha)):
        raise ConfigError(f"data.alpha is {alpha}; it must be a positive number")


def log_shares(prior: NDArray[np.float64], clients: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Logarithms of `clients` draws from Dir(alpha prior), one in each row: (clients, classes).

    In logarithms, because at small `alpha` the shares themselves round to zero, and a class of which every
    client has share zero could not be divided. Gamma(a) is drawn as Gamma(a + 1) U^(1/a).
    """
    concentration = np.maximum(alpha * prior, _SMALLEST_CONCENTRATION)
    shape = (clients, len(prior))
    log_gamma = np.log(rng.standard_gamma(concentration + 1, size=shape))
    log_gamma += np.log1p(-rng.random(shape)) / concentration
    log_gamma -= log_gamma.max(axis=1, keepdims=True)
    return np.asarray(log_gamma - np.log(np.exp(log_gamma).sum(axis=1, keepdims=True)))


def by_chance(labels: Sequence[int], chances: NDArray[np.float64], rng: np.random.Generator) -> list[Indices]:
    """Each class is divided by one multinomial draw with `chances` (clients, classes), for the present classes in order.

    An empty client gets one random example of the client with most, one client after the other.
    """
    class_of = np.unique(np.asarray(labels), return_inverse=True)[1]
    clients = len(chances)
    owner = np.empty(len(labels), dtype=np.int64)
    for index in range(chances.shape[1]):
        members = np.flatnonzero(class_of == index)
        sizes = rng.multinomial(len(members), chances[:, index])
        owner[rng.permutation(members)] = np.repeat(np.arange(clients), sizes)
    return parts(fill_empty(owner, clients, rng), clients)


def by_share(count: int, shares: NDArray[np.float64]) -> Indices:
    """`count` divided in proportion to `shares`, rounded by largest remainders (the first of equal ones): the sum is exact."""
    quota = count * shares / shares.sum()
    sizes: Indices = np.floor(quota).astype(np.int64)
    largest = np.argsort(sizes - quota, kind="stable")[: count - int(sizes.sum())]
    sizes[largest] += 1
    return sizes


def fill_empty(owner: Indices, clients: int, rng: np.random.Generator) -> Indices:
    """Give each client without an example a random example of the client that has most at that moment."""
    sizes = np.bincount(owner, minlength=clients)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        owner[rng.choice(np.flatnonzero(owner == largest))] = empty
        sizes[largest] -= 1
        sizes[empty] = 1
    return owner


def parts(owner: Indices, clients: int) -> list[Indices]:
    """The examples of each client, in their order."""
    order = np.argsort(owner, kind="stable")
    sizes = np.bincount(owner, minlength=clients)
    return np.split(order, np.cumsum(sizes)[:-1])
