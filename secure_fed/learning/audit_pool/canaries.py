"""Audited units made conspicuous, so that an audit of one run sees more (`evaluation.canaries`).

    mislabelled   every example of the unit gets a wrong label, drawn uniformly from the other classes
    rare_token    a rare token, or a few, that no other unit has, in place of tokens of every example of the unit; all of them
                  get one label, drawn for the unit. In language modelling the tokens alone are replaced (`rare_tokens`).
    direction     the unit pulls the model along a random direction of its own (`canary_directions`)

They are planted in the whole audit pool, before the coins remove non-members: members and non-members differ in nothing else.
After that they are treated like all other units. The canary comes from a hash of the unit's name under the seed, so a resumed
run and an audit find the same. It reveals nothing of the coins, which come from another hash.

The guarantee of a run with canaries is for the data with planted canaries. A unit's tokens also depend on the other units in
the pool, since no two units may get the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.data.audit_unit import Pointing, Unit
from secure_fed.learning.problem import Problem
from secure_fed.learning.tasks.chat import template_tokens

_CLIP_NORMS = 30.0
_ADAPTS = 0.2  # the rate of `privacy.mechanisms.AdaptiveGaussian`
Ids = NDArray[Any]
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class CanaryContext:
    """Facts about a run's data that decide which canaries can be planted.

    unit: the kind of unit in the pool: "example", "person" or "client". private: whether privacy.unit protects it. classes: the
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
            ).about("evaluation.canaries", kind, "a classification task")
        return self.classes


def planted(kind: str, units: Sequence[Unit], context: CanaryContext) -> tuple[Unit, ...]:
    """The units with their canaries, members and non-members alike; ConfigError if this kind cannot be planted."""
    changed: Callable[[Unit], list[Any]]
    if kind == "none" or (kind == "direction" and context.unit == "client"):
        return tuple(units)
    if kind == "mislabelled":
        changed = partial(_mislabelled, classes=context.labels(kind), seed=context.seed)
    elif kind == "rare_token":
        tokens = rare_tokens([unit.name for unit in units], context)

        def changed(unit: Unit) -> list[Any]:
            items = [mapping(kind, unit.examples[i]) for i in range(len(unit.examples))]
            return [with_token(item, i, unit.name, tokens[unit.name], context) for i, item in enumerate(items)]
    else:
        changed = partial(_pointing, context=context)
    return tuple(replace(unit, examples=changed(unit)) for unit in units)


def _mislabelled(unit: Unit, classes: int, seed: int) -> list[Any]:
    """Label y becomes (y + s) mod classes, s uniform over 1 .. classes - 1 for each example."""
    made = []
    for i in range(len(unit.examples)):
        item: Mapping[str, Any] = mapping("mislabelled", unit.examples[i])
        name, label = label_of(item, classes)
        made.append({**item, name: (label + 1 + draw(classes - 1, seed, "label", unit.name, i)) % classes})
    return made


def _pointing(unit: Unit, context: CanaryContext) -> list[Any]:
    if not context.private:
        raise ConfigError(
            "evaluation.canaries = 'direction' replaces gradients of single examples, which are made only with privacy.unit = "
            "'example' or 'person'; set evaluation.canaries to 'mislabelled' or 'rare_token', or privacy.unit"
        ).about("evaluation.canaries", "direction", "privacy.unit = 'example' or 'person'")
    return [Pointing(unit.examples[i], unit.name, context.seed) for i in range(len(unit.examples))]


def length_beyond_clipping(config: RunConfig) -> float | None:
    """The length of a direction client's change (`canary_directions.trains_towards`), so long that it is always clipped.

    30 clip norms, since a method may send only a part of the trained tensors; no more, since with a method that sends products
    the square of the length would leave nothing to the rest. An adaptive clip norm multiplies it by its largest growth over all
    rounds, at most a million. None without client-level privacy: then nothing is clipped, and the client's change has the
    length of its local steps.
    """
    privacy = config.privacy
    if privacy.unit != "client":
        return None
    growth = 0.0 if privacy.clip_quantile is None else _ADAPTS * config.federation.rounds * privacy.clip_quantile
    return _CLIP_NORMS * privacy.clip * math.exp(min(growth, math.log(1e6)))


def rare_tokens(names: Sequence[str], context: CanaryContext) -> dict[str, Tokens]:
    """Different tokens for every unit: one each if there are twice as many tokens as units, otherwise a few.

    They are from the later half of the ordinary ids, where vocabularies usually have rare tokens. A unit's hash chooses its
    tokens, unless a unit whose name sorts before it has them; then it takes the next choice.
    """
    ordinary = [token for token in range(context.vocabulary or 0) if token not in context.special]
    rare = ordinary[len(ordinary) // 2 :]
    if len(rare) < 2:
        raise ConfigError(
            f"evaluation.canaries = 'rare_token' needs a vocabulary, and the model's has {len(ordinary)} ordinary tokens that "
            "are known; set it to 'mislabelled', or to 'none'"
        ).about("evaluation.canaries", "rare_token", "a vocabulary")
    several = next(count for count in range(1, 65) if len(rare) ** count >= 2 * len(names))
    chosen: dict[str, Tokens] = {}
    taken: set[Tokens] = set()
    for name in sorted(names):
        for attempt in itertools.count():
            lots = (draw(len(rare), context.seed, "token", name, attempt, i) for i in range(several))
            if (tokens := tuple(rare[lot] for lot in lots)) not in taken:
                break
        chosen[name] = tokens
        taken.add(tokens)
    return chosen


def with_token(
    item: Mapping[str, Any], number: int, unit: str, tokens: Tokens, context: CanaryContext
) -> dict[str, Any]:
    """Example `number` of a unit with the tokens, in their order, at random places; with too few places for them its text is
    unchanged. Special tokens, padding, and tokens that a language model does not learn are not replaced.
    """
    given: Any = item.get("input_ids")
    if np.ndim(given) != 1:
        raise ConfigError(
            "evaluation.canaries = 'rare_token' puts a token into texts, and an example has no 'input_ids', or they are not "
            "one sequence; set it to 'mislabelled', or to 'none'"
        ).about("evaluation.canaries", "rare_token", "texts")
    ids = np.array(given)
    free = ~np.isin(ids, sorted(context.special)) & (np.asarray(item.get("attention_mask", np.ones(len(ids)))) != 0)
    if context.classes is not None:
        name, _ = label_of(item, context.labels("rare_token"))
        _put(ids, free, tokens, context.seed, unit, number)
        return {**item, "input_ids": ids, name: draw(context.classes, context.seed, "label of all", unit)}
    name, learned = _learned(item, ids)
    _put(ids, free & learned, tokens, context.seed, unit, number)
    labels = np.asarray(item[name])
    return {**item, "input_ids": ids, name: np.where(learned, ids, labels).astype(labels.dtype)}


def _learned(item: Mapping[str, Any], ids: Ids) -> tuple[str, NDArray[np.bool_]]:
    """The name of a text's labels, and a mask of the learned tokens: tokens that are their own labels."""
    name = label_name(item)
    labels = np.asarray(item[name])
    if labels.shape != ids.shape or not ((labels == ids) | (labels < 0)).all():
        raise ConfigError(
            "evaluation.canaries = 'rare_token' is for classification and language modelling, and an example has labels that "
            "are neither a class nor its own tokens; set it to 'none', or with privacy to 'direction'"
        ).about("evaluation.canaries", "rare_token", "labels that are a class or tokens")
    return name, np.asarray(labels == ids)


def _put(ids: Ids, free: NDArray[np.bool_], tokens: Tokens, seed: int, unit: str, number: int) -> None:
    """Put the tokens into a uniform subset of the free places."""
    places = np.flatnonzero(free)
    if len(places) >= len(tokens):
        lots = [draw(2**63, seed, "place", unit, number, i) for i in range(len(places))]
        ids[np.sort(places[np.argsort(lots)[: len(tokens)]])] = tokens


def mapping(kind: str, item: Any) -> Mapping[str, Any]:
    """The example, if its parts have names."""
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"evaluation.canaries = {kind!r} is for examples with named parts, but one example is a {type(item).__name__}; "
            "set it to 'none', or with privacy to 'direction'"
        ).about("evaluation.canaries", kind, "examples with named parts")
    return item


def label_of(item: Mapping[str, Any], classes: int) -> tuple[str, int]:
    """The name of an example's label, and the label: one whole number from 0 to classes - 1."""
    name = label_name(item)
    value = np.asarray(item[name])
    if value.shape != () or value.dtype.kind not in "iu" or not 0 <= int(value) < classes:
        raise ConfigError(
            f"evaluation.canaries gives examples other labels, and {item[name]!r:.40} is not one of 0 to {classes - 1}; set it "
            "to 'none', or give labels as whole numbers"
        ).about("evaluation.canaries", item[name], f"0 to {classes - 1}")
    return name, int(value)


def label_name(item: Mapping[str, Any]) -> str:
    """'labels' or 'label', the names that `Collate` uses."""
    name = next((name for name in ("labels", "label") if name in item), None)
    if name is None:
        raise ConfigError(
            "evaluation.canaries gives examples other labels, and one has no 'labels'; set it to 'none', or with privacy to "
            "'direction'"
        ).about("evaluation.canaries", None, "examples with labels")
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
