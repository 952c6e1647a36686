"""BitFit (Ben Zaken et al., 2022, arXiv 2106.10199, section 3): the model's biases train, and the head.

FeDeRA (Yan et al., arXiv 2404.18848, section 5.1) calls it FedBF.

    b' = b + mean(b_i - b)   over every bias b, of linear layers and of normalisations.

Guarantee: the mean is exact. A model without biases (LLaMA) is refused.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.full import Biases
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

CARD = Card(
    name="bitfit",
    paper="Ben Zaken et al., arXiv 2106.10199; FedBF in Yan et al., arXiv 2404.18848",
    travels="biases, head",
    mean_exact=True,
)


def build(run: RunConfig) -> Averaged:
    return Averaged(Biases(), CARD)
