"""Prefix tuning: keys and values in front of the text's, in every layer, train and are averaged.

Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation" (ACL 2021, arXiv 2101.00190), eq. (3): the
activations of p positions before the text are parameters P_theta, in all layers. On encoders for classification this is
P-tuning v2 (Liu et al., arXiv 2110.07602).

Deviations: the parameters are the keys and values themselves, as in P-tuning v2 and PEFT's default; in section 4.3 an MLP makes
them during training (`Prefix(projected=True)`). The head trains too.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.prefixes import Prefix
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

CARD = Card(
    name="prefix_tuning",
    paper="Li and Liang, ACL 2021, arXiv 2101.00190; P-tuning v2, Liu et al., arXiv 2110.07602",
    travels="keys and values of virtual tokens, head",
    mean_exact=True,
    options=("prompt_length",),
    lr=1.5e-2,
)


def build(run: RunConfig) -> Averaged:
    return Averaged(Prefix(run.method.prompt_length, run.model.max_length), CARD)
