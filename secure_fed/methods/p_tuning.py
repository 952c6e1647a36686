"""P-tuning: a small network makes the embeddings of virtual tokens; the network trains and is averaged.

Liu et al., "GPT Understands, Too" (arXiv 2103.10385): a network computes each of the embeddings h_1 .. h_p in front of the text
from a trained embedding.

The network is PEFT's default, an MLP of three layers as wide as the model. Its parameters are averaged, as in FedAvg: the mean
is exact in them, though the mean network's prompt is not the mean of the clients' prompts.

Deviations: the paper's network is an LSTM and an MLP (`EncodedPromptTokens(network="LSTM")`); all virtual tokens stand in front
of the text, where the paper's templates also put some behind it; the head trains too.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.prompts import EncodedPromptTokens
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

CARD = Card(
    name="p_tuning",
    paper="Liu et al., arXiv 2103.10385",
    travels="the network that makes virtual tokens, head",
    mean_exact=True,
    options=("prompt_length",),
)


def build(run: RunConfig) -> Averaged:
    return Averaged(EncodedPromptTokens(run.method.prompt_length, run.model.max_length), CARD)
