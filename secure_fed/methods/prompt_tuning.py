"""Prompt tuning: the embeddings of virtual tokens in front of the text train and are averaged.

Lester, Al-Rfou and Constant, "The Power of Scale for Parameter-Efficient Prompt Tuning" (EMNLP 2021, arXiv 2104.08691),
section 2: [P ; X] is read in place of X, with P (p, H) trained and X the text's embeddings. P starts as embeddings of tokens
drawn from the vocabulary (section 3.2), which the paper finds better than random numbers.

Deviations: the head trains too, while the paper's model answers in words. Tokens are drawn from the whole vocabulary, not from
the paper's 5000 most frequent, since a tokenizer need not order its tokens by frequency.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.prompts import PromptTokens
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

CARD = Card(
    name="prompt_tuning",
    paper="Lester et al., EMNLP 2021, arXiv 2104.08691",
    travels="embeddings of virtual tokens, head",
    mean_exact=True,
    options=("prompt_length",),
    lr=1.5e-2,
)


def build(run: RunConfig) -> Averaged:
    return Averaged(PromptTokens(run.method.prompt_length, run.model.max_length), CARD)
