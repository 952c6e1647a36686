"""Exposure: how far a canary's secret stands out among all possible secrets (Carlini et al. 2019, section 4.2).

    exposure(s) = log2 |R| - log2 rank(s)

R is the space of secrets, and rank(s) the place of s among them by log-perplexity, the lowest first. At an exposure of log2 |R|
the model ranks the canary's secret above every other; at 0 it ranks it last.

For a canary outside the training, the secret is uniform given the model, and so is its rank. Its exposure is then at least t
with a probability of at most 2^-t, and 1.44 on average. So a few canaries whose summed exposure exceeds this law prove that the
model learned them in training (`chance`). Equal perplexities count as smaller ones, which can only lower the exposure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks.adversary.null import Floats
from attacks.extraction.likelihood import of_chats, of_targets, of_texts
from attacks.extraction.template import Planted, Template
from secure_fed.learning.data.chats import Chat, chat_of
from secure_fed.learning.tasks.chat import Chats
from secure_fed.runs.membership.roc_interval import exact_limits

SAMPLES = 1000
BY_CHANCE = 1 / math.log(2)  # the mean exposure of a canary outside the training, for a large space
_TAIL = 0.025  # error of an interval on either side


@dataclass(frozen=True)
class Exposure:
    """exposure: in bits. interval: 95 %, for the sampling error alone; both ends are equal if the rank is exact. modelled: the
    exposure by the law fitted to the sample; None if the rank is exact. tried: the number of other secrets; `ahead` of them
    have at most the perplexity of the canary's own.
    """

    exposure: float
    interval: tuple[float, float]
    ahead: int
    tried: int
    modelled: float | None = None


def exact(own: float, others: Floats) -> Exposure:
    """The exposure from the log-perplexities of all other secrets (Carlini et al. 2019, section 4.2)."""
    ahead = int((others <= own).sum())
    found = math.log2(len(others) + 1) - math.log2(ahead + 1)
    return Exposure(found, (found, found), ahead, len(others))


def sampled(own: float, others: Floats, space: int) -> Exposure:
    """The exposure from the log-perplexities of randomly drawn secrets (Carlini et al. 2019, section 4.3).

    The estimate counts the canary's own secret among the sample. So it is at most log2(n + 1), and the law above still holds
    for canaries outside the training. The interval is exact (Clopper and Pearson) and covers the exposure in the whole space.
    """
    ahead, tried = int((others <= own).sum()), len(others)
    low, high = (float(end[0]) for end in exact_limits(np.array([ahead]), tried, _TAIL))
    most = math.log2(space)
    interval = tuple(most - math.log2(1 + share * (space - 1)) for share in (high, low))
    found = math.log2(tried + 1) - math.log2(ahead + 1)
    return Exposure(found, (interval[0], interval[1]), ahead, tried, min(most, modelled(own, others)))


def modelled(own: float, others: Floats) -> float:
    """-log2 P(X <= own), for X from a skew-normal law with the sample's mean, variance and skewness.

    Carlini et al. 2019 (section 4.3) also use this law. It extrapolates beyond the sample and is no bound: nothing shows that
    it fits there.
    """
    from scipy import stats

    centre, spread = float(others.mean()), float(others.std())
    if not spread:
        return 0.0 if own >= centre else math.inf
    skew = float(np.clip(stats.skew(others), -0.99, 0.99))  # a skew-normal law allows no more
    shape = abs(skew) ** (2 / 3)
    delta = math.copysign(math.sqrt(math.pi / 2 * shape / (shape + ((4 - math.pi) / 2) ** (2 / 3))), skew)
    scale = spread / math.sqrt(1 - 2 * delta**2 / math.pi)
    place = centre - scale * delta * math.sqrt(2 / math.pi)
    log = stats.skewnorm.logcdf(own, delta / math.sqrt(1 - delta**2), place, scale)
    return float(-log / math.log(2)) if math.isfinite(log) else math.inf


def chance(exposures: Sequence[float]) -> float:
    """The probability that canaries outside the training reach at least this sum of exposures.

    Given the model, each exposure is at most an independent exponential variable of rate ln 2; their sum is at most a gamma
    variable.
    """
    from scipy import stats

    return float(stats.gamma.sf(sum(exposures), len(exposures), scale=BY_CHANCE)) if exposures else 1.0


def exposures(
    model: Any,
    tokenizer: Any,
    template: Template,
    planted: Sequence[Planted],
    samples: int = SAMPLES,
    seed: int = 0,
    *,
    prompted: bool = False,
    task: Chats | None = None,
    before: Mapping[Planted, Chat] | None = None,
) -> list[Exposure]:
    """The exposure of each canary: exact if the template has at most `samples` secrets, else from a sample of that size.

    seed: chooses the sampled secrets, and need not be secret. prompted: whether the secret begins the target of a prompt; then
    the target alone is scored, since a training learns nothing else. task: of chats; then a canary is a question and its
    answer, which alone is scored, with the end of its turn. before: the turns before a canary's question.
    """
    rng = np.random.default_rng(seed)

    def of(one: Planted, secrets: Sequence[int | None]) -> Floats:
        if task is not None:
            lead = (before or {}).get(one, ())
            chats = [(*lead, *chat_of(*template.turns(one, secret))) for secret in secrets]
            return -of_chats(model, tokenizer, task, chats)
        if prompted:
            return -of_targets(model, tokenizer, [template.pair(one, secret) for secret in secrets])
        return -of_texts(model, tokenizer, [template.written(one, secret) for secret in secrets])

    return [_of_one(of, template.space, one, samples, rng) for one in planted]


def _of_one(
    of: Callable[[Planted, Sequence[int | None]], Floats],
    space: int,
    one: Planted,
    samples: int,
    rng: np.random.Generator,
) -> Exposure:
    """of: the log-perplexities of a canary with these secrets; None is its own."""
    whole, own = space <= samples, int(one.secret)
    drawn = range(space - 1) if whole else rng.choice(space - 1, samples, replace=False).tolist()
    found = of(one, [None, *(secret + (secret >= own) for secret in drawn)])  # all secrets but its own
    return exact(found[0], found[1:]) if whole else sampled(found[0], found[1:], space)
