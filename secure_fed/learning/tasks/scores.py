"""Scores of several yes-or-no answers an example."""

from __future__ import annotations

import math

from torch import Tensor


def f1_scores(guess: Tensor, truth: Tensor) -> dict[str, float]:
    """micro_f1 over all answers, and macro_f1, the mean over the labels that occur among truth or guesses.

    guess, truth: (examples, labels) of bool. F1 = 2 right / (guessed + true); not-a-number where nothing occurs at all.
    """
    right = (guess & truth).double().sum(0)
    named = guess.double().sum(0) + truth.double().sum(0)
    present = named > 0
    if not present.any():
        return {"micro_f1": math.nan, "macro_f1": math.nan}
    return {
        "micro_f1": float(2 * right.sum() / named.sum()),
        "macro_f1": float((2 * right[present] / named[present]).mean()),
    }
