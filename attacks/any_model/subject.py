"""The audited model, its references, and the texts, read as for training.

A model is a folder or a Hub id; an adapter is a PEFT folder, applied to a base model. The base model, with the adapter switched
off, is a reference without further cost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attacks.adversary.null import Floats
from attacks.any_model.apart import require_apart, require_different
from attacks.any_model.classes import in_order, require_same_order
from attacks.any_model.dates import column
from attacks.any_model.heads import adapted, require_adapter, require_head, require_head_of_either
from attacks.any_model.in_options import in_options
from attacks.any_model.likelihood import Tokens, losses_of, predicted, tokens_of
from attacks.any_model.scale import UNSCALED, learned, require_same
from attacks.any_model.texts import Texts, joined
from secure_fed.config import DataConfig, ModelConfig, RunConfig
from secure_fed.errors import UsageError
from secure_fed.export.label_scale import of
from secure_fed.export.peft_folder import on_mean_pooled
from secure_fed.learning import tasks
from secure_fed.learning.data import sources
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.data.table import Table
from secure_fed.learning.models import loading
from secure_fed.learning.tasks.task import Task

Switch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Asked:
    """The user's request. labels: the classes in the order of the model's outputs, if given.

    others: None if membership is unknown; then all texts are in one file, that of the option `all_in`. classes: all classes of
    the texts' data set, as the data writes them, where they are known; a few texts may not contain all of them. date: the
    column with the date of a text. shadows: the number to train, by `config`. recall: texts outside the training, to prefix
    each text with. neighbours: the number for each text, by the masked language model `neighbour_model` if one is named.
    attacks: files of user-defined signals. scale_given: whether the scale of a regression's labels in `data` is the user's.
    """

    model: str
    members: Path
    others: Path | None
    data: DataConfig
    adapter: Path | None = None
    references: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    max_length: int = 128
    device: str = "cpu"
    classes: tuple[int | str, ...] = ()
    date: str = ""
    shadows: int = 0
    config: RunConfig | None = None
    recall: Path | None = None
    neighbours: int = 0
    neighbour_model: str = ""
    attacks: tuple[Path, ...] = ()
    all_in: str = "--prepared"
    scale_given: bool = False


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
        if (scale := of(asked.data)) is not None:
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
        dates = column(_files(asked), kept, asked.date) if asked.date else None
        rows = joined(*parts)
        model, tokenizer, base = _loaded(asked, task, rows.label_names)
        texts = Texts(rows, len(parts[0]), task.encode(tokenizer, rows, asked.max_length))
    subject = Subject(asked, task, tokenizer, model.eval(), texts, base, dates, kept, notes + of_template)
    return subject if asked.others is None else _with_predictions(subject)


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


def _scaled(asked: Asked) -> tuple[Asked, tuple[str, ...]]:
    """The request with the scale of the model's labels, and a note that states it."""
    data = asked.data
    if (scale := of(data)) is None:
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
    if not (template := _template_beside(adapter)):
        return asked, ()
    note = f"Conversations are written by the chat template in {adapter}."
    return replace(asked, data=replace(data, chat_template=template)), (note,)


def _template_beside(adapter: Path) -> str:
    """The chat template of the tokenizer that is saved in an adapter's folder; empty without one."""
    with suppress(OSError):
        return (adapter / "chat_template.jinja").read_text(encoding="utf-8")
    with suppress(OSError, ValueError):
        found = json.loads((adapter / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        return found if isinstance(found, str) else ""
    return ""


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


def _distinct(rows: Rows) -> tuple[int, ...]:
    """The index of the first of equal rows."""
    seconds = rows.text_b or (None,) * len(rows)
    first = {
        repr(row): index for index, row in reversed(list(enumerate(zip(rows.text, rows.label, seconds, strict=True))))
    }
    return tuple(sorted(first.values()))


def _parts(asked: Asked, task: Task) -> list[Rows]:
    """The rows of each file, with the same label numbers."""
    for path, name in _files(asked):
        if path.is_dir():
            raise UsageError(f"{name} is the folder {path}, which may have several splits: name one file of it")
    tables = [sources.of_one_party(task, [path], name) for path, name in _files(asked)]
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


def _files(asked: Asked) -> list[tuple[Path, str]]:
    if asked.others is None:
        return [(asked.members, asked.all_in)]
    return [(asked.members, "--members"), (asked.others, "--non-members")]
