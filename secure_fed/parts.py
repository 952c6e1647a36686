"""What a federation is put together from: a model, every client's examples, a test set, and what a batch, a loss and a
metric are. Either a configuration says it all, or the user's own objects do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from secure_fed.config import RunConfig
from secure_fed.data import partition, sources
from secure_fed.data.encode import Collate as PadCollate
from secure_fed.data.encode import encode, pad_id
from secure_fed.errors import ConfigError, DataError, MethodError
from secure_fed.evaluation import Metrics
from secure_fed.models.loading import find_device, head_names, load_classifier
from secure_fed.tasks import classification
from secure_fed.training import Collate, Loss


@dataclass(frozen=True)
class Parts:
    """Everything a run needs but its settings. `train[i]` belongs to the client called `names[i]`.

    head: names of the parameters that train in full beside the adapter. facts: what the run directory notes of them.
    """

    model: nn.Module
    head: tuple[str, ...]
    train: Sequence[Sequence[Any]]
    names: Sequence[str]
    test: Sequence[Any]
    collate: Collate
    loss: Loss = classification.loss
    metrics: Metrics = classification.metrics
    tokenizer: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def configured(config: RunConfig) -> Parts:
    """The parts a configuration describes."""
    seed = config.federation.seed
    source = sources.load(config.data, seed=seed)
    divided = _divide(config, source)
    labels = source.train.label_names
    loaded = load_classifier(config.model, labels, seed)
    encoded = encode(loaded.tokenizer, source.train, config.model.max_length)
    return Parts(
        model=loaded.model,
        head=head_of(loaded.model, loaded.head, config.method.modules_to_save),
        train=[encoded.take(part) for part in divided.parts],
        names=divided.names,
        test=encode(loaded.tokenizer, source.test, config.model.max_length),
        collate=PadCollate(pad_id(loaded.tokenizer)),
        tokenizer=loaded.tokenizer,
        facts={
            "task": "classification of text pairs" if config.data.text_b else "text classification",
            "label_names": list(labels),
            "clients": list(divided.names),
            "partition": {
                "jensen_shannon": partition.jensen_shannon(source.train.label, divided.parts, len(labels)),
                "sizes": [len(part) for part in divided.parts],
            },
        },
    )


def given(
    config: RunConfig,
    model: nn.Module | None,
    train: Sequence[Sequence[Any]] | None,
    test: Sequence[Any] | None,
    collate: Collate | None,
    loss: Loss | None,
    metrics: Metrics | None,
) -> Parts:
    """The user's own objects; `train` is one sequence of examples per client."""
    if model is None or train is None or test is None:
        missing = [name for name, part in (("model", model), ("train", train), ("test", test)) if part is None]
        raise ConfigError(
            f"Federation was given objects of yours but not {' and '.join(missing)}; give model, train and test"
        )
    if not len(train) or not len(test):
        raise DataError(
            f"Federation was given {len(train)} clients and {len(test)} test examples; both must be at least one"
        )
    empty = [index for index, examples in enumerate(train) if not len(examples)]
    if empty:
        raise DataError(f"client {empty[0]} of the {len(train)} in train has no examples; leave it out")
    if config.federation.clients not in (None, len(train)):
        raise ConfigError(
            f"federation.clients is {config.federation.clients}, but train holds {len(train)} clients; leave the setting out"
        )
    width = len(str(len(train) - 1))
    names = [f"client-{index:0{width}d}" for index in range(len(train))]
    model.to(find_device(config.model.device))
    return Parts(
        model=model,
        head=head_of(model, head_names(model), config.method.modules_to_save),
        train=train,
        names=names,
        test=test,
        collate=collate or _default_collate(model, test[0]),
        loss=loss or classification.loss,
        metrics=metrics or classification.metrics,
        facts={
            "task": "given in Python",
            "label_names": [],
            "clients": names,
            "partition": {"jensen_shannon": None, "sizes": [len(examples) for examples in train]},
        },
    )


def _divide(config: RunConfig, source: sources.Source) -> partition.Partition:
    federation, train = config.federation, source.train
    natural = config.data.partition == "natural" or (config.data.partition == "auto" and source.keyed)
    clients = federation.clients if natural or federation.clients else _DEFAULT_CLIENTS
    return partition.partition(
        config.data.partition,
        train.label,
        clients=clients,
        rng=np.random.default_rng([federation.seed, _PARTITION_STREAM]),
        alpha=config.data.alpha,
        keys=train.client if source.keyed else None,
    )


def head_of(model: nn.Module, found: Sequence[str], modules: Sequence[str]) -> tuple[str, ...]:
    """The parameters that train in full: the head that was found, and the modules asked for beside it."""
    names = [name for name, _ in model.named_parameters()]
    for module in modules:
        if not any(_inside(name, module) for name in names):
            some = ", ".join(name for name, _ in list(model.named_children())[:5])
            raise MethodError(
                f"method.modules_to_save names {module!r}, but the model has no such module; it has {some}, ..."
            )
    return tuple(name for name in names if name in found or any(_inside(name, module) for module in modules))


def _inside(parameter: str, module: str) -> bool:
    """Whether a parameter belongs to the module of that (ending of a) name, as PEFT matches them."""
    owner = f".{parameter}".rpartition(".")[0] + "."
    return f".{module}." in owner


def _default_collate(model: Any, example: Any) -> Collate:
    if isinstance(example, Mapping) and "input_ids" in example:
        pad: Any = getattr(getattr(model, "config", None), "pad_token_id", None)
        return PadCollate(pad or 0)
    from torch.utils.data import default_collate

    collate: Callable[[Any], Any] = default_collate
    return collate


_DEFAULT_CLIENTS = 50
_PARTITION_STREAM = 2**32 - 2  # apart from the streams of clients and cohorts, which share the seed
