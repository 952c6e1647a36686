"""Examples as token ids and mini-batches; tokenising each distinct word only once, compared with the tokenizer itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from tokenizers.models import WordLevel, WordPiece
from tokenizers.normalizers import BertNormalizer, Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from secure_fed.errors import ConfigError, DataError, ModelError
from secure_fed.learning.data.encode import Batch, Collate, Encoded, Words, batches, encode, pad_id
from secure_fed.learning.data.rows import Rows
from tests.cells import every
from tests.golden import refused

WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3} | {f"w{i}": i + 4 for i in range(30)}


def tokenizer(*, special: bool = True, pad: str | None = "[PAD]") -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    if special:
        words.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token=pad, model_input_names=names)


def sentences(lengths: Sequence[int]) -> Rows:
    text = tuple(" ".join(f"w{j % 30}" for j in range(length)) for length in lengths)
    return Rows(text, tuple(i % 2 for i in range(len(text))), ("no", "yes"))


@pytest.fixture
def encoded() -> Encoded:
    lengths = np.random.default_rng(0).integers(1, 40, 333).tolist()
    return encode(tokenizer(), sentences(lengths), max_length=64)


def test_encode_gives_ids_and_labels_in_order_and_cuts_texts_at_max_length() -> None:
    items = encode(tokenizer(), Rows(("w0 w5", "never"), (1, 0), ("a", "b")), max_length=8)
    assert [item["input_ids"].tolist() for item in items] == [[2, 4, 9, 3], [2, 1, 3]]
    assert [item["labels"] for item in items] == [1, 0]
    assert items.lengths.tolist() == [4, 3]
    lengths = [i % 7 + 1 for i in range(5000)]
    items = encode(tokenizer(), sentences(lengths), max_length=16)
    assert items.lengths.tolist() == [length + 2 for length in lengths]
    (item,) = encode(tokenizer(), sentences([20]), max_length=5)
    assert item["input_ids"].tolist() == [2, 4, 5, 6, 3]
    rows = Rows(("", "w0"), (0, 1), ("a", "b"))
    assert [i["input_ids"].tolist() for i in encode(tokenizer(special=False), rows, 8)] == [[0], [4]]


def test_pairs_are_told_apart_by_token_types() -> None:
    rows = Rows(("w0 w1", "w2"), (0, 1), ("a", "b"), text_b=("w3", "w4 w5 w6 w7 w8 w9"))
    pair, cut = encode(tokenizer(), rows, max_length=7)
    assert pair["input_ids"].tolist() == [2, 4, 5, 3, 7, 3]
    assert pair["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    assert len(cut["input_ids"]) == 7
    batch = Collate(pad_id=0)([pair, cut])
    assert batch["token_type_ids"].shape == (2, 7)
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 0]


def test_take_and_slice_pick_examples(encoded: Encoded) -> None:
    taken = encoded.take(np.array([5, 2]))
    assert len(taken) == 2
    assert taken[0]["input_ids"].tolist() == encoded[5]["input_ids"].tolist()
    assert taken[1]["labels"] == encoded[2]["labels"]
    assert encoded[1:3].lengths.tolist() == encoded.lengths[1:3].tolist()
    assert encoded[-1]["input_ids"].tolist() == encoded[332]["input_ids"].tolist()


def test_collate_pads_to_the_longest_of_the_batch_only() -> None:
    items = encode(tokenizer(), sentences([1, 3]), max_length=64)
    batch = Collate(pad_id=9)(list(items))
    assert batch["input_ids"].tolist() == [[2, 4, 3, 9, 9], [2, 4, 5, 6, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [0, 1]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_collate_keeps_what_items_of_the_users_own_say() -> None:
    first = {"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1], "label": 1, "position_ids": [2, 3, 4]}
    second = {"input_ids": torch.tensor([8]), "attention_mask": [1], "label": np.int64(0), "position_ids": [9]}
    batch = Collate(pad_id=9)([first | {"weight": [0.5, 1, 2]}, second | {"weight": [3.0]}])
    assert {name: part.tolist() for name, part in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 9, 9]],
        "attention_mask": [[1, 0, 1], [1, 0, 0]],
        "position_ids": [[2, 3, 4], [9, 0, 0]],
        "weight": [[0.5, 1.0, 2.0], [3.0, 0.0, 0.0]],
        "labels": [1, 0],
    }


@every(
    "changes",
    [
        {"idx": 7},
        {"text": "as it was"},
        {"tokens": ["a", "b"]},
        {"attention_mask": [1, 1, 1]},
        {"spans": [[0], [1, 2]]},
        {"input_ids": [[5, 6]]},
        {"input_ids": [0.5, 0.25]},
        {"labels": [1, 0]},
        {"labels": 0.5},
        {"label": 1},
        {"labels": None},
    ],
)
def test_collate_refuses_what_it_would_have_to_guess(changes: dict[str, Any]) -> None:
    plain = {"input_ids": [5, 6], "labels": 1}
    for items in ([plain | changes], [plain, plain | changes], [plain | changes, plain]):
        with refused(DataError, worded=len(items) == 1):
            Collate(pad_id=0)(items)


def drawn(items: Sequence[Any], size: int, seed: int | None = 0) -> list[Batch]:
    rng = None if seed is None else np.random.default_rng(seed)
    return list(batches(items, size, list, rng))


def orders(found: Sequence[Batch]) -> list[list[int]]:
    return [batch.indices.tolist() for batch in found]


@every("seed", [0, None])
@every("size", [1, 8, 32, 1000])
def test_batches_hold_every_item_once(encoded: Encoded, size: int, seed: int | None) -> None:
    found = drawn(encoded, size, seed)
    assert sorted(i for order in orders(found) for i in order) == list(range(333))
    assert len(found) == -(-333 // size)
    assert max(len(batch.indices) for batch in found) == min(size, 333)
    for batch in found:
        items = zip(batch.inputs, batch.indices, strict=True)
        assert all(item["input_ids"] is encoded.input_ids[i] for item, i in items)


def test_training_batches_are_shuffled_anew_and_reproducible(encoded: Encoded) -> None:
    assert orders(drawn(encoded, 8)) == orders(drawn(encoded, 8))
    rng = np.random.default_rng(0)
    first, second = (orders(list(batches(encoded, 8, list, rng))) for _ in range(2))
    assert first != second
    assert {frozenset(order) for order in first} != {frozenset(order) for order in second}


@pytest.mark.parametrize("seed", [0, None])
def test_items_of_like_length_share_a_batch(encoded: Encoded, seed: int | None) -> None:
    def padding(orders: Sequence[Sequence[int]]) -> int:
        found = [encoded.lengths[list(order)] for order in orders]
        return int(sum(lengths.max() * len(lengths) - lengths.sum() for lengths in found))

    assert orders(drawn(list(encoded), 8, seed)) == orders(drawn(encoded, 8, seed)), "plain items too"
    longest = [encoded.lengths[batch.indices].max() for batch in drawn(encoded, 8, seed)]
    assert (longest == sorted(longest)) == (seed is None), "short ones do not come first in training"
    random = np.random.default_rng(1).permutation(333).tolist()
    unsorted = [random[start : start + 8] for start in range(0, 333, 8)]
    assert padding(orders(drawn(encoded, 8, seed))) < padding(unsorted) / 3


def test_only_lengths_of_encoded_items_are_read() -> None:
    class Recordings(list[int]):
        lengths = "in seconds"

    assert orders(drawn(Recordings(range(6)), 2, None)) == [[0, 1], [2, 3], [4, 5]]
    assert drawn([], 4) == drawn([], 4, None) == []


def test_items_and_collate_of_the_users_own() -> None:
    items = [(torch.full((2,), float(i)), i % 2) for i in range(10)]

    def collate(chosen: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        return torch.stack([tensor for tensor, _ in chosen])

    ordered = list(batches(items, 4, collate, None))
    assert torch.cat([batch.inputs for batch in ordered])[:, 0].tolist() == list(range(10))
    shuffled = list(batches(items, 4, collate, np.random.default_rng(0)))
    rows = torch.cat([batch.inputs for batch in shuffled])[:, 0].tolist()
    assert rows == np.concatenate([batch.indices for batch in shuffled]).tolist()
    assert sorted(rows) == list(range(10))
    assert rows != list(range(10))


def test_an_end_token_written_in_a_text_is_read_as_text_where_texts_end_with_one() -> None:
    words = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    ending = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", eos_token="[SEP]")
    rows = Rows(("w0 [SEP] w1", "w0"), (0, 1), ("a", "b"))
    assert [list(ids).count(3) for ids in encode(ending, rows, 16).input_ids] == [1, 1]
    assert list(encode(tokenizer(), rows, 16).input_ids[0]).count(3) == 1, "its end token does not end texts"


PIECES = [
    *["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "##b", "##c", "ab", "##ein", "##σ", "##ς"],
    *"abceéhioßσς.,-1人",
]


def word_pieces(normalizer: Any = None, pre_tokenizer: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(WordPiece({piece: number for number, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    made.normalizer = normalizer or BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizer or BertPreTokenizer()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special, **options)


UNCASED, CASED = word_pieces(), word_pieces(BertNormalizer(lowercase=False))
ANY = st.lists(
    st.sampled_from(
        [*"abcehioABSΣσ.,-1 人éÉßİ", "  ", "\t", "\n", "\xa0", "\x1c", "\x00", "\u0301", "[MASK]", "[SEP]", "\u200d"]
    )
    | st.characters(codec="utf-8"),
    max_size=30,
).map("".join)


@settings(max_examples=30, deadline=None)
@given(st.lists(ANY, min_size=1, max_size=4), st.sampled_from([UNCASED, CASED]), st.sampled_from([3, 5, 12, 64]))
def test_the_ids_are_those_of_the_tokenizer(texts: list[str], made: PreTrainedTokenizerFast, most: int) -> None:
    words = Words.of(made)
    assert words is not None
    for _ in range(2):  # the second time all words are known
        assert words.encoded(texts, most) == made(texts, truncation=True, max_length=most)["input_ids"]


@pytest.mark.parametrize(
    "made",
    [
        word_pieces(normalizers.Sequence([Lowercase()])),
        word_pieces(pre_tokenizer=Whitespace()),
        word_pieces(truncation_side="left"),
        word_pieces(extra_special_tokens=["two words"]),
    ],
)
def test_a_tokenizer_that_may_look_at_more_than_a_word_is_left_alone(made: PreTrainedTokenizerFast) -> None:
    assert Words.of(made) is None


def test_what_no_batch_can_be_made_of_is_refused() -> None:
    with refused(ConfigError):
        encode(tokenizer(), sentences([1]), max_length=2)
    with refused(ModelError):
        pad_id(tokenizer(pad=None))
    with refused(DataError):
        Collate(pad_id=0)([{"input_ids": [5, 6]}])
