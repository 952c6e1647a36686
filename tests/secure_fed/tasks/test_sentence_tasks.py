"""Labels and numbers of whole texts, and tags of words, compared with scikit-learn, SciPy and loops.

The token that carries each word's tag, the words lost to truncation, and entities found by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from secure_fed import RunConfig
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError, ModelError
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.data.rows import Rows, Table
from secure_fed.learning.tasks import build, classification, multi_label, regression
from secure_fed.learning.tasks.classification import weights
from secure_fed.learning.tasks.tokens import entities, entity_scores
from tests.cells import every
from tests.golden import refused


class Told(nn.Module):
    """A model that returns the scores in its batch."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores


def batches(scores: Tensor, labels: Tensor, size: int = 8) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(labels), size):
        yield {"scores": scores[start : start + size], "labels": labels[start : start + size]}


def table(cells: list[object], source: str = "x.jsonl") -> Table:
    texts: list[object] = [f"text {index}" for index in range(len(cells))]
    return Table(source, {"text": texts, "label": cells}, ("text", "label"), range(1, len(cells) + 1))


def read(task: str, cells: list[object], test: list[object] | None = None, **settings: Any) -> tuple[Rows, Rows]:
    return build(DataConfig(task=task, **settings)).read([table(cells)], [] if test is None else [table(test, "t.csv")])


# Several labels


@every("seed", [0, 1])
def test_scores_of_labels_are_those_of_scikit_learn(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(37, 5, generator=generator)
    labels = (torch.rand(37, 5, generator=generator) < 0.3).float()
    scores[:, 4], labels[:, 4] = -9.0, 0.0  # a label that never occurs and is never predicted
    guess = (scores > 0).int().numpy()
    found = multi_label.metrics(Told(), batches(scores, labels))
    truth = labels.int().numpy()
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, guess))
    assert found["micro_f1"] == pytest.approx(f1_score(truth, guess, average="micro"))
    assert found["macro_f1"] == pytest.approx(f1_score(truth[:, :4], guess[:, :4], average="macro"))
    each = multi_label.loss(Told(), {"scores": scores, "labels": labels})
    shares = scores.double().sigmoid()
    naive = [
        -sum(math.log(float(shares[i, j] if labels[i, j] else 1 - shares[i, j])) for j in range(5)) / 5
        for i in range(37)
    ]
    assert each.tolist() == pytest.approx(naive, rel=1e-4)
    assert found["loss"] == pytest.approx(sum(naive) / 37, rel=1e-4)


def test_what_has_no_figure(recwarn: pytest.WarningsRecorder) -> None:
    found = multi_label.metrics(Told(), batches(torch.full((4, 2), -1.0), torch.zeros(4, 2)))
    assert found["accuracy"] == 1
    assert math.isnan(found["micro_f1"])
    constant = regression.correlations(np.ones(4), np.arange(4.0))
    assert math.isnan(constant["pearson"])
    assert math.isnan(constant["spearman"])
    assert not recwarn.list


def test_labels_and_numbers_are_read_from_lists_and_from_texts() -> None:
    train, test = read("multi_label", [["b", "a"], [], "c; a", ["a", "a"]], [["c"]])
    assert train.label_names == ("a", "b", "c")
    assert train.label == ((0, 1), (), (0, 2), (0,))
    assert test.label == ((2,),)
    numbers, _ = read("regression", [1, 2.5, " 3e1 ", "-4"])
    assert (numbers.label, numbers.label_names) == ((1.0, 2.5, 30.0, -4.0), ())


@every("cells", [[["a"], 7], [["a"], ["b", None]], [[1, 0], [1, 0, 1]], [[], []], [["a"], ["b", 3]]])
def test_lists_that_are_none_are_refused(cells: list[object]) -> None:
    with refused(DataError):
        read("multi_label", cells)


def test_strata_of_labels_go_by_the_set() -> None:
    task = build(DataConfig(task="multi_label"))
    rows, _ = read("multi_label", [["a", "b"], ["b", "a"], [], ["a"], []])
    strata = task.strata(rows, 0)
    assert strata[0] == strata[1]
    assert strata[2] == strata[4]
    assert len(set(strata)) == 3


# Numbers


def test_numbers_are_scaled_by_the_settings_alone() -> None:
    task = build(DataConfig(task="regression", label_centre=2.0, label_scale=4.0))
    guess, truth = np.array([0.5, -1.0, 2.0, 0.25]), np.array([4.0, -2.0, 9.0, 3.0])
    batch = {"scores": torch.tensor(guess[:, None]), "labels": torch.tensor((truth - 2) / 4)}
    found = task.metrics(())(Told(), [batch])
    assert found["rmse"] == pytest.approx(math.sqrt(np.mean((2 + 4 * guess - truth) ** 2)), rel=1e-6)
    assert found["loss"] == pytest.approx(np.mean((guess - (truth - 2) / 4) ** 2), rel=1e-6)
    assert found["pearson"] == pytest.approx(pearsonr(guess, truth).statistic)
    assert found["spearman"] == pytest.approx(spearmanr(guess, truth).statistic)
    assert "accuracy" not in found
    assert [one["value"] for one in task.answers(Told(), {"scores": batch["scores"].float()}, ())] == pytest.approx(
        2 + 4 * guess
    )


@every("cell", ["high", None, True, "nan", "", [1.0], "inf"])
def test_what_is_no_number_is_refused(cell: object) -> None:
    with refused(DataError):
        read("regression", [1.0, cell])


def test_strata_of_numbers_are_tenths() -> None:
    task = build(DataConfig(task="regression"))
    values = np.random.default_rng(0).permutation(100).astype(float)
    rows = Rows(("x",) * 100, tuple(values), ())
    strata = task.strata(rows, 0)
    assert np.bincount(strata).tolist() == [10] * 10
    assert all(stratum == value // 10 for stratum, value in zip(strata, values, strict=True))
    assert set(task.strata(Rows(("x",) * 5, (1.0,) * 5, ()), 0)) == {0}


# Public shares of classes


@pytest.mark.parametrize("priors", [(0.8, 0.2), ("b=0.2", "a = 0.8"), ("0.8", "0.2")])
def test_a_class_weighs_by_its_inverse_public_share(priors: Any) -> None:
    task = build(DataConfig(class_priors=priors))
    batch = {"scores": torch.randn(6, 2), "labels": torch.tensor([0, 1, 1, 0, 0, 1])}
    plain, weighed = classification.loss(Told(), batch), task.loss(("a", "b"))(Told(), batch)
    expected = [float(one) / (2 * (0.2 if label else 0.8)) for one, label in zip(plain, batch["labels"], strict=True)]
    assert weighed.tolist() == pytest.approx(expected, rel=1e-5)
    shares = torch.tensor([0.8, 0.2])
    assert float((weights(priors, ("a", "b")) * shares).sum()) == pytest.approx(1)


def test_without_public_shares_all_classes_weigh_the_same() -> None:
    assert build(DataConfig()).loss(("a", "b")) is classification.loss


@every(
    "priors", [(0.5,), ("a=0.5", "c=0.5"), ("a=0.5", "a=0.5"), ("a=0.5", "0.5"), (0.5, 0.6), (0.0, 1.0), ("a=x", "b=1")]
)
def test_shares_that_are_none_are_refused(priors: Any) -> None:
    with refused(ConfigError):
        weights(priors, ("a", "b"))


def test_public_shares_are_a_setting() -> None:
    assert RunConfig.load(None, ["data.class_priors=[0.9, 0.1]"]).data.class_priors == (0.9, 0.1)
    assert RunConfig.load(None, ['data.class_priors=["a=1", "b=0"]']).data.class_priors == ("a=1", "b=0")
    with refused(ConfigError):
        RunConfig.load(None, ['data.class_priors=[0.9, "b=0.1"]'])
    with refused(ConfigError):
        RunConfig.load(None, ["data.train=x.csv", "data.task=regression", "data.class_priors=[0.9, 0.1]"])


# Tags of words


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
    assert TASK.loss(NAMES)(Tagging({0: 1}), batch).tolist() == [0]


class Tagging(nn.Module):
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
    model = Tagging({4: 1, 6: 2})
    whole, cut = (
        TASK.metrics(NAMES)(model, [TASK.collate(tokenizer)(list(TASK.encode(tokenizer, rows, length)))])
        for length in (6, 4)
    )
    assert (whole["accuracy"], whole["recall"], whole["f1"]) == (1, 1, 1)
    assert (cut["precision"], cut["recall"], cut["accuracy"]) == (1, 0.5, 0.5)


def test_the_loss_is_the_mean_over_an_examples_own_words_however_it_is_padded() -> None:
    tokenizer, model = pieces(), Tagging({4: 1, 6: 0})
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


def test_scores_are_micro_averages_as_scikit_learn_has_them() -> None:
    """For scikit-learn, every possible span with its type is a label that is present or absent."""
    generator = np.random.default_rng(0)
    names = ["O", "B-a", "I-a", "B-b", "I-b"]
    guesses, truths = ([[names[i] for i in generator.integers(5, size=6)] for _ in range(40)] for _ in range(2))
    spans = [(kind, start, end) for kind in "ab" for start in range(6) for end in range(start + 1, 7)]
    there = [[[span in entities(tags) for span in spans] for tags in side] for side in (guesses, truths)]
    guess, truth = (np.array(side) for side in there)
    precision, recall, f1, _ = precision_recall_fscore_support(truth, guess, average="micro")
    found = entity_scores(guesses, truths)
    assert found == {"precision": pytest.approx(precision), "recall": pytest.approx(recall), "f1": pytest.approx(f1)}
    assert entity_scores([["O"]], [["O"]]) == {"precision": 0, "recall": 0, "f1": 0}


# Files


def tagged(tokens: list[object], tags: list[object], classes: Any = ()) -> Table:
    columns = {"tokens": tokens, "tags": tags}
    return Table("x.jsonl", columns, tuple(columns), range(1, len(tokens) + 1), classes=classes)


def test_tags_are_names_or_numbers_that_the_source_names() -> None:
    named, _ = TASK.read([tagged([["a", "b"], "c d"], [["B-x", "I-x"], "O B-y"])], [])
    assert named.label_names == ("O", "B-x", "I-x", "B-y", "I-y")
    assert named.text == (("a", "b"), ("c", "d"))
    assert named.label == ((1, 2), (0, 3))
    declared = (("tags", ("O", "B-z", "I-z")),)
    numbered, _ = TASK.read([tagged([["a", "b"]], [[1, 2]], declared)], [])
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
        TASK.read([tagged(tokens, tags)], [])


def test_what_training_or_the_tokenizer_never_saw_is_refused() -> None:
    with refused(DataError):
        TASK.read([tagged([["a"]], [["B-x"]])], [tagged([["a"]], [["B-y"]])])
    slow: Any = SimpleNamespace(is_fast=False, name_or_path="org/slow", num_special_tokens_to_add=lambda pair: 0)
    with refused(ModelError):
        encoded(slow, ["a"], [0])


def test_strata_go_by_the_types_of_a_sentence() -> None:
    words = (("a", "b"),) * 4
    rows = Rows(words, ((1, 2), (0, 1), (0, 0), (3, 1)), ("O", "B-x", "I-x", "B-y", "I-y"))
    strata = TASK.strata(rows, 0)
    assert strata[0] == strata[1]
    assert len(set(strata)) == 3
