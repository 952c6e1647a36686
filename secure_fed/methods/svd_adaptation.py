"""SVD adaptation: B, E and A of a change B E A with diagonal E, each averaged.

Wu, Hu, Min and Wang, "Adaptive Rank Allocation for Federated Parameter-Efficient Fine-Tuning of Language Models"
(arXiv 2501.14406), section IV-A and eq. (2): W = W_pre + B E A. The paper uses it as an ablation of FedARA and calls it FedSVD;
it is not the FedSVD of arXiv 2505.12805 (`fedsvd.py`). A and B are Gaussian and E is zero, so that the change starts at zero
with nonzero A and B, and each rank has a trainable size. A and B are not required to be orthogonal.

The product of the mean factors is not the mean product: the gap of averaged LoRA (`fedlora`), with three factors.

Settled here: the change is scaled by alpha / rank as in LoRA (the paper fixes alpha = 16, the usual value), and the Gaussians
have the standard deviation 0.02 of AdaLoRA (Zhang et al., 2023), which the paper extends. With E zero between factors of 0.02
the change grows with the third power of rate times steps, so that a short run needs a higher rate than LoRA (`REACH`).
"""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, LoraForm
from secure_fed.learning.models.adapters.triplet import TripletAdapter
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card
from secure_fed.tensors.tensors import Tensors

REACH = 0.8  # docs/learning_rates.md
CARD = Card(
    name="svd_adaptation",
    paper="Wu et al., arXiv 2501.14406, section IV-A (FedSVD there)",
    travels="B, E, A, head",
    mean_exact=False,
    options=LORA_OPTIONS,
    reach=REACH,
)


def build(run: RunConfig) -> SvdAdaptation:
    return SvdAdaptation(TripletAdapter(LoraAdapter.of(run.method)), CARD)


@dataclass(frozen=True)
class SvdAdaptation(Averaged):
    """Averages B, E, A and the head."""

    adapter: TripletAdapter

    def as_lora(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """LoRA factors: A unchanged, and B E in place of B."""
        return self.adapter.form(tensors)
