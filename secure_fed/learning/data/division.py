"""The division of training rows over clients, by a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from secure_fed.config import RunConfig
from secure_fed.learning.data import sources
from secure_fed.learning.data.dealing import places_of
from secure_fed.learning.data.partition import Partition, partition
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.data.skews import matrix_of


def kind(config: RunConfig, source: sources.Source) -> str:
    """The partition that is used: `data.partition`, or the choice of `auto`."""
    setting = config.data.partition
    return ("natural" if source.keyed else "dirichlet") if setting == "auto" else setting


def _rows(config: RunConfig, source: sources.Source, languages: Sequence[str] | None) -> Partition:
    federation, data, train, how = config.federation, config.data, source.train, kind(config, source)
    return partition(
        how,
        train.label,
        clients=federation.clients or (None if how in ("natural", "matrix") else _usual_clients(len(train))),
        rng=np.random.default_rng([federation.seed, _PARTITION_STREAM]),
        alpha=data.alpha,
        keys=train.client if source.keyed else None,
        languages=languages,
        labels_per_client=data.labels_per_client,
        matrix=matrix_of(data.matrix) if data.matrix else None,
    )


def divide(config: RunConfig, source: sources.Source) -> Partition:
    """The client of every training row. If privacy protects persons, all examples of a person go to one client.

    The label and language of a person are then their first example's. Natural clients are divided by the data's own column.
    """
    languages = source.languages
    if config.privacy.unit != "group" or kind(config, source) == "natural":
        return _rows(config, source, languages)
    persons = list(places_of(source.train.group or ()).values())
    first = [examples[0] for examples in persons]
    firsts = replace(source, train=source.train.take(first))
    divided = _rows(config, firsts, None if languages is None else [languages[index] for index in first])
    parts = [np.array([index for person in part for index in persons[int(person)]]) for part in divided.parts]
    return Partition(divided.names, parts)


def _usual_clients(examples: int) -> int:
    """The default number of clients: one for every hundred examples, at least 2 and at most 200."""
    return max(min(2, examples), min(examples // 100, _MOST_CLIENTS))


def among(divided: Partition, places: NDArray[np.int64]) -> Partition:
    """The same division of the rows at `places` alone."""
    return Partition(divided.names, [part[np.isin(part, places)] for part in divided.parts])


def groups(source: sources.Source, divided: Partition) -> list[list[str]]:
    """The person that each example of each client is about."""
    whose = source.train.group or ()
    return [[whose[int(index)] for index in part] for part in divided.parts]


def units(config: RunConfig, source: sources.Source, divided: Partition) -> tuple[Rows, list[list[int]]]:
    """Rows, and the rows of each protected unit; a person at several clients is a separate unit at each of them.

    Clients drawn by secure-fed are other units with another seed. All other units are the data's own, so their rows include
    the rows held out for testing: another seed holds out other rows, but the units stay the same.
    """
    unit, rows = config.privacy.unit, source.whole
    if unit == "example":
        return rows, [[index] for index in range(len(rows))]
    natural = kind(config, source) == "natural"
    if unit == "client" and not natural:
        return source.train, [list(map(int, part)) for part in divided.parts]
    nobody = ("",) * len(rows)
    owners, persons = (rows.client if natural else None) or nobody, (rows.group if unit == "group" else None) or nobody
    return rows, list(places_of(zip(owners, persons, strict=True)).values())


_MOST_CLIENTS = 200
_PARTITION_STREAM = 2**32 - 2  # apart from the streams of clients and cohorts, which share the seed
