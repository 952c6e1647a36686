"""Token ids of texts, for tokenizers that read one word at a time: every different word is tokenised once.

A BERT tokenizer cleans a text, divides it at spaces and punctuation, and looks each word up by itself; no step crosses a space.
So the ids of a text are the ids of its parts between spaces, one after the other, and texts repeat their words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEPT = 1 << 20  # words


@dataclass
class Words:
    """The ids of the words so far. before, after: the tokenizer's special tokens around a text."""

    tokenizer: PreTrainedTokenizerBase
    before: list[int]
    after: list[int]
    ids: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Words | None:
        """None for a tokenizer that may look at more than one word."""
        kept = _kept.get()
        if kept is None:
            return cls._made(tokenizer)
        if id(tokenizer) not in kept:
            kept[id(tokenizer)] = cls._made(tokenizer)
        return kept[id(tokenizer)]

    @classmethod
    def _made(cls, tokenizer: PreTrainedTokenizerBase) -> Words | None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = [getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "model")]
        known = all(isinstance(part, kind) for part, kind in zip(parts, _LOCAL, strict=True))
        if (
            not known
            or tokenizer.truncation_side != "right"
            or any(" " in added for added in tokenizer.get_added_vocab())
        ):
            return None
        bare, whole = (tokenizer(_PROBE, add_special_tokens=some)["input_ids"] for some in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return cls(tokenizer, whole[:start], whole[start + len(bare) :])
        return None

    def encoded(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """As the tokenizer encodes each text, cut to at most `max_length` tokens."""
        parts = [text.split(" ") for text in texts]
        if len(self.ids) > _KEPT:
            self.ids.clear()
        if new := list(dict.fromkeys(word for word in chain.from_iterable(parts) if word not in self.ids)):
            found = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            self.ids.update(zip(new, found, strict=True))
        most, known = max_length - len(self.before) - len(self.after), self.ids
        return [
            [*self.before, *list(chain.from_iterable([known[word] for word in each]))[:most], *self.after]
            for each in parts
        ]


_kept: ContextVar[dict[int, Words | None] | None] = ContextVar("kept words", default=None)


@contextmanager
def words_kept() -> Iterator[None]:
    """Within the block words are kept from one call to the next, so no tokenizer may change."""
    outer = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(outer)


_LOCAL = (BertNormalizer, BertPreTokenizer, WordPiece)
_PROBE = "a"
