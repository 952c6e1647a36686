"""Toy data that a model of sixteen hidden units learns in a few rounds, for every task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Toy:
    """row(i) is the i-th row. measured: names of the task's own metrics. decoder: whether the task needs a language model."""

    task: str
    measured: tuple[str, ...]
    accuracy: bool = True
    decoder: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def row(self, index: int) -> Row:
        row: Row = _ROWS[self.task](index)
        return row

    def rows(self, count: int) -> list[Row]:
        return [self.row(index) for index in range(count)]


def _words(index: int, count: int = 3) -> list[str]:
    return [f"word{(7 * index + 3 * place) % 40}" for place in range(count)]


def _mood(index: int) -> str:
    return ("calm", "wild")[index // 2 % 2]


def _multi_label(index: int) -> Row:
    labels = [name for name, there in (("calm", index % 2), ("wild", index // 2 % 2)) if there]
    return {"text": " ".join([f"word{index % 3}", *labels]), "label": labels}


def _regression(index: int) -> Row:
    return {"text": " ".join([f"word{index % 2}", _mood(index)]), "label": 10.0 + 5 * (index // 2 % 2) + index % 2}


def _tokens(index: int) -> Row:
    words, tags = _words(index, 4 + index % 3), ["O"] * (4 + index % 3)
    place = index % 3
    if index % 4:
        words[place : place + 2], tags[place : place + 2] = ["calm", "wild"], ["B-mood", "I-mood"]
    return {"tokens": words, "tags": tags}


def _question(index: int) -> Row:
    before, after = _words(index, 2 + index % 5), _words(index + 1, 2)
    context = " ".join([*before, _mood(index), *after])
    return {
        "question": "word1 word2",
        "context": context,
        "answers": {"text": [_mood(index)], "answer_start": [context.index(_mood(index))]},
    }


def _text(index: int) -> Row:
    return {"text": " ".join(f"word{(index + place) % 8}" for place in range(4 + index % 5))}


def _chat(index: int) -> Row:
    answer = ("calm", "wild")[index % 2]
    turns = [("user", f"word{index % 2} word3"), ("assistant", answer), ("user", "word9"), ("assistant", answer)]
    return {"messages": [{"role": role, "content": said} for role, said in turns]}


def _choice(index: int) -> Row:
    right = index % 2
    return {
        "text": " ".join(_words(index)),
        "choices": ["calm word1" if number == right else "wild word2" for number in (0, 1)],
        "label": right,
    }


_ROWS = {
    "multi_label": _multi_label,
    "regression": _regression,
    "tokens": _tokens,
    "question_answering": _question,
    "causal_lm": _text,
    "chat": _chat,
    "multiple_choice": _choice,
}

TOYS = {
    toy.task: toy
    for toy in (
        Toy("multi_label", ("micro_f1", "macro_f1")),
        Toy("regression", ("rmse", "pearson", "spearman"), False, settings={"label_centre": 13.0, "label_scale": 3.0}),
        Toy("tokens", ("precision", "recall", "f1")),
        Toy("question_answering", ("exact_match", "f1"), settings={"stride": 4}),
        Toy("causal_lm", ("perplexity",), decoder=True),
        Toy("chat", ("perplexity",), decoder=True),
        Toy("multiple_choice", (), decoder=True),
    )
}
