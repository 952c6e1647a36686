"""The token ids of built-in notes for a built-in model, computed once a process: neither can change during it.

A run, its audit and a comparison run on the same notes then share them. A user's own data are tokenised at every read, since a
file or a folder may have changed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from secure_fed.activity import activity
from secure_fed.config import RunConfig
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.named_files import generated
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.models.locate import BUILTIN
from secure_fed.learning.tasks.task import Task

_SPLITS = 2  # kept at a time: a run's training and test examples
_kept: OrderedDict[tuple[Any, ...], Encoded] = OrderedDict()


def tokenised(config: RunConfig, task: Task, tokenizer: Any, rows: Rows) -> Encoded:
    """`task.encode` of these rows of the configuration's data; callers must not write to the result."""
    length = config.model.max_length
    if config.model.name not in BUILTIN or not generated(config.data):
        with activity(f"tokenising {len(rows):,} rows"):
            return task.encode(tokenizer, rows, length)
    key = (config.model.name, repr(config.data), length, rows)
    if key not in _kept:
        with activity(f"tokenising {len(rows):,} rows"):
            _kept[key] = task.encode(tokenizer, rows, length)
    _kept.move_to_end(key)
    while len(_kept) > _SPLITS:
        _kept.popitem(last=False)
    return _kept[key]
