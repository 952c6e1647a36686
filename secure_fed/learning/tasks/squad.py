"""Answers compared as SQuAD does (Rajpurkar et al., 2016, arXiv 1606.05250).

Case, punctuation, articles and spaces do not count.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> str:
    """Lower case, then without punctuation, then without articles, with single spaces."""
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact(guess: str, answers: Sequence[str]) -> float:
    """1 if the guess is one of the answers, else 0."""
    return float(normalised(guess) in {normalised(answer) for answer in answers})


def best_f1(guess: str, answers: Sequence[str]) -> float:
    """The F1 of the guess's words against that answer's with which it is highest; a word counts as often as it occurs."""
    return max(_f1(normalised(guess).split(), normalised(answer).split()) for answer in answers)


def _f1(guess: Sequence[str], answer: Sequence[str]) -> float:
    if not guess or not answer:
        return float(guess == answer)
    return 2 * (Counter(guess) & Counter(answer)).total() / (len(guess) + len(answer))
