"""Houlsby's adapters (Houlsby et al., 2019, arXiv 1902.00751, section 2.1): a bottleneck behind the attention and one
behind the feed-forward of every layer, before the residual connection. FeDeRA (Yan et al., arXiv 2404.18848, section 5.1) calls
it FedAP.

    y -> y + U gelu(D y + b_D) + b_U,    and every one of D, b_D, U, b_U is averaged.

Guarantee: the mean of the parameters is exact (the mean of the functions is not, since a function contains U times D).

Deviations. The model's LayerNorms stay frozen, where Houlsby et al. train new ones: the adapters library, with which FeDeRA and
C2A ran it, freezes them too, and only then do their counts of parameters come out. U starts at zero instead of near it, so that
the adapted model starts equal to the original; D can then be as large as a linear layer's usual weights.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.bottleneck import Bottlenecks
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

BOTTLENECK = 64

CARD = Card(
    name="adapter_houlsby",
    paper="Houlsby et al., arXiv 1902.00751; FedAP in Yan et al., arXiv 2404.18848",
    travels="down, up, head",
    mean_exact=True,
    options=("bottleneck",),
    lr=1.5e-3,
)


def build(run: RunConfig) -> Averaged:
    return Averaged(Bottlenecks(run.method.bottleneck or BOTTLENECK, ("attention", "feed_forward")), CARD)
