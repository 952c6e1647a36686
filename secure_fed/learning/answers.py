"""Answers to test rows: a model writes them, and they are compared with the rows' references (`evaluation.generate`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import nn

from secure_fed.config import DataConfig, RunConfig
from secure_fed.errors import DataError, ModelError
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.generation import generated, prompt_room
from secure_fed.learning.tasks.agreement import agreement, picked
from secure_fed.learning.tasks.task import Task, Writes

_SETTING = "evaluation.max_new_tokens"


def answers(task: Writes, model: nn.Module, tokenizer: Any, rows: Rows, length: int, new: int, **how: Any) -> list[str]:
    """The text that the model writes after each row's prompt of at most `length` tokens, without special tokens.

    new: the most tokens of an answer. how: further arguments of `generated`.
    """
    prompts = task.prompts(tokenizer, rows, length)
    written = generated(model, prompts, new, stops=task.stops(tokenizer), **how)
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in written]


@dataclass(frozen=True)
class Asked:
    """The test rows that are answered in a measured round."""

    task: Writes
    rows: Rows
    config: RunConfig

    def room(self, model: nn.Module) -> int:
        """The most tokens of a prompt; ConfigError if answers leave no room for any."""
        return prompt_room(model, self.config.model.max_length, self.config.evaluation.max_new_tokens, _SETTING)

    def measured(self, model: nn.Module, tokenizer: Any) -> dict[str, float]:
        """The mean over the rows of `data.metric`, by its name; not-a-number for a model whose scores are not finite."""
        data, settings = self.config.data, self.config.evaluation
        agrees = agreement(data.metric, data.answer_pattern)
        most = settings.max_new_tokens
        try:
            found = answers(
                self.task, model, tokenizer, self.rows, self.room(model), most, batch_size=settings.batch_size
            )
        except ModelError:
            return {data.metric: math.nan}
        return {data.metric: float(np.mean(list(map(agrees, found, self.task.references(self.rows)))))}


def asked(config: RunConfig, task: Task, test: Rows) -> Asked | None:
    """The rows of `evaluation.generate`, spread evenly over the test set; None if it is 0.

    DataError if `data.answer_pattern` matches in none of the test set's references.
    """
    count = min(config.evaluation.generate, len(test))
    if not count:
        return None
    writes = cast(Writes, task)  # other tasks are refused with evaluation.generate
    _require_matches(config.data, writes.references(test))
    return Asked(writes, test.take(index * len(test) // count for index in range(count)), config)


def _require_matches(data: DataConfig, references: Sequence[str]) -> None:
    if all(picked(text, data.answer_pattern) is None for text in references):
        raise DataError(
            f"data.answer_pattern is {data.answer_pattern!r}, which matches in none of the {len(references)} test rows' "
            "targets, so no answer could be right: correct it"
        ).about("data.answer_pattern", data.answer_pattern, "a pattern that matches in the targets")
