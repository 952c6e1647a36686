"""Rows as token ids: a large data set in windows, whose ids go to files.

The ids of built-in notes for a built-in model are computed once a process, since neither can change during it. A run, its audit
and a comparison run on the same notes then share them. A user's own data are tokenised at every read, since a file or a folder
may have changed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fed.activity import activity
from secure_fed.config import RunConfig
from secure_fed.errors import DataError
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.named_files import generated
from secure_fed.learning.data.on_disk import Column
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.data.word_by_word import words_kept
from secure_fed.learning.models.locate import BUILTIN
from secure_fed.learning.tasks.task import Task

WINDOW = 2048  # rows that are tokenised in memory
_SPLITS = 2  # kept at a time: a run's training and test examples
_kept: OrderedDict[tuple[Any, ...], Encoded] = OrderedDict()


def tokenised(config: RunConfig, task: Task, tokenizer: Any, rows: Rows) -> Encoded:
    """`encoded` for rows of the configuration's data; callers must not write to the result."""
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


def with_room(items: Encoded) -> NDArray[np.int64]:
    """The places of the examples that the task does not leave out for want of room. DataError if none is left."""
    found = np.flatnonzero(items.lengths)
    if len(items) and not len(found):
        raise DataError(
            f"model.max_length leaves no room for any of {len(items)} examples: raise it, or shorten the rows"
        ).about("model.max_length", len(items), "room for an example")
    return found


def encoded(task: Task, tokenizer: Any, rows: Rows, length: int) -> Encoded:
    """`task.encode`, in windows if there are many rows: a task encodes every row by itself."""
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
