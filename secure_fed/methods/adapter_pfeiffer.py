"""Pfeiffer's adapters (Pfeiffer et al., 2021, arXiv 2005.00247): one bottleneck a layer, behind its feed-forward.

    y -> y + U relu(D y + b_D) + b_U,    and every one of D, b_D, U, b_U is averaged.

Guarantee: the mean of the parameters is exact (that of the functions is not, since a function has a product of U and D in it).

Deviations. The bottleneck stands where Houlsby's second one does, before the residual connection and its LayerNorm, where
Pfeiffer et al. have it behind both. So the two methods differ in how many places there are and in the activation alone, and
models that normalise in front of their blocks need no case of their own. U starts at zero, so that the model starts at exactly
what it was.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.bottleneck import Bottlenecks
from secure_fed.methods.averaging import Averaged
from secure_fed.methods.method import Card

BOTTLENECK = 64

CARD = Card(
    name="adapter_pfeiffer",
    paper="Pfeiffer et al., arXiv 2005.00247",
    travels="down, up, head",
    mean_exact=True,
    options=("bottleneck",),
)


def build(run: RunConfig) -> Averaged:
    return Averaged(Bottlenecks(run.method.bottleneck or BOTTLENECK, ("feed_forward",), "relu"), CARD)
