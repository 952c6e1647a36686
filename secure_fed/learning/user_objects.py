"""The learning problem made from a user's own objects: a model, every client's examples, and a test set."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from secure_fed.config import ModelConfig, RunConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning.data import fingerprint, partition
from secure_fed.learning.data.encode import Collate as PadCollate
from secure_fed.learning.data.holdout import GIVEN
from secure_fed.learning.data.sources import are_members
from secure_fed.learning.evaluation import confidence
from secure_fed.learning.models.devices import adopt, device_of, find_devices, is_divided, require_called
from secure_fed.learning.models.loading import head_of, last_layer, task_head
from secure_fed.learning.models.matrix_products import hasten
from secure_fed.learning.problem import Problem, facts_of, is_lazy
from secure_fed.learning.tasks import classification
from secure_fed.learning.tasks.headline import commonest_of_items
from secure_fed.learning.tasks.task import Collate, Loss, Metrics
from secure_fed.learning.training.objective import to_device


def given(
    config: RunConfig,
    model: nn.Module | None,
    train: Sequence[Sequence[Any]] | None,
    test: Sequence[Any] | None,
    collate: Collate | None,
    loss: Loss | None,
    metrics: Metrics | None,
    non_members: Sequence[Any] | None = None,
) -> Problem:
    """A problem made from a user's own objects; `train` is one sequence of examples per client."""
    if model is None or train is None or test is None:
        missing = [name for name, part in (("model", model), ("train", train), ("test", test)) if part is None]
        raise ConfigError(
            f"Federation was given objects of yours but not {' and '.join(missing)}; give model, train and test"
        ).about(missing[0], None, "given beside the others")
    _check_kinds(model, {"collate": collate, "loss": loss, "metrics": metrics})
    if config.privacy.unit == "person":
        message = "privacy.unit is 'person', which needs data from files with a privacy.person_column; use 'example'"
        raise ConfigError(message).about("privacy.unit", "person", "another unit with objects of yours")
    _check_examples(train, test, non_members)
    for client, own in enumerate(train if config.privacy.unit == "example" and not is_lazy(train) else ()):
        require_no_repeats(own, f"client {client}'s")
    _check_settings(config, len(train))
    collate = collate or _default_collate(model, test[0], classifies=loss is None)
    batch = collate([test[0]])
    _check_task(batch, loss, metrics)
    names = list(partition.client_names(len(train)))
    note = _frozen(model)
    if is_divided(model):
        _require_divisible(config)
        adopt(model)
        require_called(
            model,
            type(model).__name__,
            lambda: (loss or classification.loss)(model, to_device(batch, device_of(model))),
        )
    else:
        model.to(find_devices(config.model.device)[0])
    hasten(model)
    natural = {"kind": "natural", "jensen_shannon": None}
    parts = [] if is_lazy(train) else list(map(len, train))
    return Problem(
        model=model,
        head=head_of(model, task_head(model), config.method.modules_to_save),
        last=last_layer(model),
        train=train,
        names=names,
        test=test,
        non_members=() if non_members is None else non_members,
        collate=collate,
        loss=loss or classification.loss,
        metrics=metrics or classification.metrics,
        confidence=confidence("", loss or classification.loss),
        facts=facts_of(config, GIVEN, [], names, parts, (GIVEN, len(test)), natural) | _content(train, test),
        unit_digest=_units_given(config, train),
        commonest=None if metrics else commonest_of_items(test),
        note=note,
    )


def _check_kinds(model: object, functions: Mapping[str, object]) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}; give a torch module, or a model's name as model.name and no objects of yours"
        ).about("model", model, "a torch module")
    for name, one in functions.items():
        if one is not None and not callable(one):
            raise ConfigError(f"{name} is a {type(one).__name__}; give a function").about(name, one, "a function")


def _check_examples(train: Any, test: Any, non_members: Any) -> None:
    """Refuse a `train` that is no list of data sets, a `test` that is no data set, and an empty data set."""
    single = _numbered(train) and isinstance(train, Dataset) and isinstance(train[0], tuple | Mapping)
    if single or not _numbered(train):
        what = f"train is {'one' if single else 'a'} {type(train).__name__}"
        raise ConfigError(f"{what}; give a list with one data set per client").about("train", train, "a list")
    asked = [train[0]] if is_lazy(train) else train
    others = [] if non_members is None else [("non_members", non_members)]
    for name, examples in [
        ("test", test),
        *others,
        *((f"client {index} of train", own) for index, own in enumerate(asked)),
    ]:
        if not _numbered(examples):
            raise ConfigError(
                f"{name} is a {type(examples).__name__}; give a data set with a length and items by number, such as a list"
            ).about(name.rpartition(" ")[2], examples, "a data set")
    if not len(train) or not len(test):
        raise DataError(
            f"Federation was given {len(train)} clients and {len(test)} test examples; both must be at least one"
        )
    if non_members is not None and not len(non_members):
        raise DataError("non_members has no examples; give some, or leave it out")
    if non_members is not None and not is_lazy(train):  # reading all clients at the start is what a lazy train avoids
        _require_apart(non_members, train)
    if empty := [index for index, examples in enumerate(asked) if not len(examples)]:
        raise DataError(f"client {empty[0]} of the {len(train)} in train has no examples; leave it out")
    for client, own in enumerate(asked):
        without = (
            [row for row, item in enumerate(own) if _without_tokens(item)] if isinstance(own, list | tuple) else []
        )
        if without:
            raise DataError(
                f"example {without[0]} of client {client} has no token to read ({len(without)} of {len(own)} have none), so "
                "there is nothing to learn from; leave it out of train"
            ).about("train", without[0], "an example with tokens")


def _numbered(examples: Any) -> bool:
    has_both = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    return has_both and not isinstance(examples, Mapping | str)


def _require_apart(examples: Sequence[Any], train: Sequence[Sequence[Any]]) -> None:
    """Refuse non-members that are also training examples, by their content; nothing is refused where it cannot be read."""
    try:
        members = {fingerprint.content(own[index]) for own in train for index in range(len(own))}
        found = [fingerprint.content(examples[index]) in members for index in range(len(examples))]
    except TypeError:
        return
    if any(found):
        raise are_members(sum(found), found.index(True) + 1, "by their content")


def _without_tokens(item: Any) -> bool:
    """Whether an example in the columns of a tokenizer has no token, or masks all of them."""
    ids, mask = (
        (item.get(name) for name in ("input_ids", "attention_mask")) if isinstance(item, Mapping) else (None, None)
    )
    if isinstance(ids, Tensor | np.ndarray | list | tuple) and not len(ids):
        return True
    return bool(not mask.any()) if isinstance(mask, Tensor) else mask is not None and not np.any(mask)


def _check_settings(config: RunConfig, clients: int) -> None:
    """Refuse settings that contradict the objects, or that have no effect with them."""
    if config.federation.clients not in (None, clients):
        raise ConfigError(
            f"federation.clients is {config.federation.clients}, but train holds {clients} clients; leave the setting out"
        ).about("federation.clients", config.federation.clients, f"{clients}, as in train")
    if config.evaluation.non_members:
        raise ConfigError(
            "evaluation.non_members names files, which have no effect beside objects of yours: give the examples as non_members"
        ).about("evaluation.non_members", config.evaluation.non_members, "left out with objects of yours")
    usual, chosen = RunConfig().to_dict(), config.to_dict()
    for section in ("model", "data"):
        for name, value in chosen[section].items():
            if name != "device" and value != usual[section][name]:
                message = f"{section}.{name} = {value!r} has no effect on a model and data of yours: leave it out"
                raise ConfigError(message).about(f"{section}.{name}", value, "left out with objects of yours")


def _default_collate(model: Any, example: Any, *, classifies: bool) -> Collate:
    """The collate function for examples like `example`. classifies: whether labels are classes, as in the default loss."""
    if not (isinstance(example, Mapping) and "input_ids" in example):
        return cast(Collate, default_collate)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    if classifies and type(model).__name__.endswith("ForSequenceClassification"):
        return PadCollate(padding, partial(classification.known_classes, count=model.config.num_labels))
    return PadCollate(padding)


def _check_task(batch: Any, loss: Loss | None, metrics: Metrics | None) -> None:
    """Refuse batches without `labels`, unless a loss and metrics are given: the default task is classification."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return
    for name, task in (("loss", loss), ("metrics", metrics)):
        if task is None:
            raise ConfigError(
                f"a batch of your examples is a {type(batch).__name__} without 'labels', which classification needs: "
                f"give {name}=, or a collate= that makes a dict with 'labels'"
            ).about(name, None, "given for batches without 'labels'")


def _frozen(model: nn.Module) -> str:
    """A note if parameters are frozen, since a method chooses by itself what trains."""
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    if not frozen:
        return ""
    return (
        f"{len(frozen)} parameters of the model are frozen, {frozen[0]} among them, and this has no effect: method.name and "
        "method.modules_to_save choose what trains"
    )


def _require_divisible(config: RunConfig) -> None:
    """Refuse what `model.device_map` refuses too, for a model that accelerate has divided already."""
    if config.privacy.unit in ("example", "person"):
        raise ConfigError(
            f"privacy.unit is {config.privacy.unit!r}, and accelerate has divided the model over devices: load it without "
            "device_map, or protect clients"
        ).about("privacy.unit", config.privacy.unit, "none or client with a divided model")
    if config.model.device != ModelConfig().device:
        raise ConfigError(
            f"model.device is {config.model.device!r}, and accelerate has divided the model over devices: leave it out"
        ).about("model.device", config.model.device, "left out with a divided model")


def _content(train: Sequence[Sequence[Any]], test: Sequence[Any]) -> dict[str, str]:
    """A digest of clients' examples and of the test set, by which a resumed run knows its data; empty if none can be read.

    Only lists are read: another data set may give an example a new form each time.
    """
    if is_lazy(train) or not all(isinstance(own, list | tuple) for own in train):
        return {}
    try:
        return {"examples_digest": fingerprint.in_order([*train, *([test] if isinstance(test, list | tuple) else [])])}
    except (TypeError, RuntimeError):  # of examples whose content cannot be read
        return {}


def _units_given(config: RunConfig, train: Sequence[Sequence[Any]]) -> str:
    """A digest of the assignment of a user's own examples to units, as far as a shared ledger needs it."""
    if config.privacy.ledger:
        try:
            return fingerprint.of_objects(train, each=config.privacy.unit == "example")
        except TypeError as error:
            if not config.privacy.unit_name:
                raise ConfigError(
                    "a shared ledger has to identify its unit, and your examples cannot be told apart by their content "
                    f"({error}): set privacy.unit_name to a name that all runs on this unit give"
                ).about("privacy.unit_name", config.privacy.unit_name, "a name") from error
    return fingerprint.of_sizes([len(train)] if is_lazy(train) else map(len, train))


def require_no_repeats(data: Any, whose: str) -> None:
    """DataError if Subset or ConcatDataset put an example of the data set inside them into it more than once.

    Oversampling of a rare class makes such data sets. Removing an example would remove all its copies, and so move a step's sum
    by as many clip norms. Copies that are rows of their own, or that another kind of data set makes, are not seen.
    """
    if not isinstance(data, Subset | ConcatDataset):
        return
    seen: set[Hashable] = set()
    for example in _inside(data, range(len(data))):
        if example in seen:
            raise DataError(
                f"{whose} {type(data).__name__} has example {example[1]} of a data set more than once, and removing that "
                "example would move a step by more than clip_norm; leave out repeated indices, and multiply the loss of rare "
                "examples by a weight instead"
            )
        seen.add(example)


def _inside(data: Any, indices: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """(data set, index) of the examples at these indices, by the data set inside Subset and ConcatDataset."""
    if isinstance(data, Subset):
        own = data.indices.tolist() if hasattr(data.indices, "tolist") else data.indices
        yield from _inside(data.dataset, (own[index] for index in indices))
    elif isinstance(data, ConcatDataset):
        for index in indices:
            place = _from_the_start(index, data)
            part = bisect_right(data.cumulative_sizes, place)
            before = data.cumulative_sizes[part - 1] if part else 0
            yield from _inside(data.datasets[part], [place - before])
    else:
        for index in indices:
            yield id(data), _from_the_start(index, data)


def _from_the_start(index: Any, data: Any) -> Any:
    """The index as a whole number from 0, if it is a number: numbers below 0 count from the end."""
    if not hasattr(index, "__index__"):
        return index
    return int(index) + len(data) if index < 0 else int(index)
