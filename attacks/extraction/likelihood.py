"""Log-likelihoods of token sequences under a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.adversary.null import Floats
from attacks.any_model.likelihood import require_numbers
from secure_fed.learning.data.chats import Chat
from secure_fed.learning.data.encode import IGNORED, pad_id
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.tasks.chat import Chats
from secure_fed.learning.tasks.continuation import continuations
from secure_fed.learning.tasks.next_tokens import rows_together, token_losses

_UNCUT = 2**30  # tokens
_TOGETHER = 64  # texts in a batch


@torch.no_grad()
def log_likelihoods(model: Any, ids: Tensor, labels: Tensor) -> Floats:
    """(B,) sums of log p(token | tokens before it), in nats, over the places of `labels` (B, L) that are not IGNORED.

    ids: (B, L), padded on the right with any token, which a causal model's earlier places do not see.
    """
    with rows_together():
        losses, _ = token_losses(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    sums: Floats = -losses.double().sum(1).cpu().numpy()
    return sums


def of_texts(model: Any, tokenizer: Any, texts: Sequence[str]) -> Floats:
    """(texts,) the log-likelihood of each, in nats: minus the log-perplexity of Carlini et al. 2019 (section 4.1)."""
    read = [tokenizer(text)["input_ids"] for text in texts]
    return _of_items(model, tokenizer, read, read)


def of_targets(model: Any, tokenizer: Any, rows: Sequence[tuple[str, str]]) -> Floats:
    """(rows,) the log-likelihood of the target after the prompt, in nats; each row is joined as for a training."""
    prompts, targets = zip(*rows, strict=True)
    items = list(continuations(tokenizer, prompts, targets, _UNCUT, ends=True))
    return _of_items(model, tokenizer, *([one[part].tolist() for one in items] for part in ("input_ids", "labels")))


def of_chats(model: Any, tokenizer: Any, task: Chats, chats: Sequence[Chat]) -> Floats:
    """(chats,) the log-likelihood of the assistant's turns, in nats, as a training learns them."""
    found = task.encode(tokenizer, Rows(chats, (None,) * len(chats), ()), _UNCUT).columns
    return _of_items(model, tokenizer, *([own.tolist() for own in found[part]] for part in ("input_ids", "labels")))


def _of_items(model: Any, tokenizer: Any, ids: Sequence[list[int]], labels: Sequence[list[int]]) -> Floats:
    """(items,) the log-likelihood of each item's labels."""
    by_length = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    found = np.zeros(len(ids))
    device, pad = next(model.parameters()).device, pad_id(tokenizer)
    for start in range(0, len(ids), _TOGETHER):
        some = by_length[start : start + _TOGETHER]
        width = len(ids[some[-1]])
        filled = (
            torch.tensor([part[index] + [fill] * (width - len(part[index])) for index in some], device=device)
            for part, fill in ((ids, pad), (labels, IGNORED))
        )
        found[some] = log_likelihoods(model, *filled)
    require_numbers(found)
    return found
