"""Prompts and their continuations as sequences for a causal language model, and the likelihood of a continuation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from secure_fed.learning.data.alignment import aligned
from secure_fed.learning.data.encode import IGNORED, Item, pad_id
from secure_fed.learning.tasks.next_tokens import token_losses


def continuations(
    tokenizer: Any,
    prompts: Sequence[str],
    targets: Sequence[str],
    max_length: int,
    *,
    ends: bool = False,
    learn_prompt: bool = False,
) -> Iterator[Item]:
    """Prompt and target as one sequence; its labels are the target's tokens, with `learn_prompt` also the prompt's.

    A space separates the two, unless there is one already. With `ends` the target ends in the tokenizer's end token, instead of
    the special tokens that it adds itself. A sequence that is too long loses the prompt's beginning first, then the target's
    end.
    """
    joined = [prompt + _gap(prompt, target) for prompt, target in zip(prompts, targets, strict=True)]
    whole = aligned(tokenizer, [prompt + target for prompt, target in zip(joined, targets, strict=True)])
    end = [tokenizer.eos_token_id] if ends and tokenizer.eos_token_id is not None else []
    for prompt, (ids, spans) in zip(joined, whole, strict=True):
        text = np.flatnonzero(spans[:, 1] > spans[:, 0])
        ids = ids[: text[-1] + 1] if end and len(text) else ids
        target = text[spans[text, 1] > len(prompt)]
        labels = np.full(len(ids) + len(end), IGNORED)
        learned = text if learn_prompt else target
        labels[learned], labels[len(ids) :] = ids[learned], end
        ids = np.r_[ids, np.array(end, dtype=np.int32)]
        lead = int(text[0]) if len(text) else 0
        first = int(target[0] if len(target) else text[-1] + 1 if len(text) else 0)
        dropped = min(max(0, len(ids) - max_length), first - lead)
        kept = np.r_[:lead, lead + dropped : len(ids)][:max_length]
        yield {"input_ids": ids[kept], "labels": labels[kept]} if len(kept) else _nothing(tokenizer)


def _gap(prompt: str, target: str) -> str:
    return " " if prompt and target and not prompt[-1].isspace() and not target[0].isspace() else ""


def _nothing(tokenizer: Any) -> Item:
    """One padding token, because a model cannot read an empty sequence."""
    return {"input_ids": np.array([pad_id(tokenizer)], dtype=np.int32), "labels": np.array([IGNORED])}


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B,) means over an example's labelled tokens; 0 if it has none."""
    losses, counted = token_losses(model, batch)
    return losses.sum(1) / counted.sum(1).clamp(min=1)
