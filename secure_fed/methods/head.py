"""The head alone: the frozen encoder's features are classified, and nothing of the encoder moves. A linear probe, federated.

    h' = h + mean(h_i - h)   over every parameter h of the head, and of the modules that `method.modules_to_save` names.

The baseline that an adapter has to beat. Under privacy only a few thousand numbers are noised, so with an encoder that fits the
texts it is often the best choice (docs/private_silos.md).

Guarantee: the mean is exact. A model without a task head, which generates text, is refused unless modules are named.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.full import HeadAlone
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

CARD = Card(
    name="head",
    paper="the baseline of training no adapter",
    travels="head",
    mean_exact=True,
    head_factor=1.0,
    lr=1.5e-2,  # between the best rates for MiniLM, 0.03 at its width of 384, and for the built-in model, 0.005
)


def build(run: RunConfig) -> Averaged:
    return Averaged(HeadAlone(), CARD)
