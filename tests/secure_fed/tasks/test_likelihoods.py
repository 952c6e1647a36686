"""Language modelling and multiple choice, compared with loops over single tokens."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from secure_fed.config import DataConfig, ModelConfig
from secure_fed.errors import DataError, ModelError
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.data.rows import Rows, Table
from secure_fed.learning.models.loading import load
from secure_fed.learning.tasks import build
from secure_fed.learning.tasks.causal_lm import continuations, perplexity
from tests.cells import every
from tests.golden import refused

TEXTS = ("word1 word2 word3 word4", "calm", "word9 word8 word7 wild word6 word5", "")


def naive(model: Any, ids: list[int], told: list[int]) -> list[float]:
    """The negative log-likelihoods of the tokens at the places `told`, each from a forward pass over the tokens before it."""
    found = []
    for place in told:
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([ids[:place]])).logits[0, -1].double()
        found.append(float(scores.logsumexp(0) - scores[ids[place]]))
    return found


@pytest.fixture(scope="module")
def model(gpt2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(gpt2).eval()


def test_loss_and_perplexity_are_those_of_a_loop(model: Any, small_tokenizer: Any) -> None:
    task = build(DataConfig(task="causal_lm"))
    encoded = task.encode(small_tokenizer, Rows(TEXTS, (None,) * 4, ()), 32)
    assert encoded[0]["input_ids"].tolist() == [2, 7, 8, 9, 10, 3]
    told = [
        [place for place in range(1, len(item["input_ids"])) if item["labels"][place] != IGNORED] for item in encoded
    ]
    assert told == [[1, 2, 3, 4], [1], [1, 2, 3, 4, 5, 6], []]  # places of the text's tokens; a blank text has none
    each = [naive(model, item["input_ids"].tolist(), places) for item, places in zip(encoded, told, strict=True)]
    batch = task.collate(small_tokenizer)(list(encoded))
    with torch.no_grad():
        losses = task.loss(())(model, batch)
    means = [sum(one) / max(1, len(one)) for one in each]
    assert losses.tolist() == pytest.approx(means, rel=1e-4)
    halves = [task.collate(small_tokenizer)(list(encoded)[part]) for part in (slice(0, 3), slice(3, 4))]
    with torch.no_grad():
        found = task.metrics(())(model, halves)
    flat = [loss for one in each for loss in one]
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(flat)), rel=1e-4)
    assert found["loss"] == pytest.approx(np.mean(means), rel=1e-4)
    answers = task.answers(model, batch, ())
    assert [one["log_likelihood"] for one in answers] == pytest.approx([-sum(one) for one in each], rel=1e-4)
    assert [one["tokens"] for one in answers] == [4, 1, 6, 0]
    assert answers[3]["perplexity"] is None


@every("learn_prompt", [False, True])
def test_a_prompt_is_read_and_learned_only_if_asked(small_tokenizer: Any, learn_prompt: bool) -> None:
    task = build(DataConfig(task="causal_lm", text_b="answer", learn_prompt=learn_prompt))
    rows = Rows(("calm word1",), (None,), (), ("wild word2",))
    (item,) = task.encode(small_tokenizer, rows, 32)
    assert item["input_ids"].tolist() == [2, 4, 7, 5, 8, 3]
    prompt = [4, 7] if learn_prompt else [IGNORED, IGNORED]
    assert item["labels"].tolist() == [IGNORED, *prompt, 5, 8, IGNORED]


def test_the_end_token_is_learned_behind_a_target_alone(small_tokenizer: Any) -> None:
    ending = copy.deepcopy(small_tokenizer)
    ending.eos_token = "word3"
    made = list(continuations(ending, ["calm", ""], ["wild", "word0"], 32, ends=True))
    assert made[0]["input_ids"].tolist() == [2, 4, 5, 9]
    assert made[0]["labels"].tolist() == [IGNORED, IGNORED, 5, 9]


@every(
    ("prompt", "target", "length", "ids", "told"),
    [
        ("word0 word1 word2", "wild", 5, [2, 7, 8, 5, 3], [5]),  # the prompt's beginning is cut first
        ("word0 word1", "wild wild wild", 4, [2, 5, 5, 5], [5, 5, 5]),  # then the target's end is cut
        ("", "word0 word1 word2", 3, [2, 6, 7], [6, 7]),
        ("word0 word1 word2", "", 4, [2, 7, 8, 3], []),
        ("ends here ", "wild", 8, [2, 1, 1, 5, 3], [5]),
    ],
)
def test_what_is_too_long_keeps_the_target(
    small_tokenizer: Any, prompt: str, target: str, length: int, ids: list[int], told: list[int]
) -> None:
    (item,) = continuations(small_tokenizer, [prompt], [target], length)
    assert item["input_ids"].tolist() == ids
    assert [label for label in item["labels"].tolist() if label != IGNORED] == told


def test_perplexity_of_nothing_and_of_too_much() -> None:
    assert math.isnan(perplexity(0.0, 0.0))
    assert perplexity(1e6, 2.0) == math.inf
    assert math.isnan(perplexity(math.nan, 2.0))


def test_an_encoder_cannot_tell_tokens_it_has_read(small_model: Path, gpt2: Path, llama: Path) -> None:
    task = build(DataConfig(task="causal_lm"))
    for folder in (gpt2, llama):
        loaded = load(ModelConfig(name=str(folder)), task, (), 0)
        assert loaded.head == ()  # its output layer was pre-trained
    with refused(ModelError):
        load(ModelConfig(name=str(small_model)), task, (), 0)


# Multiple choice


CHOICES = Rows(
    ("calm word1", "wild", "word3"), (1, 0, 2), (), (("word2", "wild wild"), ("word5 word6", "calm"), ("calm",) * 3)
)


@pytest.mark.parametrize("likelihood", ["mean", "sum"])
def test_choices_are_scored_as_by_a_loop(model: Any, small_tokenizer: Any, likelihood: str) -> None:
    task = build(DataConfig(task="multiple_choice", likelihood=likelihood))
    items = list(task.encode(small_tokenizer, CHOICES, 32))
    found = task.answers(model, task.collate(small_tokenizer)(items), ())
    for row, (answer, prompt, choices) in enumerate(zip(found, CHOICES.text, CHOICES.text_b or (), strict=True)):
        expected = []
        for choice in choices:
            ids = small_tokenizer(f"{prompt} {choice}")["input_ids"]
            first = len(small_tokenizer(prompt)["input_ids"]) - 1
            each = naive(model, ids, list(range(first, len(ids) - 1)))
            expected.append(-sum(each) / (len(each) if likelihood == "mean" else 1))
        assert answer["likelihoods"] == pytest.approx(expected, rel=1e-4), row
        assert answer["label"] == int(np.argmax(expected))
        assert answer["choice"] == choices[answer["label"]]
    right = [answer["label"] == label for answer, label in zip(found, CHOICES.label, strict=True)]
    with torch.no_grad():
        measured = task.metrics(())(model, [task.collate(small_tokenizer)([item]) for item in items])
    assert measured["accuracy"] == pytest.approx(np.mean(right))


def test_a_question_is_one_item_and_trains_on_its_right_choice(small_tokenizer: Any) -> None:
    task = build(DataConfig(task="multiple_choice"))
    encoded = task.encode(small_tokenizer, CHOICES, 32)
    assert [len(item["parts"]) for item in encoded] == [2, 2, 3]
    for item, right in zip(encoded, CHOICES.label, strict=True):
        assert item["input_ids"].tolist() == item["parts"][right]["input_ids"].tolist()


def table(choices: list[object], labels: list[object]) -> Table:
    columns: dict[str, list[object]] = {"text": ["q"] * len(choices), "choices": choices, "label": labels}
    return Table("x.jsonl", columns, tuple(columns), range(1, len(choices) + 1))


def test_the_right_choice_is_told_by_its_number_or_its_text_in_one_way() -> None:
    """Row by row, "1" and "2" would be the first and the second choice, and "0" the first again."""
    task = build(DataConfig(task="multiple_choice"))
    train, _ = task.read([table([["a", "b"], ["a", "b"], ["a", "b"]], [1, "0", "b"])], [])
    assert train.label == (1, 0, 1)
    choices = [["1", "2", "3"]] * 3
    assert task.read([table([*choices], ["0", "1", "2"])], [])[0].label == (0, 1, 2)
    assert task.read([table([*choices], ["3", "1", "2"])], [])[0].label == (2, 0, 1), "3 is no number of a choice"
    with refused(DataError):
        task.read([table([*choices], ["1", "2", "1"])], [])


@every(
    ("choices", "label"),
    [
        (["a", "b"], 2),
        (["a", "b"], "c"),
        (["a", "b"], True),
        (["a", "b"], None),
        (["a"], 0),
        (["a", " "], 0),
        ("a b", 0),
    ],
)
def test_choices_that_are_none_are_refused(choices: object, label: object) -> None:
    with refused(DataError):
        build(DataConfig(task="multiple_choice")).read([table([["a", "b"], choices], [0, label])], [])
