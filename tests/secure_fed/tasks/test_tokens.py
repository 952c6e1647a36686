"""Tags of words: the token that carries each word's tag, the words lost to truncation, and entities found by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from secure_fed.config import DataConfig
from secure_fed.errors import DataError, ModelError
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.data.rows import Rows, Table
from secure_fed.learning.tasks import build
from secure_fed.learning.tasks.tokens import entities, entity_scores
from tests.cells import every
from tests.golden import refused

TASK = build(DataConfig(task="tokens"))
NAMES = ("O", "B-per", "I-per")


def pieces() -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer with a piece for each of the letters a and b, and with BERT's special tokens."""
    vocabulary = {
        name: index for index, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##a", "b", "##b"])
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: every byte is a token, and a space belongs to the word after it, as in GPT-2."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!")


def encoded(tokenizer: Any, words: list[str], tags: list[int], max_length: int = 32) -> Any:
    (item,) = TASK.encode(tokenizer, Rows((tuple(words),), (tuple(tags),), NAMES), max_length)
    return item


def test_a_word_is_read_at_its_first_token_if_it_has_one_and_is_not_cut_off() -> None:
    item = encoded(pieces(), ["ab", "b", "aba"], [1, 0, 2])
    assert item["input_ids"].tolist() == [2, 4, 7, 6, 4, 7, 5, 3]
    assert item["labels"].tolist() == [IGNORED, 1, IGNORED, 0, 2, IGNORED, IGNORED, IGNORED]
    assert item["aside"].read == (0, 1, 2)
    item = encoded(byte_level(), ["ab", "é", "c"], [1, 0, 2])
    labelled = np.flatnonzero(item["labels"] != IGNORED)
    assert item["labels"][labelled].tolist() == [1, 0, 2]
    assert item["aside"].read == (0, 1, 2)
    assert labelled[0] == 0
    item = encoded(pieces(), ["a", "", "b", "ab", "a"], [0, 1, 2, 1, 1], max_length=5)
    assert item["input_ids"].tolist() == [2, 4, 6, 4, 3]  # truncation keeps [SEP]
    assert item["labels"].tolist() == [IGNORED, 0, 2, 1, IGNORED]
    assert item["aside"].read == (0, 2, 3)
    assert item["aside"].tags == ("O", "B-per", "I-per", "B-per", "B-per")
    item = encoded(byte_level(), [""], [1])
    batch = TASK.collate(byte_level())([item])
    assert batch["input_ids"].shape == (1, 1)
    assert TASK.loss(NAMES)(Told({0: 1}), batch).tolist() == [0]


class Told(nn.Module):
    """A model that tags each token by its id: `answers` maps token ids to tags."""

    def __init__(self, answers: dict[int, int]) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **more: Tensor) -> Any:
        scores = torch.zeros(*input_ids.shape, 3)
        for token, tag in self.answers.items():
            scores[input_ids == token] = 9 * nn.functional.one_hot(torch.tensor(tag), 3).float()
        return SimpleNamespace(logits=scores)


def test_entities_that_were_cut_off_count_as_missed() -> None:
    tokenizer = pieces()
    rows = Rows((("a", "b", "a", "b"),), ((1, 2, 1, 2),), NAMES)
    model = Told({4: 1, 6: 2})
    whole, cut = (
        TASK.metrics(NAMES)(model, [TASK.collate(tokenizer)(list(TASK.encode(tokenizer, rows, length)))])
        for length in (6, 4)
    )
    assert (whole["accuracy"], whole["recall"], whole["f1"]) == (1, 1, 1)
    assert (cut["precision"], cut["recall"], cut["accuracy"]) == (1, 0.5, 0.5)


def test_the_loss_is_the_mean_over_an_examples_own_words_however_it_is_padded() -> None:
    tokenizer, model = pieces(), Told({4: 1, 6: 0})
    rows = Rows((("a", "b", "ab", "b", "b"), ("b",)), ((1, 2, 1, 0, 0), (2,)), NAMES)
    items = list(TASK.encode(tokenizer, rows, 32))
    collate, loss = TASK.collate(tokenizer), TASK.loss(NAMES)
    together = loss(model, collate(items))
    alone = torch.cat([loss(model, collate([item])) for item in items])
    assert together.tolist() == pytest.approx(alone.tolist(), rel=1e-6)
    right, wrong = math.log(1 + 2 * math.exp(-9)), 9 + math.log(1 + 2 * math.exp(-9))
    assert together.tolist() == pytest.approx([(4 * right + wrong) / 5, wrong], rel=1e-4)


# Entities


@every(
    ("tags", "expected"),
    [
        ("O O", []),
        ("B-a I-a O B-a", [("a", 0, 2), ("a", 3, 4)]),
        ("B-a B-a", [("a", 0, 1), ("a", 1, 2)]),
        ("B-a I-b I-b", [("a", 0, 1), ("b", 1, 3)]),
        ("I-a I-a O I-a", [("a", 0, 2), ("a", 3, 4)]),
        ("B-a O I-a", [("a", 0, 1), ("a", 2, 3)]),
        ("B-a-b I-a-b", [("a-b", 0, 2)]),
    ],
)
def test_entities_by_hand(tags: str, expected: list[tuple[str, int, int]]) -> None:
    assert [tuple(found) for found in entities(tags.split())] == expected


def test_an_entity_is_found_with_its_type_and_both_its_ends_only() -> None:
    truth = [["B-a", "I-a", "O", "B-b", "O", "B-a"]]
    cases = {"B-a I-a O B-b O B-a": 3, "B-a O O B-b O B-b": 1, "B-a B-a O I-b O I-a": 2, "I-a I-a I-a B-b O O": 1}
    for guess, right in cases.items():
        found = entity_scores([guess.split()], truth)
        guessed = sum(tag[0] == "B" for tag in guess.split()) + (guess[0] == "I") + guess.count("O I-")
        assert found["precision"] == pytest.approx(right / guessed), guess
        assert found["recall"] == pytest.approx(right / 3), guess
        assert found["f1"] == pytest.approx(2 * right / (guessed + 3)), guess
    assert entity_scores([["O"]], [["O"]]) == {"precision": 0, "recall": 0, "f1": 0}


def test_scores_are_micro_averages_as_scikit_learn_has_them() -> None:
    """For scikit-learn, every possible span is a label that is present or absent."""
    generator = np.random.default_rng(0)
    names = ["O", "B-a", "I-a", "B-b", "I-b"]
    guesses, truths = ([[names[i] for i in generator.integers(5, size=6)] for _ in range(40)] for _ in range(2))
    spans = [(kind, start, end) for kind in "ab" for start in range(6) for end in range(start + 1, 7)]
    there = [[[span in entities(tags) for span in spans] for tags in side] for side in (guesses, truths)]
    guess, truth = (np.array(side) for side in there)
    assert entity_scores(guesses, truths)["f1"] == pytest.approx(f1_score(truth, guess, average="micro"))


# Files


def table(tokens: list[object], tags: list[object], classes: Any = ()) -> Table:
    columns = {"tokens": tokens, "tags": tags}
    return Table("x.jsonl", columns, tuple(columns), range(1, len(tokens) + 1), classes=classes)


def test_tags_are_names_or_numbers_that_the_source_names() -> None:
    named, _ = TASK.read([table([["a", "b"], "c d"], [["B-x", "I-x"], "O B-y"])], [])
    assert named.label_names == ("O", "B-x", "I-x", "B-y", "I-y")
    assert named.text == (("a", "b"), ("c", "d"))
    assert named.label == ((1, 2), (0, 3))
    declared = (("tags", ("O", "B-z", "I-z")),)
    numbered, _ = TASK.read([table([["a", "b"]], [[1, 2]], declared)], [])
    assert (numbered.label_names, numbered.label) == (("O", "B-z", "I-z"), ((1, 2),))


@every(
    ("tokens", "tags"),
    [
        ([["a", "b"]], [["B-x"]]),
        ([["a"], ["b"]], [["B-x"], ["NOUN"]]),
        ([["a"]], [["B-"]]),
        ([["a"]], [[1]]),
        ([["a", 3]], [["B-x", "O"]]),
        ([["a"]], [["O"]]),
        ([["a"]], [None]),
    ],
)
def test_tags_that_do_not_fit_are_refused(tokens: list[object], tags: list[object]) -> None:
    with refused(DataError):
        TASK.read([table(tokens, tags)], [])


def test_what_training_or_the_tokenizer_never_saw_is_refused() -> None:
    with refused(DataError):
        TASK.read([table([["a"]], [["B-x"]])], [table([["a"]], [["B-y"]])])
    slow: Any = SimpleNamespace(is_fast=False, name_or_path="org/slow", num_special_tokens_to_add=lambda pair: 0)
    with refused(ModelError):
        encoded(slow, ["a"], [0])


def test_strata_go_by_the_types_of_a_sentence() -> None:
    words = (("a", "b"),) * 4
    rows = Rows(words, ((1, 2), (0, 1), (0, 0), (3, 1)), ("O", "B-x", "I-x", "B-y", "I-y"))
    strata = TASK.strata(rows, 0)
    assert strata[0] == strata[1]
    assert len(set(strata)) == 3
