"""The windows of a context that may be too long for the model, each with the question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from secure_fed.errors import ConfigError
from secure_fed.learning.data.alignment import aligned, require_fast
from secure_fed.learning.data.encode import TOKENISED_AT_ONCE, Item


class Window(NamedTuple):
    """The tokens of a question and of a part of its context, which a model reads at once.

    inputs: input_ids, and token_type_ids if the tokenizer returns them
    spans: (tokens, 2), each token's place in the context; (0, 0) for tokens that are not of the context
    """

    inputs: Item
    spans: NDArray[np.integer[Any]]


def windows(
    tokenizer: Any, questions: Sequence[str], contexts: Sequence[str], max_length: int, stride: int
) -> Iterator[list[Window]]:
    """The windows of each example: of `max_length` tokens at most, neighbours having `stride` tokens of the context in common.

    A question takes half of the tokens at most; a longer question is cut at its end.
    """
    require_fast(tokenizer)
    half = max_length // 2
    room = max_length - half - tokenizer.num_special_tokens_to_add(pair=True)
    if room < 1:
        raise ConfigError(f"model.max_length is {max_length}, too few for a question and its context: set at least 32")
    if stride >= room:
        raise ConfigError(
            f"data.stride is {stride}, but with model.max_length = {max_length} a window may have no more than {room} tokens "
            "of a context: lower data.stride or raise model.max_length"
        )
    shortened = [
        question[: _end(tokens.spans, half)] if len(tokens.ids) > half else question
        for question, tokens in zip(questions, aligned(tokenizer, questions, special=False), strict=True)
    ]
    for start in range(0, len(shortened), TOKENISED_AT_ONCE):
        some = slice(start, start + TOKENISED_AT_ONCE)
        yield from _of_some(tokenizer, shortened[some], list(contexts[some]), max_length, stride)


def _end(spans: NDArray[np.integer[Any]], half: int) -> int:
    """The end of the first `half` tokens of a text: before a character that the next token shares, as in UTF-8 bytes."""
    return int(min(spans[half - 1, 1], spans[half, 0]))


def _of_some(
    tokenizer: Any, questions: list[str], contexts: list[str], max_length: int, stride: int
) -> list[list[Window]]:
    tokens = tokenizer(
        questions,
        contexts,
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    found: list[list[Window]] = [[] for _ in questions]
    for row, example in enumerate(tokens["overflow_to_sample_mapping"]):
        of_context = np.array([part == 1 for part in tokens.sequence_ids(row)])
        spans = np.asarray(tokens["offset_mapping"][row], dtype=np.int32).reshape(-1, 2) * of_context[:, None]
        names = [name for name in ("input_ids", "token_type_ids") if name in tokens]
        found[example].append(Window({name: np.asarray(tokens[name][row], dtype=np.int32) for name in names}, spans))
    return found


def answered(found: Sequence[Window], start: int, end: int) -> tuple[int, tuple[int, int]]:
    """The (first) window with the most characters from `start` to `end` - 1, and its first and last token of them.

    If no token of the answer is left, its place is the first token.
    """
    overlaps = [np.minimum(window.spans[:, 1], end) - np.maximum(window.spans[:, 0], start) for window in found]
    chosen = int(np.argmax([np.maximum(overlap, 0).sum() for overlap in overlaps]))
    inside = np.flatnonzero(overlaps[chosen] > 0)
    return chosen, (int(inside[0]), int(inside[-1])) if len(inside) else (0, 0)


def best_span(
    scores: Sequence[NDArray[np.float64]], found: Sequence[NDArray[np.integer[Any]]], longest: int
) -> tuple[float, int, int]:
    """(log-probability, first character, end character) of the best answer over all windows of an example.

    The end character is the one after the last. scores: a window's (2, tokens) scores of starts and of ends. found: its
    `Window.spans`. An answer lies in the context, ends no earlier than it starts, and has at most `longest` tokens. Starts and
    ends are each a distribution over the context's tokens; a token in several windows counts once, with its highest score.
    """
    each = (_in_window(one, spans, longest) for one, spans in zip(scores, found, strict=True))
    best = max(each, key=lambda one: one[0])  # the first of several
    if best[0] == -np.inf:
        return best
    return best[0] - _normal([one[0] for one in scores], found) - _normal([one[1] for one in scores], found), *best[1:]


def null_margin(
    scores: Sequence[NDArray[np.float64]], found: Sequence[NDArray[np.integer[Any]]], longest: int
) -> float:
    """The score of "no answer" minus the score of the best answer, over all windows of an example.

    "No answer" is the first token, as start and as end. Of several windows, the lowest score of "no answer" counts, since an
    answer in one of them is an answer (Rajpurkar et al., 2018, arXiv 1806.03822; transformers' run_qa has the same rule).
    """
    best = max(_in_window(one, spans, longest)[0] for one, spans in zip(scores, found, strict=True))
    return min(float(start[0] + end[0]) for start, end in scores) - best


def _in_window(scores: NDArray[np.float64], spans: NDArray[np.integer[Any]], longest: int) -> tuple[float, int, int]:
    """(score, first character, end character) of a window's best answer; minus infinity without a token."""
    start, end = scores
    places = np.flatnonzero(spans[:, 1] > spans[:, 0])
    if not len(places):
        return -np.inf, 0, 0
    distance = np.arange(len(places)) - np.arange(len(places))[:, None]
    joint = np.where((distance >= 0) & (distance < longest), start[places, None] + end[places], -np.inf)
    first, last = divmod(int(joint.argmax()), len(places))
    return float(joint[first, last]), int(spans[places[first], 0]), int(spans[places[last], 1])


def _normal(scores: Sequence[NDArray[np.float64]], found: Sequence[NDArray[np.integer[Any]]]) -> float:
    """log sum exp over the context's tokens."""
    spans = np.concatenate(found)
    inside = spans[:, 1] > spans[:, 0]
    token = np.unique(spans[inside], axis=0, return_inverse=True)[1].ravel()
    highest = np.full(token.max() + 1, -np.inf)
    np.maximum.at(highest, token, np.concatenate(scores)[inside])
    return float(np.logaddexp.reduce(highest))
