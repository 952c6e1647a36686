"""Attribute inference: the adversary knows a record except for one attribute, and guesses the value that fits the model best.

    guess(x) = argmax over v of P(v) exp(-loss(x with v))                     (after Yeom et al. 2018, section 4)

P(v) is the share of a value among records outside the training. A model that has learned how the attribute depends on the rest
guesses well for every record. Only better guesses for training records than for others reveal these records: the attribute
advantage (in the same section) is the difference of the two shares of right guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.null import Floats

Indices = NDArray[np.int64]
Bools = NDArray[np.bool_]


def guesses(losses: Floats, prior: Floats) -> Indices:
    """(records,) the index of the guessed value; losses: (records, values) with each value in its place; prior: (values,)."""
    with np.errstate(divide="ignore"):
        found: Indices = np.argmax(np.log(prior)[None] - losses, axis=1)
    return found


def prior(values: Indices, count: int) -> Floats:
    """(count,) the smoothed share of each value, never 0."""
    counted = np.bincount(values, minlength=count) + 1.0
    shares: Floats = counted / counted.sum()
    return shares


@dataclass(frozen=True)
class Advantage:
    """The shares of right guesses for members and for others. p_value: the probability of a difference as large if members are
    like others (Fisher).
    """

    members: float
    others: float
    p_value: float

    @property
    def advantage(self) -> float:
        return self.members - self.others


def advantage(right: Bools, members: Bools) -> Advantage:
    """right: (records,) whether each guess is right; members: whether each record was in the training."""
    from scipy.stats import fisher_exact

    ins, outs = right[members], right[~members]
    table = [[int(ins.sum()), int((~ins).sum())], [int(outs.sum()), int((~outs).sum())]]
    p_value = float(fisher_exact(table, alternative="greater").pvalue)
    return Advantage(float(ins.mean()), float(outs.mean()), p_value)


def without_model(texts: list[str], values: Indices, members: Bools, seed: int = 0) -> Indices:
    """The guesses of a bag-of-words classifier trained on the others alone, on texts without the attribute and without the
    model.

    Others are guessed by classifiers that have not seen them, in five folds. A value that too few others have is never guessed.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import KFold

    counted = CountVectorizer(binary=True).fit_transform(texts)
    found = np.full(len(values), np.bincount(values[~members]).argmax())
    outside = np.flatnonzero(~members)
    folds = KFold(min(5, len(outside)), shuffle=True, random_state=seed).split(outside)
    tasks = [(outside[train], outside[test]) for train, test in folds] + [(outside, np.flatnonzero(members))]
    for train, test in tasks:
        if len(set(values[train])) > 1:
            found[test] = LogisticRegression(max_iter=1000).fit(counted[train], values[train]).predict(counted[test])
    return found
