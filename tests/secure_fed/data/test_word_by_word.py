"""Tokenising each distinct word only once, compared with the tokenizer itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer, Lowercase, Sequence
from tokenizers.pre_tokenizers import BertPreTokenizer, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from secure_fed.learning.data.encode import Words

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abceéhioßσς.,-1人",
    "##b",
    "##c",
    "ab",
    "##ein",
    "e",
    "##σ",
    "##ς",
]


def tokenizer(normalizer: Any = None, pre_tokenizer: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(
        WordPiece({piece: number for number, piece in enumerate(dict.fromkeys(PIECES))}, unk_token="[UNK]")
    )
    made.normalizer = normalizer or BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizer or BertPreTokenizer()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(tokenizer_object=made, **special, **options)


UNCASED, CASED = tokenizer(), tokenizer(BertNormalizer(lowercase=False))
ANY = st.lists(
    st.sampled_from(
        [*"abcehioABSΣσ.,-1 人éÉßİ", "  ", "\t", "\n", "\xa0", "\x1c", "\x00", "\u0301", "[MASK]", "[SEP]", "\u200d"]
    )
    | st.characters(codec="utf-8"),
    max_size=30,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(ANY, min_size=1, max_size=4), st.sampled_from([UNCASED, CASED]), st.sampled_from([3, 5, 12, 64]))
def test_the_ids_are_those_of_the_tokenizer(texts: list[str], made: PreTrainedTokenizerFast, most: int) -> None:
    words = Words.of(made)
    assert words is not None
    for _ in range(2):  # the second time all words are known
        assert words.encoded(texts, most) == made(texts, truncation=True, max_length=most)["input_ids"]


@pytest.mark.parametrize(
    "made",
    [
        tokenizer(Sequence([Lowercase()])),
        tokenizer(pre_tokenizer=Whitespace()),
        tokenizer(truncation_side="left"),
        tokenizer(extra_special_tokens=["two words"]),
    ],
)
def test_a_tokenizer_that_may_look_at_more_than_a_word_is_left_alone(made: PreTrainedTokenizerFast) -> None:
    assert Words.of(made) is None
