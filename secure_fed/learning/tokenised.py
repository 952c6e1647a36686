"""The token ids of built-in notes for a built-in model, made once a process: neither can change while it lasts.

A run, its audit and a run beside it on the same notes then share them. Whatever the user brings is tokenised whenever it is
read, since a file or a folder may have changed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.named_files import generated
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.models.locate import BUILTIN
from secure_fed.learning.tasks.task import Task

_SPLITS = 2  # that are kept: a run's training and test examples
_kept: OrderedDict[tuple[Any, ...], Encoded] = OrderedDict()


def tokenised(config: RunConfig, task: Task, tokenizer: Any, rows: Rows) -> Encoded:
    """`task.encode` of these rows of the configuration's data; who gets them must not write to them."""
    length = config.model.max_length
    if config.model.name not in BUILTIN or not generated(config.data):
        return task.encode(tokenizer, rows, length)
    key = (config.model.name, repr(config.data), length, rows)
    if key not in _kept:
        _kept[key] = task.encode(tokenizer, rows, length)
    _kept.move_to_end(key)
    while len(_kept) > _SPLITS:
        _kept.popitem(last=False)
    return _kept[key]
