"""How much of a client's texts was recovered.

What counts are distinct pairs of position and token, special and padding tokens left out: these are in every text, and
recovering them tells nothing. In a model whose first inputs have no position, what counts are tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks.first_layer import FirstLayer
from attacks.span import Key


@dataclass(frozen=True)
class Score:
    """recall: of the true pairs, the share that was found; precision: of what was found, the share that is true (None
    where nothing was found). bag_recall: of the distinct tokens, wherever they stand.
    """

    recall: float
    precision: float | None
    bag_recall: float
    bag_precision: float | None
    true: int
    found: int


def score(found: Collection[Key], truth: Collection[Key], special: Collection[int]) -> Score:
    """Of pairs without special tokens; a batch without any others scores zero."""
    claimed = {key for key in found if key[1] not in special}
    true = {key for key in truth if key[1] not in special}
    hits, words, named = len(claimed & true), {token for _, token in true}, {token for _, token in claimed}
    return Score(
        hits / len(true) if true else 0.0,
        hits / len(claimed) if claimed else None,
        len(named & words) / len(words) if words else 0.0,
        len(named & words) / len(named) if named else None,
        len(true),
        len(claimed),
    )


def texts_of(examples: Iterable[Any]) -> list[list[int]] | None:
    """The token ids of every example; None where they are not one text each."""
    texts = []
    for example in examples:
        ids = np.asarray(example["input_ids"]) if isinstance(example, Mapping) and "input_ids" in example else None
        if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
            return None
        texts.append([int(token) for token in ids])
    return texts


def truth_of(texts: Iterable[Sequence[int]], first: FirstLayer) -> set[Key]:
    """What there is to recover in these texts."""
    return {first.key(place, token) for text in texts for place, token in enumerate(text)}


def known_tokens(texts: Sequence[Sequence[int]], first: FirstLayer) -> list[Key]:
    """Tokens that begin every public text, such as [CLS]: in every client's batch for certain."""
    starts = {text[0] for text in texts if text}
    return [(0, starts.pop())] if len(starts) == 1 and first.placed else []
