"""The learning problem of a run: a model, every client's examples, a test set, and functions for batches, losses and metrics.

`configured` builds it from a configuration: it reads the rows, divides them over clients, loads the model and tokenises.
`user_objects.py` builds it from the user's own objects. `warnings` are about texts and model, and are shown before training
starts.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from secure_fed.activity import activity
from secure_fed.config import RunConfig
from secure_fed.errors import DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import fingerprint, partition, sources
from secure_fed.learning.data.encode import ASIDE, Encoded, words_kept
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.data.on_disk import Column, in_parts
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.data.sources import generated, overlaps
from secure_fed.learning.evaluation import Asked, asked, confidence
from secure_fed.learning.models.architecture import means_tokens, reads_the_mean
from secure_fed.learning.models.loading import head_of, last_layer, load
from secure_fed.learning.models.locate import BUILTIN, found, never_saw
from secure_fed.learning.tasks.chat import ChatTemplate
from secure_fed.learning.tasks.headline import Commonest
from secure_fed.learning.tasks.task import Collate, Confidence, Loss, Metrics, Task

MANY = 10_000  # clients; with fewer, all examples are read before training starts
WINDOW = 2048  # rows that are tokenised in memory
_SPLITS = 2  # kept at a time: a run's training and test examples
_kept: OrderedDict[tuple[Any, ...], Encoded] = OrderedDict()
_MANY_UNKNOWN, _MANY_CUT = 0.2, 0.02


@dataclass(frozen=True)
class Problem:
    """A learning problem: everything a run needs except its settings. `train[i]` are the examples of client `names[i]`.

    head: names of the parameters that train in full beside the adapter. fixed: the head's names, if it never trains. last: the
    names of its last layer, which computes the scores; empty if the model does not declare its head. confidence: how well a
    model fits an example. persons: for every client, the person of each example, if these are protected. facts: the facts on
    data and clients for the run directory. data_digest, unit_digest: plain digests, for a ledger, of the data before rows are
    held out, and of the assignment of rows to protected units; they could confirm guesses about rows, so they stay in memory.
    warning: a warning to show before training starts, or empty. sizes: the number of each client's units, where most clients'
    examples are on other machines and not in `train`. commonest: the most frequent label of the test set, if accuracy counts
    labels and the test rows were not held out of private rows. note: a sentence on the objects that a user gave, or empty.
    non_members: examples that a user named as trained on by no client; empty if there are none. left_out: training examples
    that have no room in `model.max_length` tokens. asked: the test rows to which evaluations write answers, or None.
    ranks: by the name of a client, the rank that a column of the data gives it.
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
    persons: Sequence[Sequence[str]] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    data_digest: str = ""
    unit_digest: str = ""
    warning: str = ""
    note: str = ""
    sizes: Sequence[int] | None = None
    commonest: Commonest | None = None
    fixed: tuple[str, ...] = ()
    non_members: Sequence[Any] = ()
    left_out: int = 0
    asked: Asked | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)

    @property
    def lazy(self) -> bool:
        """Whether a client's examples are read only when the client is drawn."""
        return is_lazy(self.train)

    @property
    def here(self) -> Sequence[Sequence[Any]]:
        """The clients' examples on this machine; the test set if there are none."""
        return self.train if self.sizes is None else [own for own in self.train if len(own)] or [self.test]

    @property
    def units(self) -> Sequence[int]:
        """The number of each client's examples, or of its persons if it names them."""
        if self.sizes is not None:
            return self.sizes
        if self.lazy:
            return Sizes(self.train)
        return [len(own) for own in self.train] if self.persons is None else [len(set(own)) for own in self.persons]


def is_lazy(train: Sequence[Sequence[Any]]) -> bool:
    """Whether `train` loads clients' examples on demand: a large sequence that is no list or tuple."""
    return not isinstance(train, list | tuple) and len(train) >= MANY


@dataclass(frozen=True)
class Sizes(Sequence[int]):
    """The number of each client's examples, counted on access."""

    train: Sequence[Sequence[Any]]

    def __len__(self) -> int:
        return len(self.train)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return len(self.train[index])


def configured(config: RunConfig, *, shapes: bool = False) -> Problem:
    """The problem that a configuration describes. shapes: with a model on the meta device, of shapes without numbers."""
    seed, task = config.federation.seed, tasks.build(config.data)
    private = config.privacy.unit != "none"
    found(config.model)  # refused before the data are read
    with activity("reading the data"):
        source = sources.load(
            config.data,
            task,
            seed=seed,
            person=config.privacy.person_column,
            unit=config.privacy.unit,
            non_members=config.evaluation.non_members,
            ranks=config.method.ranks_column,
        )
    asked(config, task, source.test)  # refused before a model is loaded
    labels = source.train.label_names
    strata = tuple(task.strata(source.train, seed))
    divided = partition.divide(config, replace(source, train=replace(source.train, label=strata)))
    loss, metrics = task.loss(labels), task.metrics(labels)
    data_digest = fingerprint.of_rows(source.train, source.test)
    loaded = load(config.model, task, labels, seed, shapes=shapes)
    tokenizer = loaded.tokenizer
    train, test = (tokenised(config, task, tokenizer, rows) for rows in (source.train, source.test))
    divided, room = partition.among(divided, with_room(train)), with_room(test)
    others = None if source.others is None else tokenised(config, task, tokenizer, source.others)
    read = {"test": test} if private else {"training": train, "test": test}
    if others is not None and not private:
        read["other"] = others
    parts = [list(map(int, part)) for part in divided.parts]
    skew = {
        "kind": partition.kind_of(config, source),
        "jensen_shannon": partition.jensen_shannon(strata, divided.parts, max(strata) + 1),
    }
    facts = facts_of(config, task.title, labels, divided.names, parts, (source.tested, len(room)), skew)
    facts["data_digest"] = data_digest
    if config.data.task == "chat":  # also a template of the model's folder, so that a resumed run recognises it
        facts["chat_template"] = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    return Problem(
        model=loaded.model,
        head=head_of(loaded.model, loaded.head, config.method.modules_to_save),
        fixed=loaded.fixed,
        last=last_layer(loaded.model),
        train=[train.take(part) for part in divided.parts],
        names=divided.names,
        test=test.take(room),
        asked=asked(config, task, source.test.take(map(int, room))),
        non_members=() if others is None else others.take(with_room(others)),
        collate=task.collate(tokenizer),
        loss=loss,
        metrics=metrics,
        confidence=confidence(config.data.task, loss),
        tokenizer=tokenizer,
        persons=partition.persons_of(source, divided) if config.privacy.unit == "person" else None,
        facts=facts,
        data_digest=fingerprint.of_rows(source.whole, *([source.test] if is_declared(source.tested) else [])),
        unit_digest=fingerprint.of_units(*partition.units(config, source, divided)) if private else "",
        commonest=Commonest.among(task.counted(source.test)) if is_declared(source.tested) or not private else None,
        note=f"The data are {task.title}s: {source.form}." if source.form else "",
        ranks={name: source.ranks[name] for name in divided.names} if source.ranks else {},
        left_out=len(source.train) - sum(map(len, parts)),
        warning="; and ".join([*overlaps(config.data), *warnings(config, read, tokenizer, loaded.model)]),
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

    parts: every client's rows, or its number of examples. tested: the origin of the test rows, and their number. This number is
    not recorded for rows held out of private ones, since it reveals the number of these. skew: how examples were divided, and
    how the clients' labels differ.
    """
    private, (origin, rows) = config.privacy.unit != "none", tested
    divided = {**skew, "sizes": [part if isinstance(part, int) else len(part) for part in parts]}
    if private:  # by which a resumed run recognises its data
        divided["digest"] = hashlib.sha256(json.dumps([list(names), parts]).encode()).hexdigest()
    test = {"from": origin, "rows": rows if is_declared(origin) or not private else None}
    return {"task": task, "label_names": list(labels), "clients": list(names), "partition": divided, "test": test}


def tokenised(config: RunConfig, task: Task, tokenizer: Any, rows: Rows) -> Encoded:
    """`encoded` for rows of the configuration's data; callers must not write to the result.

    The ids of built-in notes for a built-in model are computed once a process, since neither can change during it. A run, its
    audit and a comparison run on the same notes then share them. A user's own data are tokenised at every read, since a file or
    a folder may have changed.
    """
    length = config.model.max_length
    if config.model.name not in BUILTIN or not generated(config.data):
        return encoded(task, tokenizer, rows, length)
    key = (config.model.name, repr(config.data), length, rows)
    if key not in _kept:
        _kept[key] = encoded(task, tokenizer, rows, length)
    _kept.move_to_end(key)
    while len(_kept) > _SPLITS:
        _kept.popitem(last=False)
    return _kept[key]


def encoded(task: Task, tokenizer: Any, rows: Rows, length: int) -> Encoded:
    """`task.encode`, in windows whose ids go to files if there are many rows: a task encodes every row by itself."""
    with activity(f"tokenising {len(rows):,} rows") as now, words_kept():
        if len(rows) <= WINDOW:
            return task.encode(tokenizer, rows, length)
        columns: dict[str, Column] = defaultdict(Column)
        for start in range(0, len(rows), WINDOW):
            now.says(f"tokenising {len(rows):,} rows, {start:,} are done", anew=False)
            some = rows.take(range(start, min(start + WINDOW, len(rows))))
            for name, entries in task.encode(tokenizer, some, length).columns.items():
                columns[name].extend(entries)
        return Encoded({name: column.whole() for name, column in columns.items()})


def with_room(items: Encoded) -> NDArray[np.int64]:
    """The places of the examples that the task does not leave out for want of room. DataError if none is left."""
    found = np.flatnonzero(items.lengths)
    if len(items) and not len(found):
        raise DataError(
            f"model.max_length leaves no room for any of {len(items)} examples: raise it, or shorten the rows"
        ).about("model.max_length", len(items), "room for an example")
    return found


def warnings(config: RunConfig, read: Mapping[str, Encoded], tokenizer: Any, model: nn.Module) -> Iterator[str]:
    """Warnings if the model is built in and the texts are not, if many tokens are unknown to the tokenizer, so that examples
    look alike, if many texts are cut, or if the head does not read the mean over tokens, for which the model was made.

    read: the texts, by what they are for; all count for conversations, and the first elsewhere. With privacy these are the test
    texts alone, which do not train: a share of private texts would be released without noise.
    """
    which, texts = next(iter(read.items()))
    if config.model.name in BUILTIN and not generated(config.data):
        yield never_saw(config.model.name, config.data.task)
    unknown, ends = tokenizer.unk_token_id, (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    share = 0.0
    if unknown is not None and unknown not in ends:  # GPT-2's is its end token
        count = sum(int((np.concatenate(part) == unknown).sum()) for part in in_parts(texts.input_ids))
        share = count / int(texts.lengths.sum())
    if share >= _MANY_UNKNOWN:
        tokens_of = f"tokens are unknown to the tokenizer of {config.model.name}"
        yield f"{share:.0%} of the {which} {tokens_of}, and look alike to it; set model.name to another model"
    most = config.model.max_length
    if config.data.task == "chat":
        for kind, chats in read.items():
            left = int((chats.lengths == 0).sum())
            if lose := sum(map(bool, chats.columns[ASIDE])) - left:
                yield f"{lose:,} of {len(chats):,} {kind} conversations lose their oldest turns to model.max_length = {most}"
            if left:
                yield (
                    f"{left:,} of {len(chats):,} {kind} conversations are left out, since not even their last exchange fits "
                    f"model.max_length = {most}; raise it if they matter"
                )
        if not ChatTemplate.of(tokenizer).divides_by_tokens:
            yield (
                f"the chat template divides turns by plain text, for which the tokenizer of {config.model.name} has no tokens, "
                "so a text of the data can fake a turn: set data.chat_template to one with control tokens"
            )
    cut = float((texts.lengths >= most).mean()) if config.data.task not in ("question_answering", "chat") else 0.0
    if cut >= _MANY_CUT:
        yield f"{cut:.0%} of the {which} texts reach model.max_length = {most} and are cut there; raise it if their ends matter"
    of_whole_texts = tasks.build(config.data).auto == "AutoModelForSequenceClassification"
    if of_whole_texts and not reads_the_mean(model) and means_tokens(config.model):
        made = "a sentence encoder, made for the mean over its tokens, and the head reads something else"
        yield f"{config.model.name} is {made}; set model.pooling = 'mean'"
