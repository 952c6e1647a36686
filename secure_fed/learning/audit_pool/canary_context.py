"""The facts about a run's data that label and token canaries depend on, and their keyed draws."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.problem import Problem
from secure_fed.learning.tasks.chat_template import template_tokens


@dataclass(frozen=True)
class CanaryContext:
    """Facts about a run's data that decide which canaries can be planted.

    unit: the kind of unit in the pool: "example", "group" or "client". private: whether privacy.unit protects it. classes: the
    number of classes, None if examples have none. vocabulary: the number of token ids, None if unknown; special: ids with a
    meaning for the model, which are neither inserted nor replaced.
    """

    seed: int
    unit: str
    private: bool
    classes: int | None = None
    vocabulary: int | None = None
    special: frozenset[int] = frozenset()

    @classmethod
    def of(cls, config: RunConfig, problem: Problem, unit: str) -> CanaryContext:
        """The context of a run, as far as it follows from its settings and its model."""
        settings: Any = getattr(problem.model, "config", None)
        vocabulary: int | None
        if problem.tokenizer is not None:
            classes = len(problem.facts["label_names"]) if config.data.task == "classification" else None
            vocabulary, special = len(problem.tokenizer), frozenset(map(int, problem.tokenizer.all_special_ids))
            if config.data.task == "chat":
                special |= template_tokens(problem.tokenizer)
        else:
            classes = _classes_among(problem, getattr(settings, "num_labels", None))
            vocabulary = getattr(settings, "vocab_size", None)
            named = ("pad", "bos", "eos", "cls", "sep", "mask", "unk")
            found = (getattr(settings, f"{name}_token_id", None) for name in named)
            special = frozenset(token for token in found if isinstance(token, int))
        private = config.privacy.unit != "none"
        return cls(config.federation.seed, unit, private, classes, vocabulary, special)

    def labels(self, kind: str) -> int:
        """The number of classes; ConfigError if there are fewer than two."""
        if self.classes is None or self.classes < 2:
            raise ConfigError(
                f"evaluation.canaries = {kind!r} gives examples other labels, which needs a classification task with at "
                "least two classes; set it to 'none', or with privacy to 'direction'"
            )
        return self.classes


def mapping(kind: str, item: Any) -> Mapping[str, Any]:
    """The example, if its parts have names."""
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"evaluation.canaries = {kind!r} is for examples with named parts, but one example is a {type(item).__name__}; "
            "set it to 'none', or with privacy to 'direction'"
        )
    return item


def label_of(item: Mapping[str, Any], classes: int) -> tuple[str, int]:
    """The name of an example's label, and the label: one whole number from 0 to classes - 1."""
    name = label_name(item)
    value = np.asarray(item[name])
    if value.shape != () or value.dtype.kind not in "iu" or not 0 <= int(value) < classes:
        raise ConfigError(
            f"evaluation.canaries gives examples other labels, and {item[name]!r:.40} is not one of 0 to {classes - 1}; set it "
            "to 'none', or give labels as whole numbers"
        )
    return name, int(value)


def label_name(item: Mapping[str, Any]) -> str:
    """'labels' or 'label', the names that `Collate` uses."""
    name = next((name for name in ("labels", "label") if name in item), None)
    if name is None:
        raise ConfigError(
            "evaluation.canaries gives examples other labels, and one has no 'labels'; set it to 'none', or with privacy to "
            "'direction'"
        )
    return name


def draw(choices: int, seed: int, *said: str | int) -> int:
    """One of 0 .. choices - 1, determined by the arguments, uniform over `said` to within choices / 2^128."""
    digest = hashlib.sha256(json.dumps(["canary", seed, *said]).encode()).digest()
    return int.from_bytes(digest[:16], "big") % choices


def _classes_among(problem: Problem, known: int | None) -> int | None:
    """The model's number of classes, or else the number in the clients' labels; None if labels are no classes."""
    largest = -1
    for own in problem.train:
        for i in range(len(own)):
            item = own[i]
            label: Any = item.get("labels", item.get("label")) if isinstance(item, Mapping) else None
            if np.shape(label) != () or np.asarray(label).dtype.kind not in "iu":
                return None
            largest = max(largest, int(np.asarray(label)))
    return known or largest + 1
