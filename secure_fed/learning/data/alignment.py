"""Tokens, and the place of each in the text, which only a fast tokenizer reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from secure_fed.errors import ModelError
from secure_fed.learning.data.encode import TOKENISED_AT_ONCE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


class Aligned(NamedTuple):
    """A text as tokens.

    ids:   (tokens,) with the tokenizer's special tokens
    spans: (tokens, 2), each token's first character and the one after its last; special tokens have empty spans
    """

    ids: NDArray[np.int32]
    spans: NDArray[np.int64]


def aligned(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = True) -> Iterator[Aligned]:
    """The tokens of the texts, one text after the other, uncut."""
    require_fast(tokenizer)
    for start in range(0, len(texts), TOKENISED_AT_ONCE):
        window = list(texts[start : start + TOKENISED_AT_ONCE])
        found = tokenizer(window, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        for ids, offsets in zip(found["input_ids"], found["offset_mapping"], strict=True):
            yield Aligned(np.asarray(ids, dtype=np.int32), np.asarray(offsets, dtype=np.int64).reshape(-1, 2))


def require_fast(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that does not report the places of its tokens."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer of model.name {tokenizer.name_or_path!r} is not a fast one, and cannot say where in a text its "
            "tokens stand; choose a model with a tokenizer.json"
        )
