"""Question answering over long contexts: windows, one item per question, the best span of all windows, and SQuAD's scores.

The scores are compared with values worked out by hand and with a naive count.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning.data.rows import Rows, Table
from secure_fed.learning.tasks import build, question_answering
from secure_fed.learning.tasks.question_answering import Answers, _end, answered, best_span, null_margin, windows
from tests.cells import every
from tests.golden import refused

TASK = build(DataConfig(task="question_answering", stride=2))
CONTEXT = " ".join(f"word{i}" for i in range(14))


def rows(context: str = CONTEXT, answer: str = "word7 word8", question: str = "calm wild") -> Rows:
    start = context.index(answer)
    return Rows((question,), (Answers((answer,), (start, start + len(answer))),), (), (context,))


def text_of(item: Any, window: int, span: tuple[int, int]) -> str:
    spans, context = item["aside"].spans[window], item["aside"].context
    return str(context[spans[span[0], 0] : spans[span[1], 1]])


def test_windows_hold_all_of_the_context_and_share_the_stride(small_tokenizer: Any) -> None:
    (found,) = windows(small_tokenizer, ["calm wild"], [CONTEXT], 12, 2)
    places = [window.spans[window.spans[:, 1] > 0] for window in found]
    assert [len(one) for one in windows(small_tokenizer, ["calm"], ["word1 word2"], 12, 2)] == [1]
    words = [[CONTEXT[start:end] for start, end in place] for place in places]
    assert [len(window.inputs["input_ids"]) for window in found] == [12, 12, 9]
    assert words == [
        [f"word{i}" for i in range(7)],
        [f"word{i}" for i in range(5, 12)],
        [f"word{i}" for i in range(10, 14)],
    ]


def test_a_question_is_one_item_however_long_its_context(small_tokenizer: Any) -> None:
    both = Rows(("calm wild",) * 2, rows().label * 2, (), (CONTEXT, CONTEXT))
    encoded = TASK.encode(small_tokenizer, both, 12)
    assert len(encoded) == 2
    item = encoded[0]
    assert len(item["parts"]) == 3
    assert item["input_ids"].tolist() == item["parts"][1]["input_ids"].tolist()
    assert text_of(item, 1, item["labels"]) == "word7 word8"
    batch = TASK.collate(small_tokenizer)(list(encoded))
    assert len(batch["input_ids"]) == len(batch["labels"]) == 2
    assert len(batch["parts"]["input_ids"]) == 6
    assert batch["counts"].tolist() == [3, 3]


def test_questions_and_answers_that_do_not_fit_are_cut(small_tokenizer: Any) -> None:
    answer = " ".join(f"word{i}" for i in range(9))
    item = TASK.encode(small_tokenizer, rows(answer=answer), 12)[0]
    assert text_of(item, 0, item["labels"]) == " ".join(f"word{i}" for i in range(7))
    (found,) = windows(small_tokenizer, ["calm"], [CONTEXT], 12, 2)
    assert answered(found, len(CONTEXT), len(CONTEXT) + 5) == (0, (0, 0))
    question = " ".join(["calm"] * 40)
    (found,) = windows(small_tokenizer, [question], [CONTEXT], 20, 2)
    assert int((found[0].inputs["input_ids"] == 4).sum()) == 10
    with refused(ConfigError):
        list(windows(small_tokenizer, [question], [CONTEXT], 20, 7))
    item = dict(TASK.encode(small_tokenizer, rows(), 32)[0])
    with refused(DataError):
        TASK.collate(small_tokenizer)([item | {"input_ids": item["input_ids"][:5]}])


def test_a_question_is_cut_before_a_character_that_two_tokens_share() -> None:
    """Byte-level tokenizers divide a character into several tokens; half of it would be kept as the whole."""
    spans = np.array([[0, 1], [1, 2], [1, 2], [2, 3]])
    assert [_end(spans, half) for half in (1, 2, 3)] == [1, 1, 2]


class Pointing(nn.Module):
    """A model that scores each token as a start and as an end by its id."""

    def __init__(self, starts: dict[int, float], ends: dict[int, float]) -> None:
        super().__init__()
        self.tables = [starts, ends]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **more: Tensor) -> Any:
        start, end = (
            torch.tensor([[table.get(int(token), 0.0) for token in row] for row in input_ids]) for table in self.tables
        )
        return SimpleNamespace(start_logits=start, end_logits=end)


def test_the_answer_may_be_in_any_window_and_is_never_of_the_question(small_tokenizer: Any) -> None:
    model = Pointing({4: 90.0, 6 + 10: 9.0}, {4: 90.0, 6 + 11: 8.0})  # "calm" of the question, word10, word11
    item = TASK.encode(small_tokenizer, rows(), 12)[0]
    batch = TASK.collate(small_tokenizer)([item])
    (answer,) = TASK.answers(model, batch, ())
    assert answer["answer"] == "word10 word11"
    assert CONTEXT[answer["start"] :].startswith("word10")
    assert 0.9 < answer["score"] < 1
    scores = TASK.metrics(())(model, [batch])
    assert (scores["exact_match"], scores["accuracy"], scores["f1"]) == (0, 0, 0)
    right = Pointing({6 + 7: 9.0}, {6 + 8: 8.0})
    assert TASK.metrics(())(right, [batch])["exact_match"] == 1


@every("seed", range(5))
def test_the_best_span_is_that_of_a_loop_over_all(seed: int) -> None:
    generator = np.random.default_rng(seed)
    spans = [np.array([(0, 0), *((100 * w + 2 * i, 100 * w + 2 * i + 2) for i in range(6))]) for w in range(3)]
    scores = [generator.normal(size=(2, 7)) for _ in spans]
    every = {
        (int(where[first, 0]), int(where[last, 1])): float(one[0, first] + one[1, last])
        for one, where in zip(scores, spans, strict=True)
        for first in range(1, 7)
        for last in range(first, min(7, first + 3))
    }
    normal = [math.log(sum(math.exp(one[side, place]) for one in scores for place in range(1, 7))) for side in (0, 1)]
    score, start, end = best_span(scores, spans, longest=3)
    assert every[start, end] == max(every.values())
    assert score == pytest.approx(max(every.values()) - sum(normal))


def test_a_token_that_two_windows_hold_counts_once() -> None:
    spans = [np.array([(0, 1), (1, 2)]), np.array([(1, 2), (2, 3)])]
    scores = [np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[2.0, 0.0], [3.0, 0.0]])]
    starts, ends = math.log(math.exp(0) + math.exp(2) + math.exp(0)), math.log(math.exp(0) + math.exp(3) + math.exp(0))
    score, *place = best_span(scores, spans, longest=2)
    assert place == [1, 2]
    assert score == pytest.approx(5 - starts - ends)


def test_padding_does_not_change_the_loss(small_tokenizer: Any) -> None:
    model = Pointing({0: 50.0, 6: 1.0}, {0: 50.0, 7: 2.0})  # padding would win if it were scored
    items = [
        TASK.encode(small_tokenizer, rows(context, "word3"), 32)[0] for context in (CONTEXT, "word3", "calm word3")
    ]
    collate, loss = TASK.collate(small_tokenizer), TASK.loss(())
    together = loss(model, collate(items))
    assert together.shape == (3,)
    assert together.tolist() == pytest.approx([float(loss(model, collate([item]))) for item in items], rel=1e-6)


# Files


def table(answers: list[object], **beside: list[object]) -> Table:
    count = len(answers)
    columns: dict[str, list[object]] = {
        "question": ["q"] * count,
        "context": ["one two one"] * count,
        "answers": answers,
        **beside,
    }
    return Table("x.jsonl", columns, tuple(columns), range(1, count + 1))


def test_answers_are_read_in_all_ways_of_writing_them() -> None:
    train, _ = TASK.read(
        [
            table([{"text": ["two", "one"], "answer_start": [4, 8]}, [{"text": "one", "answer_start": 8}]]),
            table(["two"], answers_start=[4]),
            table(["two"], answers_start=["4"]),
        ],
        [],
    )
    assert train.label == (
        Answers(("two", "one"), (4, 7)),
        Answers(("one",), (8, 11)),
        Answers(("two",), (4, 7)),
        Answers(("two",), (4, 7)),
    )


@every(
    "answer",
    [
        {"text": ["one"], "answer_start": [1]},
        {"text": ["one"], "answer_start": [-3]},
        {"text": [], "answer_start": []},
        [],
        "",
        {"text": ["one"], "answer_start": []},
        {"text": ["one"], "answer_start": [True]},
        "one",
        ["one"],
        None,
        {"text": [" "], "answer_start": [3]},
    ],
)
def test_answers_that_are_none_are_refused(answer: object) -> None:
    with refused(DataError):
        TASK.read([table([{"text": ["one"], "answer_start": [0]}, answer])], [])


# Questions without an answer

MAYBE = build(DataConfig(task="question_answering", stride=2, unanswerable=True))
CLS = 2


def test_no_answer_is_read_in_all_ways_of_writing_it() -> None:
    found, _ = MAYBE.read(
        [
            table([{"text": [], "answer_start": []}, [], {"text": ["one"], "answer_start": [0]}]),
            table(["", " ", "two"], answers_start=["", None, 4]),
        ],
        [],
    )
    assert [one.texts for one in found.label] == [(), (), ("one",), (), (), ("two",)]
    with refused(DataError):
        MAYBE.read([table([{"text": [], "answer_start": [1]}])], [])


def test_a_question_without_an_answer_trains_on_the_first_token_of_its_first_window(small_tokenizer: Any) -> None:
    item = MAYBE.encode(small_tokenizer, Rows(("calm wild",), (Answers(),), (), (CONTEXT,)), 12)[0]
    assert item["labels"] == (0, 0)
    assert item["input_ids"][0] == CLS
    assert item["input_ids"].tolist() == item["parts"][0]["input_ids"].tolist()


def test_nothing_is_answered_where_that_scores_higher_than_the_best_answer(small_tokenizer: Any) -> None:
    item = MAYBE.encode(small_tokenizer, rows(), 12)[0]
    batch = MAYBE.collate(small_tokenizer)([item])
    for height, none in ((9.0, 1 / (1 + math.exp(-1))), (7.0, 1 / (1 + math.exp(1)))):  # the answer scores 9 + 8 = 17
        model = Pointing({CLS: height, 6 + 10: 9.0}, {CLS: 9.0, 6 + 11: 8.0})
        (found,) = MAYBE.answers(model, batch, ())
        assert found["no_answer"] == pytest.approx(none, abs=1e-6)
        (sure,) = TASK.answers(model, batch, ())
        if none > 0.5:
            assert (found["answer"], found["start"], found["score"]) == ("", None, found["no_answer"])
        else:
            assert (found["answer"], found["start"]) == ("word10 word11", sure["start"])
            assert found["score"] == pytest.approx(sure["score"] * (1 - none), abs=1e-5)
        assert "no_answer" not in sure


@every("seed", range(5))
def test_the_window_that_says_no_answer_least_counts(seed: int) -> None:
    generator = np.random.default_rng(seed)
    spans = [np.array([(0, 0), *((2 * i, 2 * i + 2) for i in range(6))]) for _ in range(3)]
    scores = [generator.normal(size=(2, 7)) for _ in spans]
    best = max(
        one[0, first] + one[1, last]
        for one in scores
        for first in range(1, 7)
        for last in range(first, min(7, first + 3))
    )
    assert null_margin(scores, spans, 3) == pytest.approx(min(one[0, 0] + one[1, 0] for one in scores) - best)
    assert best_span([np.zeros((2, 3))], [np.zeros((3, 2), dtype=np.int64)], 5) == (-np.inf, 0, 0)
    assert null_margin([np.zeros((2, 3))], [np.zeros((3, 2), dtype=np.int64)], 5) == math.inf


def official(guesses: list[str], golds: list[list[str]]) -> dict[str, float]:
    """The scores as in SQuAD's evaluate-v2.0.py, where the right answer to an unanswerable question is the empty text."""
    exacts = [question_answering.exact(guess, gold or [""]) for guess, gold in zip(guesses, golds, strict=True)]
    f1s = [question_answering.best_f1(guess, gold or [""]) for guess, gold in zip(guesses, golds, strict=True)]
    found = {"exact_match": float(np.mean(exacts)), "f1": float(np.mean(f1s))}
    for name, wanted in (("has_answer", True), ("no_answer", False)):
        chosen = [index for index, gold in enumerate(golds) if bool(gold) is wanted]
        found[f"{name}_exact_match"] = float(np.mean([exacts[index] for index in chosen]))
        found[f"{name}_f1"] = float(np.mean([f1s[index] for index in chosen]))
    return found


def test_scores_are_those_of_the_official_script(small_tokenizer: Any) -> None:
    contexts = [CONTEXT, "word7 word8", "calm word3", "word1 word2 word3", "word8 word9"]
    answers = ["word7 word8", "", "", "word2", "word8 word9"]
    placed = [(answer, context.index(answer)) for answer, context in zip(answers, contexts, strict=True)]
    labels = tuple(Answers((answer,), (at, at + len(answer))) if answer else Answers() for answer, at in placed)
    encoded = MAYBE.encode(small_tokenizer, Rows(("wild",) * 5, labels, (), tuple(contexts)), 12)
    batch = MAYBE.collate(small_tokenizer)(list(encoded))
    model = Pointing({CLS: 1.0, 6 + 7: 9.0, 6 + 8: 0.5}, {CLS: 2.0, 6 + 8: 8.0})
    guesses = [answer["answer"] for answer in MAYBE.answers(model, batch, ())]
    assert guesses == ["word7 word8", "word7 word8", "", "", "word8"]
    scores = MAYBE.metrics(())(model, [batch])
    wanted = official(guesses, [[one] if one else [] for one in answers])
    assert {name: scores[name] for name in wanted} == pytest.approx(wanted)
    assert len(set(wanted.values())) > 3
    assert not {"has_answer_f1", "no_answer_f1"} & set(TASK.metrics(())(model, [batch]))


@every(
    ("guess", "answers", "exact", "f1"),
    [
        ("The Cat!", ["cat"], 1, 1),
        ("a cat sat", ["the cat"], 0, 2 / 3),
        ("an apple a day", ["apple day", "x"], 1, 1),
        ("dog", ["cat", "big dog"], 0, 2 / 3),
        ("", ["the"], 1, 1),
        ("", ["cat"], 0, 0),
        ("cat cat", ["cat"], 0, 2 / 3),
        ("theory", ["the ory"], 0, 0),
        ("U.S.", ["us"], 1, 1),
    ],
)
def test_squad_by_hand(guess: str, answers: list[str], exact: float, f1: float) -> None:
    assert question_answering.exact(guess, answers) == exact
    assert question_answering.best_f1(guess, answers) == pytest.approx(f1)
