"""Examples as token ids, and token ids as padded mini-batches.

Each example is tokenised once (`encode`; `aligned` where the places of tokens in a text are needed). A batch is padded to its
own longest example (`Collate`, `Aside`), and examples of like length share a batch (`batches`), so little of the arithmetic is
spent on padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from secure_fed.errors import ConfigError, DataError, ModelError
from secure_fed.learning.data.on_disk import OnDisk, taken
from secure_fed.learning.data.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Item = Mapping[str, Any]
TOKENISED_AT_ONCE = 2048
IGNORED = -100  # the label of a token that has none
ASIDE, PARTS = "aside", "parts"  # the names of an item's extras, see `Aside`
_SORTED_BATCHES = 16  # shuffled items are sorted by length within windows of this many batches
_MOST_WORDS = 1 << 20  # whose ids are kept
_LOCAL = (BertNormalizer, BertPreTokenizer, WordPiece)
_PROBE = "a"


@dataclass(frozen=True, slots=True, eq=False)
class Encoded(Sequence[Item]):
    """Tokenised examples as columns of one length: item i has the i-th entry of each.

    A column is a list, a tuple, or `OnDisk`, whose arrays are read-only.

    Every example has "input_ids", an int array, and "labels". If the tokenizer returns it, "token_type_ids" distinguishes the
    two texts of a pair; a task may add columns of its own.
    """

    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.input_ids)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Encoded: ...
    def __getitem__(self, index: int | slice) -> Item | Encoded:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        return {name: column[index] for name, column in self.columns.items()}

    @property
    def input_ids(self) -> Sequence[NDArray[np.int32]]:
        return self.columns["input_ids"]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each example."""
        ids = self.input_ids
        return ids.lengths if isinstance(ids, OnDisk) else np.fromiter(map(len, ids), dtype=np.int64, count=len(self))

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> Encoded:
        """The examples at `indices`, in that order; token ids are shared, not copied."""
        return Encoded({name: taken(column, indices) for name, column in self.columns.items()})


def encode(tokenizer: PreTrainedTokenizerBase, rows: Rows, max_length: int) -> Encoded:
    """Tokenise every example once, cut to at most `max_length` tokens, special tokens included; `rows.label` is not changed.

    Of a pair the longer text is cut first. An example without a single token (a blank text, under a tokenizer
    that adds no special tokens) becomes one padding token, because a model cannot read an empty sequence.
    """
    require_room(tokenizer, max_length, pair=rows.text_b is not None)
    blank = pad_id(tokenizer)
    columns: dict[str, list[NDArray[np.int32]]] = {"input_ids": [], "token_type_ids": []}
    words = Words.of(tokenizer) if rows.text_b is None else None
    for start in range(0, len(rows), TOKENISED_AT_ONCE):
        window = slice(start, start + TOKENISED_AT_ONCE)
        tokens = _tokens(tokenizer, words, rows, window, max_length)
        for name, column in columns.items():
            fill = blank if name == "input_ids" else 0
            column.extend(np.asarray(ids or [fill], dtype=np.int32) for ids in tokens.get(name, ()))
    made = {name: tuple(column) for name, column in columns.items() if column or name == "input_ids"}
    return Encoded(made | {"labels": rows.label})


def _tokens(
    tokenizer: PreTrainedTokenizerBase, words: Words | None, rows: Rows, window: slice, max_length: int
) -> Mapping[str, Sequence[Sequence[int]]]:
    """Lists of ids by name, one for each example of the window."""
    texts = list(rows.text[window])
    if words is not None:
        ids = words.encoded(texts, max_length)
        types = [[0] * len(each) for each in ids] if "token_type_ids" in tokenizer.model_input_names else []
        return {"input_ids": ids, "token_type_ids": types}
    literal = _end_as_text(tokenizer)
    first = list(map(literal, texts))
    second = None if rows.text_b is None else list(map(literal, rows.text_b[window]))
    found: Any = tokenizer(first, second, truncation=True, max_length=max_length)
    return {str(name): value for name, value in found.items()}


def _end_as_text(tokenizer: Any) -> Callable[[str], str]:
    """A function that turns an end token in a text, such as "</s>", into plain text, if the tokenizer ends texts with it.

    BART and T5 read their scores at the end token, and refuse batches with several of them in a text.
    """
    end, ids = tokenizer.eos_token, tokenizer("")["input_ids"]
    if end is None or ids[-1:] != [tokenizer.eos_token_id]:
        return lambda text: text
    return lambda text: text.replace(end, f"{end[:1]} {end[1:]}")


def require_room(tokenizer: PreTrainedTokenizerBase, max_length: int, *, pair: bool) -> None:
    """ConfigError if `max_length` leaves no token for text."""
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length <= special:
        raise ConfigError(
            f"model.max_length is {max_length}, and {special} of these tokens are the tokenizer's own; "
            f"set model.max_length to at least {special + 1}"
        )


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's padding token; a tokenizer without one is refused, because any other id would be a guess."""
    found = tokenizer.pad_token_id
    if not isinstance(found, int):
        raise ModelError(
            f"the tokenizer of model.name {tokenizer.name_or_path!r} has no padding token; "
            f"set its pad_token (its end-of-text token usually serves) or choose another model.name"
        )
    return found


@dataclass
class Words:
    """Token ids of texts, for a tokenizer that reads one word at a time: every different word is tokenised once.

    A BERT tokenizer cleans a text, divides it at spaces and punctuation, and looks each word up by itself; no step crosses a
    space. So the ids of a text are the ids of its parts between spaces, one after the other, and texts repeat their words.

    ids: of the words so far. before, after: the tokenizer's special tokens around a text.
    """

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
        if len(self.ids) > _MOST_WORDS:
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


class Aligned(NamedTuple):
    """A text as tokens.

    ids:   (tokens,) with the tokenizer's special tokens
    spans: (tokens, 2), each token's first character and the one after its last; special tokens have empty spans
    """

    ids: NDArray[np.int32]
    spans: NDArray[np.int64]


def aligned(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool = True) -> Iterator[Aligned]:
    """The tokens of the texts with their places, one text after the other, uncut. Only a fast tokenizer reports places."""
    require_fast(tokenizer)
    for start in range(0, len(texts), TOKENISED_AT_ONCE):
        window = list(texts[start : start + TOKENISED_AT_ONCE])
        found = tokenizer(window, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        for ids, offsets in zip(found["input_ids"], found["offset_mapping"], strict=True):
            yield Aligned(np.asarray(ids, dtype=np.int32), np.asarray(offsets, dtype=np.int64).reshape(-1, 2))


def require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that does not report the places of its tokens."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer of model.name {tokenizer.name_or_path!r} is not a fast one, and cannot say where in a text its "
            "tokens stand; choose a model with a tokenizer.json"
        )


def whole_numbers(items: Sequence[Item], name: str, width: int) -> torch.Tensor:
    """(batch,): one whole number for each item, such as a class."""
    return torch.from_numpy(np.stack(_column(items, name, [()] * len(items))).astype(np.int64))


@dataclass(frozen=True, slots=True)
class Collate:
    """Items of `Encoded`, or like them, as tensors.

    Columns with one entry for each token are padded on the right to the longest of the batch: (batch, longest), `input_ids`
    with `pad_id` and the rest with 0. Without an `attention_mask` of their own, no token of the items is masked. `labels`, or
    `label`, becomes `labels(items, name, longest)`, usually one whole number for each item: (batch,). Any other column is
    refused, since no model would use it.

    width: the least number of tokens to which a batch is padded.
    """

    pad_id: int
    labels: Callable[[Sequence[Item], str, int], torch.Tensor] = whole_numbers
    width: int = 0

    def padded_to(self, width: int) -> Collate:
        """The same, for batches of at least `width` tokens."""
        return replace(self, width=width)

    def __call__(self, items: Sequence[Item]) -> dict[str, torch.Tensor]:
        lengths = np.array([len(item["input_ids"]) for item in items])
        real = np.arange(max(int(lengths.max()), self.width)) < lengths[:, None]  # (B, L)
        names = dict.fromkeys(name for item in items for name in item)
        label = "labels" if "labels" in names else "label"
        batch = {
            "attention_mask": torch.from_numpy(real.astype(np.int64)),
            "labels": self.labels(items, label, real.shape[1]),
        }
        for name in names:
            if name != label:
                batch[name] = _padded(items, name, self.pad_id if name == "input_ids" else 0, real)
        return batch


def numbers(items: Sequence[Item], name: str, width: int) -> torch.Tensor:
    """float32: one number for each item, (batch,), or equally many for each, (batch, numbers)."""
    return torch.from_numpy(np.stack([np.asarray(item[name], dtype=np.float32) for item in items]))


def per_token(items: Sequence[Item], name: str, width: int) -> torch.Tensor:
    """(batch, width): one whole number for each token, `IGNORED` after the last."""
    matrix = np.full((len(items), width), IGNORED, dtype=np.int64)
    for row, labels in zip(matrix, _column(items, name, [(len(item["input_ids"]),) for item in items]), strict=True):
        row[: len(labels)] = labels
    return torch.from_numpy(matrix)


def _padded(items: Sequence[Item], name: str, fill: int, real: NDArray[np.bool_]) -> torch.Tensor:
    entries = np.concatenate(_column(items, name, [(count,) for count in real.sum(1)]))
    matrix = np.full(real.shape, fill, dtype=np.float32 if entries.dtype.kind == "f" else np.int64)
    matrix[real] = entries
    return torch.from_numpy(matrix)


def _column(items: Sequence[Item], name: str, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    """The items' values of this name, as numbers in these shapes: () for a label, (tokens,) for all others."""
    kinds = "biuf" if shapes[0] and name != "input_ids" else "biu"
    values = []
    for item, shape in zip(items, shapes, strict=True):
        try:
            values.append(np.asarray(item[name]))
        except (KeyError, TypeError, ValueError) as error:
            raise _refused(name) from error
        if values[-1].shape != shape or values[-1].dtype.kind not in kinds:
            raise _refused(name)
    return values


def _refused(name: str) -> DataError:
    wanted = "one whole number" if name in ("labels", "label") else "one number a token"
    return DataError(
        f"{name!r} is not {wanted} in every item; make it so, drop it, or give Federation a collate= of yours"
    )


@dataclass(frozen=True, slots=True)
class Aside:
    """The collate of items that contain more than the model's inputs: asides as a list, and all parts as a batch of their own.

    `aside` is the information on an example that metrics and answers need. `parts` are the sequences for its evaluation, beside
    the sequence that it trains on: windows of a long text, or the choices of a question. They stay inside their example's item,
    because example-level privacy protects an item, and a part alone is not an example. `counts` (batch,) is the number of each
    item's parts.
    """

    plain: Collate

    def padded_to(self, width: int) -> Aside:
        """The same, for batches of at least `width` tokens."""
        return Aside(self.plain.padded_to(width))

    def __call__(self, items: Sequence[Item]) -> dict[str, Any]:
        read = [{name: value for name, value in item.items() if name not in (ASIDE, PARTS)} for item in items]
        batch: dict[str, Any] = dict(self.plain(read))
        if ASIDE in items[0]:
            batch[ASIDE] = [item[ASIDE] for item in items]
        if PARTS in items[0]:
            batch[PARTS] = self.plain([part for item in items for part in item[PARTS]])
            batch["counts"] = torch.tensor([len(item[PARTS]) for item in items])
        return batch


def without_aside(item: Any) -> Any:
    """What a model may train on of an item: items that differ in their asides alone train alike."""
    return {name: value for name, value in item.items() if name != ASIDE} if isinstance(item, Mapping) else item


class Batch(NamedTuple):
    """A mini-batch: `inputs` is the result of `collate` for the items at `indices`."""

    indices: NDArray[np.int64]
    inputs: Any


def batches(
    items: Sequence[Any], batch_size: int, collate: Callable[[list[Any]], Any], rng: np.random.Generator | None
) -> Iterator[Batch]:
    """One pass over `items` in mini-batches of `batch_size`, one perhaps smaller; each item is in one.

    With `rng` the pass is shuffled, yet items of similar length share a batch: shuffle, sort by length within
    windows of a few batches, shuffle the batches. Without `rng` the order is fixed, by length. `items` may be any
    sequence; lengths are used for `Encoded` and for a list or tuple of mappings with "input_ids" only.
    """
    lengths = _lengths(items)
    order = np.arange(len(items)) if rng is None else rng.permutation(len(items))
    if lengths is not None:
        window = len(items) if rng is None else batch_size * _SORTED_BATCHES
        order = order[np.lexsort((lengths[order], np.arange(len(items)) // max(1, window)))]
    plan = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if rng is not None:
        plan = [plan[i] for i in rng.permutation(len(plan))]
    return (Batch(chosen, collate([items[int(i)] for i in chosen])) for chosen in plan)


def _lengths(items: Sequence[Any]) -> NDArray[np.int64] | None:
    if isinstance(items, Encoded):
        return items.lengths
    if not isinstance(items, list | tuple):
        return None
    if not all(isinstance(item, Mapping) and "input_ids" in item for item in items):
        return None
    return np.array([len(item["input_ids"]) for item in items], dtype=np.int64)
