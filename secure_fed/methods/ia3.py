"""IA3 (Liu et al., 2022, arXiv 2205.05638, section 3.3): vectors that scale keys, values and the feed-forward's activations.

    l' = l + mean(l_i - l)   over every vector l, and the head.

Guarantee: the mean of the vectors is exact.

Deviations. The scaled layers are those of PEFT's table, with DistilBERT's added (`adapters/scaling.py`). The head trains too;
Liu et al. have no head, since their model answers in text.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.scaling import Scales
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

CARD = Card(
    name="ia3",
    paper="Liu et al., arXiv 2205.05638",
    travels="scaling vectors, head",
    mean_exact=True,
    lr=1.5e-2,
)


def build(run: RunConfig) -> Averaged:
    return Averaged(Scales(), CARD)
