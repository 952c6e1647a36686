"""Log-likelihoods of token sequences under a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.any_model.signals import Floats
from secure_fed.learning.data.encode import IGNORED, pad_id

_TOGETHER = 64  # texts in a batch: a large vocabulary takes much memory for each


@torch.no_grad()
def log_likelihoods(model: Any, ids: Tensor, labels: Tensor) -> Floats:
    """(B,) sums of log p(token | tokens before it), in nats, over the places of `labels` (B, L) that are not IGNORED.

    ids: (B, L), padded on the right with any token, which a causal model's earlier places do not see.
    """
    scores = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float().log_softmax(2)
    targets = labels[:, 1:]
    said = scores.gather(2, targets.clamp_min(0)[..., None])[..., 0]
    sums: Floats = said.masked_fill(targets == IGNORED, 0.0).double().sum(1).cpu().numpy()
    return sums


def of_texts(model: Any, tokenizer: Any, texts: Sequence[str]) -> Floats:
    """(texts,) the log-likelihood of each, in nats: minus the log-perplexity of Carlini et al. 2019 (section 4.1)."""
    read = [tokenizer(text)["input_ids"] for text in texts]
    by_length = sorted(range(len(read)), key=lambda index: len(read[index]))
    found = np.zeros(len(read))
    device, pad = next(model.parameters()).device, pad_id(tokenizer)
    for start in range(0, len(read), _TOGETHER):
        some = by_length[start : start + _TOGETHER]
        width = len(read[some[-1]])
        ids = torch.tensor([read[index] + [pad] * (width - len(read[index])) for index in some], device=device)
        labels = ids.clone()
        for row, index in enumerate(some):
            labels[row, len(read[index]) :] = IGNORED
        found[some] = log_likelihoods(model, ids, labels)
    return found
