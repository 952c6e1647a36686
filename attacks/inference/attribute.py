"""Attribute inference: all of a record is known but one attribute, and the value that fits the model best is the guess.

    guess(x) = argmax over v of P(v) exp(-loss(x with v))                     (after Yeom et al. 2018, section 4)

P(v) is the share of a value among records that were not in the training. A model that has learned how the attribute goes with
the rest guesses well for everybody. Only what it guesses better for records of its training than for others is about these
records: the attribute advantage (in the same section) is the difference of the two shares of right guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.any_model.signals import Floats

Indices = NDArray[np.int64]
Bools = NDArray[np.bool_]


def guesses(losses: Floats, prior: Floats) -> Indices:
    """(records,) the index of the guessed value; losses: (records, values) with each value in its place; prior: (values,)."""
    with np.errstate(divide="ignore"):
        found: Indices = np.argmax(np.log(prior)[None] - losses, axis=1)
    return found


def prior(values: Indices, count: int) -> Floats:
    """(count,) the share of each value, none of them 0."""
    counted = np.bincount(values, minlength=count) + 1.0
    shares: Floats = counted / counted.sum()
    return shares


@dataclass(frozen=True)
class Advantage:
    """Of members over others, in right guesses. p_value: of as large a difference where members are like others (Fisher)."""

    members: float
    others: float
    p_value: float

    @property
    def advantage(self) -> float:
        return self.members - self.others


def advantage(right: Bools, members: Bools) -> Advantage:
    """right: (records,) whether each guess is; members: whether each record was in the training."""
    from scipy.stats import fisher_exact

    ins, outs = right[members], right[~members]
    table = [[int(ins.sum()), int((~ins).sum())], [int(outs.sum()), int((~outs).sum())]]
    p_value = float(fisher_exact(table, alternative="greater").pvalue)
    return Advantage(float(ins.mean()), float(outs.mean()), p_value)


def without_model(texts: list[str], values: Indices, members: Bools, seed: int = 0) -> Indices:
    """The guesses of a classifier of words that has learned from the others alone, without the attribute and without any model.

    Others are guessed by classifiers that have not seen them, in five folds. A value that too few others have is not guessed.
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
