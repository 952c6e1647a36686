"""The probability that members score as high above others by chance (Mann and Whitney)."""

from __future__ import annotations

import numpy as np

from attacks.adversary.null import Floats

_AT_ONCE = 100  # permutations, which bounds the memory
SHUFFLES = 1999  # the smallest p-value of tied scores is 1 / 2000: a leak even as the best of a hundred signals


def above_by_chance(members: Floats, others: Floats) -> float:
    """The one-sided p-value of the rank sum. Equal arguments give equal results.

    Without equal scores by the exact law, or its normal limit for more than eight texts on either side. Where many scores are
    equal that limit is wrong: then by `SHUFFLES` random permutations, or by all if there are fewer.
    """
    from scipy.stats import PermutationMethod, mannwhitneyu

    scores = np.concatenate([members, others])
    shuffled = PermutationMethod(n_resamples=SHUFFLES, batch=_AT_ONCE, random_state=0)
    method = "auto" if len(np.unique(scores)) == len(scores) else shuffled
    return float(mannwhitneyu(members, others, alternative="greater", method=method).pvalue)
