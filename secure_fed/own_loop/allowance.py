"""How far the other examples of a batch may move an example's gradient, and what that adds to a step's sensitivity.

A step adds clipped gradients. One example more in its batch adds its own, of norm C at most, and moves the others as far as
they depend on the batch: not at all in exact arithmetic, since losses that couple examples are refused, but in float32 the
last bits do. A rehearsal accepts an example whose clipped gradient in a batch is within t C of its clipped gradient alone, so
that two batches are within 2 t C of each other. With m examples in a batch, adding or removing one moves the sum by at most

    C (1 + s),    s = 2 m t,

and the noise is z C (1 + s). t and m are functions of settings alone, never of gradients:

    t = max(.005 / m, 64 u)       u: the machine epsilon of the model's type; so s is .01 up to m of about 650 in float32
    m                             the largest draw, but for a probability that adds at most delta / 10^6 to delta (`_most`)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from secure_fed.own_loop.terms import Terms

_SLACK = 0.01
_ROUNDED = 64  # machine epsilons: some ten are usual for the gradients of a deep transformer in different batches
_UNLIKELY = 1e-6  # of delta


@dataclass(frozen=True)
class Allowance:
    """clip_norm: C. most: m. tolerance: t, in clip norms."""

    clip_norm: float
    most: int
    tolerance: float

    @classmethod
    def of(cls, terms: Terms, epsilon: float, clip_norm: float, rounding: float = 2.0**-23) -> Allowance:
        """epsilon: at least that of all steps. rounding: u, by default that of float32."""
        most = _most(terms, epsilon)
        return cls(clip_norm, most, max(_SLACK / 2 / most, _ROUNDED * rounding))

    @property
    def slack(self) -> float:
        """s."""
        return 2 * self.most * self.tolerance

    @property
    def sensitivity(self) -> float:
        """C (1 + s)."""
        return self.clip_norm * (1 + self.slack)


def _most(terms: Terms, epsilon: float) -> int:
    """The least m for which Bernstein's inequality bounds the probability of a larger draw by p, or all examples.

    T steps whose sensitivity holds but with probability p each are (epsilon, delta + (1 + e^epsilon) T p)-private if they are
    (epsilon, delta)-private whenever it holds. p is such that the second term is at most delta / 10^6.
    """
    expected = terms.sampler.expected
    margin = math.log(2 * terms.count / (terms.delta * _UNLIKELY)) + epsilon  # -ln p or more
    beyond = margin / 3 + math.sqrt((margin / 3) ** 2 + 2 * margin * expected)
    return math.ceil(min(float(terms.examples), expected + beyond))
