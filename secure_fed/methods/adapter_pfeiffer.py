"""Pfeiffer's adapters (Pfeiffer et al., 2021, arXiv 2005.00247): one bottleneck a layer, behind its feed-forward.

    y -> y + U relu(D y + b_D) + b_U,    and every one of D, b_D, U, b_U is averaged.

Guarantee: the mean of the parameters is exact (the mean of the functions is not, since a function contains U times D).

Deviations. The bottleneck stands at Houlsby's second place, before the residual connection and its LayerNorm; Pfeiffer et al.
have it behind both. So the two methods differ only in the number of places and in the activation, and models that normalise in
front of their blocks need no separate case. U starts at zero, so that the adapted model starts equal to the original.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.bottleneck import Bottlenecks
from secure_fed.methods.averaged import Averaged
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
