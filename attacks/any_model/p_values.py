"""The probability that members score as high above others by chance (Mann and Whitney)."""

from __future__ import annotations

import numpy as np

from attacks.any_model.signals import Floats

SHUFFLES = 1999  # the smallest p-value of tied scores is 1 / 2000: a leak even as the best of a hundred signals


def above_by_chance(members: Floats, others: Floats) -> float:
    """The one-sided p-value of the rank sum. Equal arguments give equal results.

    Without equal scores by the exact law, or its normal limit for more than eight texts on either side. Where many scores are
    equal that limit is wrong. Then it is the share of `SHUFFLES` random permutations, and of the given order, with as large a
    rank sum, so it is below any level with at most that probability.
    """
    from scipy.stats import mannwhitneyu, rankdata

    scores = np.concatenate([members, others])
    if len(np.unique(scores)) == len(scores):
        return float(mannwhitneyu(members, others, alternative="greater").pvalue)
    ranks, rng = rankdata(scores), np.random.default_rng(0)
    found = ranks[: len(members)].sum()
    as_large = sum(rng.permutation(ranks)[: len(members)].sum() >= found for _ in range(SHUFFLES))
    return float((1 + as_large) / (1 + SHUFFLES))
