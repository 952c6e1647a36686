"""Rare tokens as canaries: the choice of each unit's tokens, and their places in its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.canary_context import CanaryContext, draw, label_name, label_of

Ids = NDArray[Any]
Tokens = tuple[int, ...]


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
        )
    several = next(count for count in range(1, 65) if len(rare) ** count >= 2 * len(names))
    chosen: dict[str, Tokens] = {}
    taken: set[Tokens] = set()
    for name in sorted(names):
        attempt = 0
        while (tokens := _tokens(rare, several, context.seed, name, attempt)) in taken:
            attempt += 1
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
        )
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


def _tokens(rare: Sequence[int], several: int, seed: int, name: str, attempt: int) -> Tokens:
    return tuple(rare[draw(len(rare), seed, "token", name, attempt, i)] for i in range(several))


def _learned(item: Mapping[str, Any], ids: Ids) -> tuple[str, NDArray[np.bool_]]:
    """The name of a text's labels, and a mask of the learned tokens: tokens that are their own labels."""
    name = label_name(item)
    labels = np.asarray(item[name])
    if labels.shape != ids.shape or not ((labels == ids) | (labels < 0)).all():
        raise ConfigError(
            "evaluation.canaries = 'rare_token' is for classification and language modelling, and an example has labels that "
            "are neither a class nor its own tokens; set it to 'none', or with privacy to 'direction'"
        )
    return name, np.asarray(labels == ids)


def _put(ids: Ids, free: NDArray[np.bool_], tokens: Tokens, seed: int, unit: str, number: int) -> None:
    """Put the tokens into a uniform subset of the free places."""
    places = np.flatnonzero(free)
    if len(places) >= len(tokens):
        lots = [draw(2**63, seed, "place", unit, number, i) for i in range(len(places))]
        ids[np.sort(places[np.argsort(lots)[: len(tokens)]])] = tokens
