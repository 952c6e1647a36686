"""The learning problem of a run: a model, every client's examples, a test set, and how batches, losses and metrics are made.

It is built from a configuration, or from the user's own objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, overload

import numpy as np
from torch import nn
from torch.utils.data import default_collate

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import division, fingerprint, partition, sources
from secure_fed.learning.data.encode import Collate as PadCollate
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.models.devices import find_devices
from secure_fed.learning.models.loading import head_names, head_of, last_layer, load, pooler_names
from secure_fed.learning.models.products import hasten
from secure_fed.learning.tasks import classification
from secure_fed.learning.tasks.commonest import Commonest, of_items
from secure_fed.learning.tasks.confidence import confidence
from secure_fed.learning.tasks.task import Collate, Confidence, Loss, Metrics
from secure_fed.learning.tokenised import tokenised

GIVEN = "given in Python"
_MANY_UNKNOWN, _MANY_CUT = 0.2, 0.02
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
        facts=_facts(config, task.title, labels, divided.names, parts, (source.tested, len(test)), skew)
        | {"data_digest": data_digest},
        data_digest=fingerprint.of_rows(source.whole, *([source.test] if is_declared(source.tested) else [])),
        unit_digest=fingerprint.of_units(*division.units(config, source, divided)) if private else "",
        commonest=Commonest.among(task.counted(source.test)) if is_declared(source.tested) or not private else None,
        warning="; and ".join(
            _warnings(config, test if private else encoded, "test" if private else "training", tokenizer)
        ),
    )


def _warnings(config: RunConfig, encoded: Encoded, which: str, tokenizer: Any) -> Iterator[str]:
    """Warnings if many tokens are unknown to the tokenizer, so that examples look alike, or if many texts are cut.

    A share of private texts would be released without noise, so with privacy the test texts, which train nothing, stand for
    them.
    """
    unknown, ends = tokenizer.unk_token_id, (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    tokens = np.concatenate(encoded.input_ids)
    share = 0.0 if unknown is None or unknown in ends else float((tokens == unknown).mean())  # GPT-2's is its end token
    if share >= _MANY_UNKNOWN:
        tokens_of = f"tokens are unknown to the tokenizer of {config.model.name}"
        yield f"{share:.0%} of the {which} {tokens_of}, and look alike to it; set model.name to another model"
    most = config.model.max_length
    cut = float((encoded.lengths >= most).mean()) if config.data.task != "question_answering" else 0.0  # has windows
    if cut >= _MANY_CUT:
        yield f"{cut:.0%} of the {which} texts are cut after model.max_length = {most} tokens; raise it if their ends matter"


def given(
    config: RunConfig,
    model: nn.Module | None,
    train: Sequence[Sequence[Any]] | None,
    test: Sequence[Any] | None,
    collate: Collate | None,
    loss: Loss | None,
    metrics: Metrics | None,
) -> Problem:
    """A problem made of the user's own objects; `train` is one sequence of examples per client."""
    if model is None or train is None or test is None:
        missing = [name for name, part in (("model", model), ("train", train), ("test", test)) if part is None]
        raise ConfigError(
            f"Federation was given objects of yours but not {' and '.join(missing)}; give model, train and test"
        )
    _check_kinds(model, {"collate": collate, "loss": loss, "metrics": metrics})
    if config.privacy.unit == "group":
        raise ConfigError(
            "privacy.unit is 'group', which needs data from files with a privacy.group_column; use 'example'"
        )
    _check_examples(train, test)
    _check_settings(config, len(train))
    collate = collate or _default_collate(model, test[0], classifies=loss is None)
    _check_task(collate([test[0]]), loss, metrics)
    names = list(partition.client_names(len(train)))
    model.to(find_devices(config.model.device)[0])
    hasten(model)
    natural = {"kind": "natural", "jensen_shannon": None}
    parts = [] if is_lazy(train) else list(map(len, train))
    return Problem(
        model=model,
        head=head_of(model, head_names(model) + pooler_names(model), config.method.modules_to_save),
        last=last_layer(model),
        train=train,
        names=names,
        test=test,
        collate=collate,
        loss=loss or classification.loss,
        metrics=metrics or classification.metrics,
        confidence=confidence("", loss or classification.loss),
        facts=_facts(config, GIVEN, [], names, parts, (GIVEN, len(test)), natural),
        unit_digest=_units_given(config, train),
        commonest=None if metrics else of_items(test),
    )


def _check_kinds(model: object, functions: Mapping[str, object]) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}; give a torch module, or a model's name as model.name and no objects of yours"
        )
    for name, one in functions.items():
        if one is not None and not callable(one):
            raise ConfigError(f"{name} is a {type(one).__name__}; give a function")


def _units_given(config: RunConfig, train: Sequence[Sequence[Any]]) -> str:
    """A digest of which examples of the user's own belong to which unit, as far as a ledger that runs share has to know it."""
    if config.privacy.ledger:
        try:
            return fingerprint.of_objects(train, each=config.privacy.unit == "example")
        except TypeError as error:
            if not config.privacy.unit_name:
                raise ConfigError(
                    "a ledger that runs share has to know its unit, and your examples cannot be told apart by their content "
                    f"({error}): set privacy.unit_name to a name that all runs on this unit give"
                ) from error
    return fingerprint.of_sizes([len(train)] if is_lazy(train) else map(len, train))


def _facts(
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


def _check_examples(train: Any, test: Any) -> None:
    """Refuse a `train` that is no list of data sets, a `test` that is no data set, and a data set that is empty."""
    if not _numbered(train):
        raise ConfigError(f"train is a {type(train).__name__}; give a list with one data set per client")
    asked = [train[0]] if is_lazy(train) else train
    for name, examples in [("test", test), *((f"client {index} of train", own) for index, own in enumerate(asked))]:
        if not _numbered(examples):
            raise ConfigError(
                f"{name} is a {type(examples).__name__}; give a data set with a length and items by number, such as a list"
            )
    if not len(train) or not len(test):
        raise DataError(
            f"Federation was given {len(train)} clients and {len(test)} test examples; both must be at least one"
        )
    if empty := [index for index, examples in enumerate(asked) if not len(examples)]:
        raise DataError(f"client {empty[0]} of the {len(train)} in train has no examples; leave it out")


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


def _numbered(examples: Any) -> bool:
    has_both = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    return has_both and not isinstance(examples, Mapping | str)


def _check_settings(config: RunConfig, clients: int) -> None:
    """Refuse settings that contradict the objects, or that have no effect beside them."""
    if config.federation.clients not in (None, clients):
        raise ConfigError(
            f"federation.clients is {config.federation.clients}, but train holds {clients} clients; leave the setting out"
        )
    usual, chosen = RunConfig().to_dict(), config.to_dict()
    for section in ("model", "data"):
        for name, value in chosen[section].items():
            if name != "device" and value != usual[section][name]:
                raise ConfigError(
                    f"{section}.{name} = {value!r} has no effect on a model and data of yours: leave it out"
                )


def _check_task(batch: Any, loss: Loss | None, metrics: Metrics | None) -> None:
    """Refuse batches without `labels`, unless a loss and metrics are given: the default task is classification."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return
    for name, task in (("loss", loss), ("metrics", metrics)):
        if task is None:
            raise ConfigError(
                f"a batch of your examples is a {type(batch).__name__} without 'labels', which classification needs: "
                f"give {name}=, or a collate= that makes a dict with 'labels'"
            )


def _default_collate(model: Any, example: Any, *, classifies: bool) -> Collate:
    """classifies: whether labels are classes of the model, as the default loss takes them."""
    if not (isinstance(example, Mapping) and "input_ids" in example):
        return cast(Collate, default_collate)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    if classifies and type(model).__name__.endswith("ForSequenceClassification"):
        return PadCollate(padding, partial(classification.known_classes, count=model.config.num_labels))
    return PadCollate(padding)
