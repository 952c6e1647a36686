"""Which client holds which training row, and which rows a protected unit has.

`divide` divides the rows as a configuration says: by the data's own column of clients, or by one of the artificial partitions
(`partition`), of which those that skew labels are in `label_skew`. `units` names the rows of each unit that privacy protects.

Every partition guarantees: each example belongs to exactly one client, no client is empty, and the same arguments and `rng`
state give the same parts. A part is a sorted array of example indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning.data import sources
from secure_fed.learning.data.label_skew import (
    Indices,
    by_language,
    by_matrix,
    dirichlet,
    label_dirichlet,
    matrix_of,
    parts_of,
    pathological,
    require_enough,
)
from secure_fed.learning.data.rows import Rows, places_of

_PARTITION_STREAM = 2**32 - 2  # apart from the streams of clients and cohorts, which share the seed
_EXAMPLES_A_CLIENT, _MOST_CLIENTS = 100, 200  # of the default number of clients
_PAIRED_CLIENTS = 1000


@dataclass(frozen=True, slots=True)
class Partition:
    """`parts[i]` holds the indices of the examples of the client called `names[i]`."""

    names: tuple[str, ...]
    parts: list[Indices]


def divide(config: RunConfig, source: sources.Source) -> Partition:
    """The client of every training row. If privacy protects persons, all examples of a person go to one client.

    The label and language of a person are then their first example's. Natural clients are divided by the data's own column.
    """
    languages = source.languages
    if config.privacy.unit != "person" or kind_of(config, source) == "natural":
        return _divided_rows(config, source, languages)
    persons = list(places_of(source.train.person or ()).values())
    first = [examples[0] for examples in persons]
    firsts = replace(source, train=source.train.take(first))
    divided = _divided_rows(config, firsts, None if languages is None else [languages[index] for index in first])
    parts = [np.array([index for person in part for index in persons[int(person)]]) for part in divided.parts]
    return Partition(divided.names, parts)


def kind_of(config: RunConfig, source: sources.Source) -> str:
    """The partition that is used: `data.partition`, or the choice of `auto`."""
    setting = config.data.partition
    return ("natural" if source.keyed else "dirichlet") if setting == "auto" else setting


def _divided_rows(config: RunConfig, source: sources.Source, languages: Sequence[str] | None) -> Partition:
    """`divide` for units that are no persons."""
    federation, data, train, how = config.federation, config.data, source.train, kind_of(config, source)
    usual = max(min(2, len(train)), min(len(train) // _EXAMPLES_A_CLIENT, _MOST_CLIENTS))  # where no number is set
    return partition(
        how,
        train.label,
        clients=federation.clients or (None if how in ("natural", "matrix") else usual),
        rng=np.random.default_rng([federation.seed, _PARTITION_STREAM]),
        alpha=data.alpha,
        keys=train.client if source.keyed else None,
        languages=languages,
        labels_per_client=data.labels_per_client,
        matrix=matrix_of(data.matrix) if data.matrix else None,
    )


def partition(
    kind: str,
    labels: Sequence[int],
    *,
    clients: int | None,
    rng: np.random.Generator,
    alpha: float = 1.0,
    keys: Sequence[str] | None = None,
    languages: Sequence[str] | None = None,
    labels_per_client: int = 2,
    matrix: Sequence[Sequence[float]] | None = None,
) -> Partition:
    """The partition `kind`, named as `data.partition`, of the examples with these `labels` (and `keys`, or `languages`).

    `clients` None means one client for each key, or for each column of `matrix`; a number must equal theirs.
    """
    if kind == "natural":
        if keys is None:
            raise DataError(
                "data.partition 'natural' needs a column with the client of each row; set data.client to it"
            )
        names, by_key = natural(keys)
        if clients not in (None, len(names)):
            raise DataError(
                f"the data name {len(names)} clients and federation.clients is {clients}; "
                f"set federation.clients to {len(names)}"
            )
        return Partition(names, by_key)
    if kind == "matrix":
        parts = by_matrix(labels, matrix or (), rng, clients)
    elif clients is None:
        raise ConfigError("federation.clients is not set; this data.partition needs a number of clients")
    elif kind == "iid":
        parts = iid(len(labels), clients, rng)
    elif kind == "pathological":
        parts = pathological(labels, clients, labels_per_client, rng)
    elif kind == "language":
        parts = by_language(labels, languages or (), clients, alpha, rng)
    else:
        parts = (dirichlet if kind == "dirichlet" else label_dirichlet)(labels, clients, alpha, rng)
    return Partition(client_names(len(parts)), parts)


def iid(count: int, clients: int, rng: np.random.Generator) -> list[Indices]:
    """A uniformly random division of `count` examples into parts whose sizes differ by at most one."""
    require_enough(count, clients)
    return [np.sort(part) for part in np.array_split(rng.permutation(count), clients)]


def natural(keys: Sequence[str]) -> tuple[tuple[str, ...], list[Indices]]:
    """One client for each distinct key, in the order of the sorted keys: (names, parts)."""
    if not len(keys):
        raise DataError("there is no example to divide; set data.train to data with at least one")
    names = tuple(sorted(set(keys)))  # not by numpy, whose texts end at a NUL
    number = {name: index for index, name in enumerate(names)}
    return names, parts_of(np.fromiter((number[key] for key in keys), dtype=np.int64, count=len(keys)), len(names))


def client_names(count: int) -> tuple[str, ...]:
    """Names for clients that have none: "client-007", all of one length."""
    width = len(str(count - 1))
    return tuple(f"client-{index:0{width}d}" for index in range(count))


def among(divided: Partition, places: NDArray[np.int64]) -> Partition:
    """The same division of the rows at `places` alone."""
    return Partition(divided.names, [part[np.isin(part, places)] for part in divided.parts])


def persons_of(source: sources.Source, divided: Partition) -> list[list[str]]:
    """The person that each example of each client is about."""
    whose = source.train.person or ()
    return [[whose[int(index)] for index in part] for part in divided.parts]


def units(config: RunConfig, source: sources.Source, divided: Partition) -> tuple[Rows, list[list[int]]]:
    """Rows, and the rows of each protected unit; a person at several clients is a separate unit at each of them.

    Clients drawn by secure-fed are other units with another seed. All other units are the data's own, so their rows include
    the rows held out for testing: another seed holds out other rows, but the units stay the same.
    """
    unit, rows = config.privacy.unit, source.whole
    if unit == "example":
        return rows, [[index] for index in range(len(rows))]
    natural = kind_of(config, source) == "natural"
    if unit == "client" and not natural:
        return source.train, [list(map(int, part)) for part in divided.parts]
    nobody = ("",) * len(rows)
    owners, persons = (
        (rows.client if natural else None) or nobody,
        (rows.person if unit == "person" else None) or nobody,
    )
    return rows, list(places_of(zip(owners, persons, strict=True)).values())


def jensen_shannon(labels: Sequence[int], parts: Sequence[Indices], classes: int) -> float:
    """The distance between the clients' label distributions: their mean pairwise Jensen-Shannon divergence.

    JS(P, Q) = KL(P || M) / 2 + KL(Q || M) / 2 with M = (P + Q) / 2 and logarithms to base 2, so it lies in
    [0, 1]: 0 when all clients have the same label distribution, 1 when no two clients share a label. The mean
    is over pairs of different clients; it is 0 for a single client. FeDeRA (A.4) prints the formula without the
    mixture M; that formula is infinite for disjoint labels, and the stated range, 0 to 1, fits the formula here.
    Of more than 1,000 clients, 1,000 spread evenly over the list are compared.
    """
    if len(parts) > _PAIRED_CLIENTS:
        parts = [parts[i] for i in np.linspace(0, len(parts) - 1, _PAIRED_CLIENTS).astype(int)]
    array = np.asarray(labels)
    counts = np.array([np.bincount(array[part], minlength=classes) for part in parts], dtype=np.float64)
    shares = counts / counts.sum(axis=1, keepdims=True).clip(1)  # (clients, classes)
    entropy = _entropy(shares)
    total = 0.0
    for i in range(len(parts) - 1):
        mixtures = (shares[i] + shares[i + 1 :]) / 2
        total += float((_entropy(mixtures) - (entropy[i] + entropy[i + 1 :]) / 2).sum())
    pairs = len(parts) * (len(parts) - 1) // 2
    return min(1.0, max(0.0, total / pairs)) if pairs else 0.0


def _entropy(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Entropy in bits along the last axis, 0 log 0 = 0."""
    logarithms = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy: NDArray[np.float64] = -np.einsum("...c,...c->...", shares, logarithms)
    return entropy
