"""FedLoRA: A and B averaged separately, the common baseline.

Trautmann, Hales and Volk, "Aggregating Low Rank Adapters in Federated Fine-tuning" (2025), section III.A, call it vanilla
federated averaging; FeDeRA (Yan et al., arXiv 2404.18848) calls it FedLR. It releases, per adapted matrix, the mean change of
A and the mean change of B, so that eq. (1) without its tilde holds:

    A' = A + mean(A_i - A),   B' = B + mean(B_i - B),   but   B' A' != mean(B_i A_i).

The gap is the covariance over clients of B_i and A_i. Under noise it contains a product of two noises (eq. 2, 3).

Deviation: any number of clients and any weights, where the paper writes two clients of weight one half each.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter
from secure_fed.methods.averaged import AveragedLora
from secure_fed.methods.method import Card

CARD = Card(
    name="fedlora",
    paper="Trautmann et al., 2025, section III.A; FedLR in Yan et al., arXiv 2404.18848",
    travels="A, B, head",
    mean_exact=False,
    options=(*LORA_OPTIONS, "ranks"),
)


def build(run: RunConfig) -> AveragedLora:
    return AveragedLora(LoraAdapter.of(run.method), CARD)
