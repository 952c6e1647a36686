"""Which training rows go to which client, as a configuration asks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from secure_fed.config import RunConfig
from secure_fed.data import sources
from secure_fed.data.partition import Partition, partition


def kind(config: RunConfig, source: sources.Source) -> str:
    """What `auto` comes to."""
    asked = config.data.partition
    return ("natural" if source.keyed else "dirichlet") if asked == "auto" else asked


def _rows(config: RunConfig, source: sources.Source) -> Partition:
    federation, train, how = config.federation, source.train, kind(config, source)
    return partition(
        how,
        train.label,
        clients=federation.clients or (None if how == "natural" else _usual_clients(len(train))),
        rng=np.random.default_rng([federation.seed, _PARTITION_STREAM]),
        alpha=config.data.alpha,
        keys=train.client if source.keyed else None,
    )


def divide(config: RunConfig, source: sources.Source) -> Partition:
    """The client of every training row. What protects a person keeps all of that person's examples at one client.

    The label of a person is then that of their first example. Data that say themselves whose a row is are divided so.
    """
    if config.privacy.unit != "group" or source.keyed:
        return _rows(config, source)
    members: dict[str, list[int]] = {}
    for index, whose in enumerate(source.train.group or ()):
        members.setdefault(whose, []).append(index)
    persons = list(members.values())
    firsts = replace(source, train=source.train.take([examples[0] for examples in persons]))
    divided = _rows(config, firsts)
    parts = [np.array([index for person in part for index in persons[int(person)]]) for part in divided.parts]
    return Partition(divided.names, parts)


def _usual_clients(examples: int) -> int:
    """A client for every hundred examples, two at least, if nobody says how many."""
    return max(min(2, examples), min(examples // 100, _MOST_CLIENTS))


def groups(source: sources.Source, divided: Partition) -> list[list[str]]:
    """Whom each example of each client is about."""
    whose = source.train.group or ()
    return [[whose[int(index)] for index in part] for part in divided.parts]


_MOST_CLIENTS = 200
_PARTITION_STREAM = 2**32 - 2  # apart from the streams of clients and cohorts, which share the seed
