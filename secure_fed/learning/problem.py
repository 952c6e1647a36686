"""The learning problem of a run: a model, every client's examples, a test set, and how batches, losses and metrics are made.

It is built from a configuration, or from the user's own objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from torch import nn

from secure_fed.config import RunConfig
from secure_fed.learning import tasks
from secure_fed.learning.data import division, fingerprint, partition, sources
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.hints import warnings
from secure_fed.learning.models.loading import head_of, last_layer, load
from secure_fed.learning.tasks.commonest import Commonest
from secure_fed.learning.tasks.confidence import confidence
from secure_fed.learning.tasks.task import Collate, Confidence, Loss, Metrics
from secure_fed.learning.tokenised import tokenised

GIVEN = "given in Python"
MANY = 10_000  # clients; the examples of fewer are looked at before training starts


@dataclass(frozen=True)
class Problem:
    """A learning problem: everything a run needs except its settings. `train[i]` are the examples of client `names[i]`.

    head: names of the parameters that train in full beside the adapter. last: those of its last layer, which makes the
    scores; none of a model that does not say what its head is. confidence: how well a model fits an example.
    groups: for every client, whose each example is, if the data say so. facts: what the run directory records about data and
    clients. data_digest, unit_digest: plain digests of the data before rows are held out, and of which rows belong to which
    unit that privacy protects, for a ledger; they confirm guesses about rows, so they stay in memory. warning: what the user
    should hear before training starts, if anything. sizes: the number of each client's units, where most clients' examples are
    on other machines and `train` has none of theirs. commonest: label of the test set, where accuracy counts labels and the
    test rows were not held out of private ones.
    """

    model: nn.Module
    head: tuple[str, ...]
    last: tuple[str, ...]
    train: Sequence[Sequence[Any]]
    names: Sequence[str]
    test: Sequence[Any]
    collate: Collate
    loss: Loss
    metrics: Metrics
    confidence: Confidence
    tokenizer: Any = None
    groups: Sequence[Sequence[str]] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    data_digest: str = ""
    unit_digest: str = ""
    warning: str = ""
    sizes: Sequence[int] | None = None
    commonest: Commonest | None = None

    @property
    def lazy(self) -> bool:
        """Whether clients' examples are asked for only when the client is drawn."""
        return is_lazy(self.train)

    @property
    def here(self) -> Sequence[Sequence[Any]]:
        """The clients' examples that are on this machine; the test set where there are none."""
        return self.train if self.sizes is None else [own for own in self.train if len(own)] or [self.test]

    @property
    def units(self) -> Sequence[int]:
        """The number of each client's examples, or of its groups of them."""
        if self.sizes is not None:
            return self.sizes
        if self.lazy:
            return Sizes(self.train)
        return [len(own) for own in self.train] if self.groups is None else [len(set(own)) for own in self.groups]


def configured(config: RunConfig) -> Problem:
    """The problem that a configuration describes."""
    seed, task = config.federation.seed, tasks.build(config.data)
    private = config.privacy.unit != "none"
    source = sources.load(config.data, task, seed=seed, group=config.privacy.group_column, unit=config.privacy.unit)
    labels = source.train.label_names
    strata = tuple(task.strata(source.train, seed))
    divided = division.divide(config, replace(source, train=replace(source.train, label=strata)))
    loss, metrics = task.loss(labels), task.metrics(labels)
    data_digest = fingerprint.of_rows(source.train, source.test)
    loaded = load(config.model, task, labels, seed)
    tokenizer = loaded.tokenizer
    encoded, test = (tokenised(config, task, tokenizer, rows) for rows in (source.train, source.test))
    parts = [list(map(int, part)) for part in divided.parts]
    skew = {
        "kind": division.kind(config, source),
        "jensen_shannon": partition.jensen_shannon(strata, divided.parts, max(strata) + 1),
    }
    return Problem(
        model=loaded.model,
        head=head_of(loaded.model, loaded.head, config.method.modules_to_save),
        last=last_layer(loaded.model),
        train=[encoded.take(part) for part in divided.parts],
        names=divided.names,
        test=test,
        collate=task.collate(tokenizer),
        loss=loss,
        metrics=metrics,
        confidence=confidence(config.data.task, loss),
        tokenizer=tokenizer,
        groups=division.groups(source, divided) if config.privacy.unit == "group" else None,
        facts=facts_of(config, task.title, labels, divided.names, parts, (source.tested, len(test)), skew)
        | {"data_digest": data_digest},
        data_digest=fingerprint.of_rows(source.whole, *([source.test] if is_declared(source.tested) else [])),
        unit_digest=fingerprint.of_units(*division.units(config, source, divided)) if private else "",
        commonest=Commonest.among(task.counted(source.test)) if is_declared(source.tested) or not private else None,
        warning="; and ".join(
            warnings(config, test if private else encoded, "test" if private else "training", tokenizer, loaded.model)
        ),
    )


def facts_of(
    config: RunConfig,
    task: str,
    labels: Sequence[str],
    names: Sequence[str],
    parts: Sequence[list[int] | int],
    tested: tuple[str, int],
    skew: Mapping[str, Any],
) -> dict[str, Any]:
    """The facts that a run records about its data.

    parts: every client's rows, or how many examples it has. tested: where the test rows are from, and how many there are: of
    rows held out of private ones that is not recorded, since it tells how many of these there are. skew: how examples were
    divided, and how the clients' labels differ.
    """
    private, (origin, rows) = config.privacy.unit != "none", tested
    divided = {**skew, "sizes": [part if isinstance(part, int) else len(part) for part in parts]}
    if private:  # a run that goes on still knows its data
        divided["digest"] = hashlib.sha256(json.dumps([list(names), parts]).encode()).hexdigest()
    test = {"from": origin, "rows": rows if is_declared(origin) or not private else None}
    return {"task": task, "label_names": list(labels), "clients": list(names), "partition": divided, "test": test}


def is_lazy(train: Sequence[Sequence[Any]]) -> bool:
    """Whether `train` makes clients' examples on demand: a large sequence that is no list in memory."""
    return not isinstance(train, list | tuple) and len(train) >= MANY


@dataclass(frozen=True)
class Sizes(Sequence[int]):
    """The number of each client's examples, counted when it is asked for."""

    train: Sequence[Sequence[Any]]

    def __len__(self) -> int:
        return len(self.train)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return len(self.train[index])
