"""Examples for trials of a model that are nobody's: made up, or public.

A made-up example has random tokens of the model's vocabulary in the columns of a task's examples. Only the names of the
columns, and the form of a label (one number, one for each token, or several), are taken from an example of the data. A trial on
private examples would make one client's data decide how every client's gradients are computed, and so move bits that no noise
covers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secure_fed.learning.data.encode import IGNORED, per_token
from secure_fed.learning.tasks.item_extras import ASIDE, PARTS
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.kinds import Kinds, Padded, length
from secure_fed.learning.training.local import Placed, losses, seeded
from secure_fed.learning.training.objective import CANNOT, Objective


def of_kind(objective: Objective, kinds: Kinds, placed: Placed, kind: Hashable, pattern: Any, count: int) -> list[Any]:
    """`count` examples of a kind; [] if they can neither be made up nor found among the public ones.

    pattern: an example, for its columns.
    """
    items = made_up(kinds, kind, objective.model, pattern, count)
    if not items or not _takes(objective, kinds.collate, placed, [max(items, key=length)]):
        items = [item for item in objective.public[:_LOOKED_AT] if kinds(item) == kind]
    return varied(items, count) if items else []


def short(objective: Objective, collate: Collate, placed: Placed, pattern: Any, count: int) -> list[Any]:
    """Short texts of different lengths in the columns of `pattern`, or else public examples of any kind; [] without any."""
    kinds = Kinds.of(objective, collate)
    tried = map(kinds.padded, _SHORT) if hasattr(collate, "padded_to") else [kinds(pattern)]
    found = (of_kind(objective, kinds, placed, kind, pattern, count) for kind in tried)
    return next(filter(None, found), None) or list(objective.public[:_LOOKED_AT])


def made_up(kinds: Kinds, kind: Hashable, model: nn.Module, pattern: Any, count: int) -> list[dict[str, Any]]:
    """`count` made-up examples of a kind, in the columns of `pattern`; [] if the kind is not `Padded` or has no vocabulary.

    Their lengths are spread over the lengths of the kind, their tokens are random, and labels are 0 and 1.
    """
    words = _vocabulary(model)
    if not isinstance(kind, Padded) or words is None or not isinstance(pattern, Mapping):
        return []
    rng = np.random.default_rng(0)
    shortest, longest = (kind.width, kind.width) if kind.full else (min(kind.above + 1, kind.work - 1), kind.work - 1)
    lengths = rng.permutation(np.linspace(max(2, shortest), max(2, longest), count).round().astype(int))
    tokenwise = getattr(getattr(kinds.collate, "plain", kinds.collate), "labels", None) is per_token
    made = []
    for number, tokens in enumerate(map(int, lengths)):
        item: dict[str, Any] = {"input_ids": rng.integers(0, words, tokens)}
        for name, value in pattern.items():
            if name in ("labels", "label"):
                item[name] = _label(value, number, tokens, rng, tokenwise=tokenwise)
            elif name not in ("input_ids", ASIDE, PARTS):
                item[name] = np.full(tokens, int(name == "attention_mask"))
        made.append(item)
    return made


def varied(items: Sequence[Any], count: int) -> list[Any]:
    """`count` examples made from fewer: the items, and copies of them with their floating-point numbers in another order."""
    return [_rolled(items[i % len(items)], i // len(items)) for i in range(count)]


def _takes(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> bool:
    """Whether the model computes finite losses of these examples."""
    try:
        with torch.no_grad(), seeded(objective.device, np.random.default_rng(0)), objective.holding(placed.tensors):
            return bool(losses(objective, collate, items).isfinite().all())
    except CANNOT:
        return False


def _rolled(item: Any, by: int) -> Any:
    if by == 0:
        return item
    if isinstance(item, Mapping):
        return {name: value if "mask" in str(name) else _rolled(value, by) for name, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_rolled(value, by) for value in item)
    if isinstance(item, Tensor) and item.ndim and item.is_floating_point():
        return item.roll(by, -1)
    if isinstance(item, np.ndarray) and item.ndim and item.dtype.kind == "f":
        return np.roll(item, by, -1)
    return item


def _vocabulary(model: nn.Module) -> int | None:
    """The number of tokens that the model embeds; None if unknown."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    except (NotImplementedError, AttributeError, TypeError):
        return None
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _label(like: Any, number: int, tokens: int, rng: np.random.Generator, *, tokenwise: bool) -> Any:
    """A label of zeros and ones in the form of `like`; of labels for tokens, every third is `IGNORED`."""
    if tokenwise:
        labels = rng.integers(0, 2, tokens)
        labels[2::3] = IGNORED
        return labels
    shape, kind = np.shape(like), np.asarray(like).dtype.kind
    bits = (number + np.arange(int(np.prod(shape)))) % 2
    if kind in "iu" and shape == (2,) and isinstance(like, tuple):  # the first and the last token of an answer
        return (0, min(1, tokens - 1))
    filled = bits.reshape(shape).astype(float if kind == "f" else int)
    return filled if shape else filled.item()


_LOOKED_AT = 512
_SHORT = (12, 6)  # tokens: of a text of two tokens, some gradients are rounding alone
