"""The audited model, its references, and the texts, read as for training.

A model is a folder or a Hub id; an adapter is a PEFT folder, applied to a base model. The base model, with the adapter switched
off, is a reference without further cost. A `Subject` gives losses of the texts, and for language models the log-likelihoods of
their tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.adversary.null import Floats
from attacks.any_model.outputs import (
    UNSCALED,
    adapted,
    in_options,
    in_order,
    learned,
    require_adapter,
    require_head,
    require_head_of_either,
    require_same,
    require_same_order,
)
from attacks.evidence.baseline import when
from attacks.options import Asked
from secure_fed.config import ModelConfig
from secure_fed.errors import DataError, ModelError, UsageError
from secure_fed.export.export import label_scale_of
from secure_fed.export.peft_folder import on_mean_pooled
from secure_fed.learning import tasks
from secure_fed.learning.data import files, sources
from secure_fed.learning.data.chats import ASSISTANT
from secure_fed.learning.data.encode import IGNORED, Encoded, batches
from secure_fed.learning.data.on_disk import kept
from secure_fed.learning.data.rows import Rows, Table, Vocabulary, is_chat, normal_text
from secure_fed.learning.models import loading
from secure_fed.learning.models.locate import locate
from secure_fed.learning.tasks.next_tokens import rows_together, token_figures
from secure_fed.learning.tasks.task import Task
from secure_fed.learning.training.objective import to_device

Switch = Callable[[], AbstractContextManager[Any]]
BATCH = 16
_PREDICTED_FROM = {"AutoModelForCausalLM": 1, "AutoModelForTokenClassification": 0}  # place of the first labelled token


@dataclass(frozen=True)
class Subject:
    """A loaded model and the texts.

    base: switches the adapter off; None without a base to compare with. dates: of each text, if the files have them. kept: for
    each file the indices of its rows without copies, which would count as evidence of their own. notes: sentences on what was
    assumed of the model.
    """

    asked: Asked
    task: Task
    tokenizer: Any
    model: Any
    texts: Texts
    base: Switch | None
    dates: tuple[object, ...] | None = None
    kept: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def places(self) -> list[int]:
        """(texts,) the row of each text in its file, from 0."""
        return [row for part in self.kept for row in part]

    @property
    def language_model(self) -> bool:
        return self.task.auto == "AutoModelForCausalLM"

    def reading(self, rows: Rows) -> Subject:
        """The model with other texts in the place of these, one for each."""
        encoded = self.task.encode(self.tokenizer, rows, self.asked.max_length)
        return replace(self, texts=Texts(rows, self.texts.members, encoded))

    def losses(self, switch: Switch = nullcontext) -> Floats:
        """(texts,) the task's loss of each text."""
        names = self.texts.rows.label_names
        with switch():
            return losses_of(self.model, self.task, self.tokenizer, self.texts.examples, names)

    def reference_losses(self) -> list[Floats]:
        """(texts,) losses under each reference, with its own tokenizer; the base model, if any, comes first."""
        found = [self.losses(self.base)] if self.base else []
        for name in self.asked.references:
            with in_options("--reference", texts=self.asked.config is None):
                found.append(self._losses_under(name))
        return found

    def _losses_under(self, reference: str) -> Floats:
        asked, rows = self.asked, self.texts.rows
        loaded = loading.load(
            ModelConfig(reference, device=asked.device, max_length=asked.max_length), self.task, rows.label_names, 0
        )
        require_head(reference, self.task, rows.label_names)
        require_same_order(reference, rows.label_names)
        if (scale := label_scale_of(asked.data)) is not None:
            require_same(reference, scale)
        encoded = self.task.encode(loaded.tokenizer, rows, asked.max_length)
        return losses_of(loaded.model.eval(), self.task, loaded.tokenizer, encoded, rows.label_names)

    def tokens(self) -> list[Tokens]:
        """A language model's predicted tokens, for every text."""
        return tokens_of(self.model, self.task, self.tokenizer, self.texts.examples)


def opened(asked: Asked) -> Subject:
    """Read the texts and load the model. Errors explain in one sentence what does not fit."""
    require_different(asked.model, asked.references)
    with in_options(texts=asked.config is None):
        asked, notes = _scaled(asked)
        asked, of_template = _templated(asked)
        task = tasks.build(asked.data)
        require_adapter(asked.adapter) if asked.adapter is not None else require_head(asked.model, task, ())
        parts = _parts(asked, task)
        kept = tuple(map(_distinct, parts))
        parts = [part.take(rows) for part, rows in zip(parts, kept, strict=True)]
        if asked.others is not None:
            require_apart(*parts)
        dates = dates_of(asked.files, kept, asked.date) if asked.date else None
        rows = joined(*parts)
        model, tokenizer, base = _loaded(asked, task, rows.label_names)
        texts = Texts(rows, len(parts[0]), task.encode(tokenizer, rows, asked.max_length))
    subject = Subject(asked, task, tokenizer, model.eval(), texts, base, dates, kept, notes + of_template)
    return subject if asked.others is None else _with_predictions(subject)


def require_different(model: str, references: Sequence[str]) -> None:
    """Refuse a model as its own reference, and a repeated reference: the spread over references would be meaningless."""
    seen = {_place(model, "MODEL"): "is MODEL itself"}
    for name in references:
        place = _place(name, "--reference")
        if (why := seen.get(place)) is not None:
            raise UsageError(
                f"--reference {name} {why}: leave it out, or name another model that never saw the members"
            )
        seen[place] = "is given twice"


def _place(name: str, option: str) -> str:
    """The whole path of a folder, or a Hub id unchanged. ModelError, naming the option, for anything else."""
    try:
        found = locate(name)
    except ModelError as error:
        raise ModelError(str(error).replace("model.name", option, 1)) from error
    return str(Path(found).resolve()) if Path(found).exists() else found


def require_apart(members: Rows, others: Rows) -> None:
    """Refuse a text that is on both sides, under any label: it was in the training, so listing it among the others would hide a
    leak, and with another label it would pose as one.
    """
    first, both = _plain(members), set(_plain(members)) & set(_plain(others))
    if both:
        raise UsageError(
            f"{len(both)} texts are both in --members and in --non-members, such as row "
            f"{min(map(first.index, both)) + 1} of --members (labels, white space and capitals do not count): what was in the "
            "training is a member, so take them out of --non-members"
        )


def _plain(rows: Rows) -> list[tuple[str, str]]:
    """Each row's texts, as `normal` writes them."""
    seconds = rows.text_b or ("",) * len(rows)
    return [(normal_text(one), normal_text(two)) for one, two in zip(rows.text, seconds, strict=True)]


def _scaled(asked: Asked) -> tuple[Asked, tuple[str, ...]]:
    """The request with the scale of the model's labels, and a note that states it."""
    data = asked.data
    if (scale := label_scale_of(data)) is None:
        return asked, ()
    by = "--label-centre and --label-scale"
    if asked.config is not None:
        by = "data.label_centre and data.label_scale of --config"
    is_given = asked.scale_given or asked.config is not None or scale != UNSCALED
    found, note = learned(
        scale if is_given else None, by=by, model=asked.model, adapter=asked.adapter, whole=asked.config is not None
    )
    return replace(asked, data=replace(data, label_centre=found.centre, label_scale=found.scale)), (note,)


def _templated(asked: Asked) -> tuple[Asked, tuple[str, ...]]:
    """The request with the chat template beside the adapter, by which its training wrote conversations, and a note on it."""
    data, adapter = asked.data, asked.adapter
    if data.task != "chat" or data.chat_template or adapter is None or asked.config is not None:
        return asked, ()
    template = ""  # of the tokenizer that is saved in the adapter's folder
    try:
        template = (adapter / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        with suppress(OSError, ValueError):
            found = json.loads((adapter / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
            template = found if isinstance(found, str) else ""
    if not template:
        return asked, ()
    note = f"Conversations are written by the chat template in {adapter}."
    return replace(asked, data=replace(data, chat_template=template)), (note,)


def _parts(asked: Asked, task: Task) -> list[Rows]:
    """The rows of each file, with the same label numbers."""
    asked.require_files()
    tables = [sources.of_one_party(task, [path], name) for path, name in asked.files]
    classes = _classes(asked, task, tables)
    classes = in_order(classes, asked.labels, task=asked.data.task, model=asked.model, adapter=asked.adapter)
    return [task.rows(some, classes) for some in tables]


def _classes(asked: Asked, task: Task, tables: Sequence[Sequence[Table]]) -> Vocabulary:
    """The classes of the texts; of tags, those that occur."""
    every = [one for some in tables for one in some]
    if asked.data.task == "tokens":  # whose classes are both tags of a type, and a model may lack one that never occurs
        known = task.classes(every)
        occur = set(task.counted(task.rows(every, known)))
        names = tuple(name for tag, name in enumerate(known.names) if tag in occur)
        return Vocabulary(names, names)
    return Vocabulary(asked.classes, tuple(map(str, asked.classes))) if asked.classes else task.classes(every)


def _distinct(rows: Rows) -> tuple[int, ...]:
    """The index of the first of equal rows."""
    seconds = rows.text_b or (None,) * len(rows)
    first = {
        repr(row): index for index, row in reversed(list(enumerate(zip(rows.text, rows.label, seconds, strict=True))))
    }
    return tuple(sorted(first.values()))


def dates_of(parts: Sequence[tuple[Path, str]], kept: Sequence[Sequence[int]], name: str) -> tuple[object, ...]:
    """The dates of all files' kept rows. parts: files and their options. DataError for a date that cannot be read."""
    found: list[object] = []
    for (path, option), rows in zip(parts, kept, strict=True):
        values = files.read(path, [name], option).column(name, "--date")
        for row in rows:
            try:
                when(values[row])
            except ValueError as error:
                raise DataError(
                    f"row {row + 1} of {option} has {values[row]!r:.40} in the column {name!r}, which --date cannot read: "
                    "write dates as 2021-07-04, and leave out the date of a text that has none"
                ) from error
        found += [values[row] for row in rows]
    return tuple(found)


def _loaded(asked: Asked, task: Task, names: Sequence[str]) -> tuple[Any, Any, Switch | None]:
    """The model, its tokenizer, and what switches its adapter off, if that leaves a reference."""
    pooling = "mean" if asked.adapter is not None and on_mean_pooled(asked.adapter) else "model"
    config = ModelConfig(asked.model, device=asked.device, max_length=asked.max_length, pooling=pooling)
    loaded = loading.load(config, task, names, 0)
    if asked.adapter is None:
        require_head(asked.model, task, names)
        return loaded.model, loaded.tokenizer, None
    require_head_of_either(asked.adapter, asked.model, task, loaded.model, names)
    model = adapted(loaded.model, asked.adapter)
    return model, loaded.tokenizer, model.disable_adapter if task.keeps_head else None  # a new head is untrained


def _with_predictions(subject: Subject) -> Subject:
    """The subject without texts that have no token to predict, and a note on their number. UsageError if none has one."""
    texts, places = subject.texts, subject.places
    there = predicted(subject.task, texts.examples)
    if len(there) == len(texts.rows):
        return subject
    if not there:
        raise UsageError(
            f"no text has a token to predict among its first {subject.asked.max_length}, where it is cut: give longer "
            "texts, or raise --max-length"
        )
    sides = [one for one in there if one < texts.members], [one for one in there if one >= texts.members]
    out = texts.members - len(sides[0]), len(texts.rows) - texts.members - len(sides[1])
    note = f"Left out, since they have no token to predict: {out[0]} members and {out[1]} others."
    return replace(
        subject,
        texts=Texts(texts.rows.take(there), len(sides[0]), texts.examples.take(there)),
        dates=subject.dates and tuple(subject.dates[one] for one in there),
        kept=tuple(tuple(places[one] for one in side) for side in sides),
        notes=(*subject.notes, note),
    )


def predicted(task: Task, examples: Encoded) -> list[int]:
    """The indices of the examples with a token to predict. The loss of the others is 0, as of a text known by heart."""
    if (first := _PREDICTED_FROM.get(task.auto)) is None:
        return list(range(len(examples)))
    return [index for index, own in enumerate(examples.columns["labels"]) if (own[first:] != IGNORED).any()]


@dataclass(frozen=True)
class Texts:
    """All texts, members first. members: their number. examples: the texts, tokenised for the model."""

    rows: Rows
    members: int
    examples: Encoded

    @property
    def learned(self) -> list[str]:
        """The text of each that a training learns, as far as its turns say so: the assistant's, of a conversation."""
        if any(map(is_chat, self.rows.text)):
            return ["\n".join(said for role, said in chat if role == ASSISTANT) for chat in self.rows.text]
        return self.plain

    @property
    def plain(self) -> list[str]:
        return plain_of(self.rows)


def plain_of(rows: Rows) -> list[str]:
    """The text of each row; a second text is appended to the first. A conversation is its turns, each with its role."""
    if any(map(is_chat, rows.text)):
        return ["\n".join(f"{role}: {said}" for role, said in chat) for chat in rows.text]
    seconds = rows.text_b or ("",) * len(rows)
    return [f"{one} {two}".strip() for one, two in zip(rows.text, seconds, strict=True)]


def joined(members: Rows, others: Rows | None = None) -> Rows:
    """The rows of both files, members first."""
    if others is None:
        return members
    second = None if members.text_b is None else kept(members.text_b, others.text_b or ())
    text, label = kept(members.text, others.text), kept(members.label, others.label)
    return Rows(text, label, members.label_names, second)


@torch.no_grad()
def losses_of(model: Any, task: Task, tokenizer: Any, examples: Encoded, label_names: Sequence[str]) -> Floats:
    """(examples,) the task's loss of each example."""
    loss, device = task.loss(label_names), next(model.parameters()).device
    found = np.zeros(len(examples))
    with rows_together():
        for batch in batches(examples, BATCH, task.collate(tokenizer), None):
            found[batch.indices] = loss(model, to_device(batch.inputs, device)).double().cpu().numpy()
    require_numbers(found)
    return found


@dataclass(frozen=True)
class Tokens:
    """A language model's predictions of a text's tokens, each from the tokens before it.

    said: (T,) the log-likelihood of each token. mean, deviation: (T,) mean and standard deviation of the log-likelihood of a
    token drawn from the model's distribution at that place.
    """

    said: Floats
    mean: Floats
    deviation: Floats


@torch.no_grad()
def tokens_of(model: Any, task: Task, tokenizer: Any, examples: Encoded, size: int = BATCH) -> list[Tokens]:
    """The log-likelihoods of every predicted token, for each example."""
    found: dict[int, Tokens] = {}
    device = next(model.parameters()).device
    for batch in batches(examples, size, task.collate(tokenizer), None):
        with rows_together():
            parts, there = token_figures(model, to_device(batch.inputs, device), _figures)
        for row, index in enumerate(batch.indices.tolist()):
            found[index] = Tokens(*(part[row][there[row]].double().cpu().numpy() for part in parts))
    tokens = [found[index] for index in range(len(examples))]
    require_numbers(np.array([one.said.sum() + one.mean.sum() + one.deviation.sum() for one in tokens]))
    return tokens


def _figures(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p of each target, and the mean and the standard deviation of log p for tokens drawn by p."""
    log = scores.log_softmax(1)
    said = log.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    p = log.exp()
    weighted = torch.xlogy(p, p)  # a token with p = 0 adds nothing
    mean, square = weighted.sum(-1), torch.xlogy(weighted, p).sum(-1)
    return said, mean, (square - mean.square()).clamp_min(0).sqrt()


def require_numbers(losses: Floats) -> None:
    """ModelError if a text's loss is not a number, because no attack could rank it."""
    if broken := int(np.isnan(losses).sum()):
        raise ModelError(
            f"the model gives {broken} of {len(losses)} texts a loss that is not a number (NaN): its weights are damaged, or "
            "they overflow in the precision that they are stored in; give a model that was saved whole, in float32"
        )
