"""How well a written answer agrees with the reference: a number from 0 to 1, by the names of `data.metric`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from secure_fed.learning.tasks.spans import best_f1

Agreement = Callable[[str, str], float]  # the answer, and the reference
_WORD = re.compile(r"\w+")


def agreement(metric: str, pattern: str = "") -> Agreement:
    """The metric of this name. pattern: of `exact_match`, see `picked`."""
    if metric == "exact_match":
        return lambda answer, reference: exact_match(answer, reference, pattern)
    return {"f1": f1, "rouge_l": rouge_l}[metric]


def exact_match(answer: str, reference: str, pattern: str = "") -> float:
    """1 if both are the same text, else 0, without regard to case and to the amount of white space.

    pattern: picks what is compared out of both; a text without a match agrees with none.
    """
    found = [_plain(one) if (one := picked(text, pattern)) is not None else None for text in (answer, reference)]
    return float(found[0] is not None and found[0] == found[1])


def picked(text: str, pattern: str) -> str | None:
    """The first group of the first match of the pattern, or the whole match of a pattern without groups; None without a match.

    An empty pattern picks the whole text.
    """
    if not pattern:
        return text
    found = re.search(pattern, text)
    return found and (found[1] or "" if found.re.groups else found[0])


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def f1(answer: str, reference: str) -> float:
    """F1 of the words, normalised as in SQuAD: without case, punctuation and articles; a word counts as often as it occurs."""
    return best_f1(answer, [reference])


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin, 2004, ROUGE), without case and punctuation, and without stemming.

    With L its length, m and n the numbers of words: precision L / m, recall L / n, so 2 L / (m + n).
    """
    own, other = (_WORD.findall(text.casefold()) for text in (answer, reference))
    return 2 * _common(own, other) / (len(own) + len(other)) if own and other else float(own == other)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    before = [0] * (len(other) + 1)  # of the words of `one` so far and each beginning of `other`
    for word in one:
        row = [0]
        for at, theirs in enumerate(other):
            row.append(before[at] + 1 if word == theirs else max(before[at + 1], row[at]))
        before = row
    return before[-1]
