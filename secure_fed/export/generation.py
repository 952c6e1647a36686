"""Text generation by a trained language model, token by token.

Each step reads the last `max_length` tokens of the prompt and the text after it again, as in training, and without a cache:
adapters with virtual tokens cannot use cached keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secure_fed.activity import activity
from secure_fed.learning.data.alignment import aligned
from secure_fed.learning.data.encode import Collate, pad_id, per_token
from secure_fed.learning.models.device_map import device_of
from secure_fed.learning.tasks.next_tokens import last_scores
from secure_fed.learning.tasks.task import finite
from secure_fed.learning.training.objective import to_device

Choose = Callable[[Tensor], int]  # the scores of all tokens (V,) -> the next token


@dataclass
class _Sequence:
    """A prompt's tokens, of which the first `lead` are special tokens, and the tokens that were generated after it."""

    prompt: list[int]
    lead: int
    written: list[int] = field(default_factory=list)
    ended: bool = False

    def read(self, max_length: int) -> list[int]:
        """The tokens that the model reads: the first `lead`, and as many of the last as `max_length` allows."""
        ids = [*self.prompt, *self.written]
        return ids if len(ids) <= max_length else [*ids[: self.lead], *ids[self.lead - max_length :]]


def chooser(temperature: float, seed: int) -> Choose:
    """The most likely token at temperature 0; else a draw from softmax(scores / temperature), seeded."""
    if not temperature:
        return lambda scores: int(scores.argmax())
    drawn = torch.Generator().manual_seed(seed)
    return lambda scores: int(torch.multinomial((scores.cpu() / temperature).softmax(0), 1, generator=drawn))


@torch.no_grad()
def continued(
    model: nn.Module, tokenizer: Any, prompts: Sequence[str], max_length: int, count: int, choose: Choose, together: int
) -> Iterator[str]:
    """The continuation of each prompt: up to `count` tokens, or up to the tokenizer's end token.

    together: prompts that are continued in common passes.
    """
    model.eval()
    begun = list(_begun(tokenizer, prompts))
    for start in range(0, len(begun), together):
        of_batch = begun[start : start + together]
        with activity(f"continuing texts {start + 1} to {start + len(of_batch)} of {len(begun)}, tokens", count) as now:
            for _ in range(count):
                now.step()
                if going := [one for one in of_batch if not one.ended]:
                    _step(model, tokenizer, going, max_length, choose)
        for one in of_batch:
            yield str(tokenizer.decode(one.written, skip_special_tokens=True))


def _step(model: nn.Module, tokenizer: Any, going: Sequence[_Sequence], max_length: int, choose: Choose) -> None:
    """Generate one token for each sequence; the end token ends its sequence."""
    read = [np.asarray(one.read(max_length), dtype=np.int32) for one in going]
    batch = Collate(pad_id(tokenizer), per_token)([{"input_ids": ids, "labels": ids} for ids in read])
    scores = finite(last_scores(model, to_device(batch, device_of(model))))
    for one, own in zip(going, scores, strict=True):
        token = choose(own)
        if token == tokenizer.eos_token_id:
            one.ended = True
        else:
            one.written.append(token)


def _begun(tokenizer: Any, prompts: Sequence[str]) -> Iterator[_Sequence]:
    """The prompts without the special tokens that end a text; an empty prompt becomes the token that begins a text."""
    for ids, spans in aligned(tokenizer, prompts):
        text = np.flatnonzero(spans[:, 1] > spans[:, 0])
        end = int(text[-1]) + 1 if len(text) else 1
        start = next(
            one for one in (tokenizer.bos_token_id, tokenizer.eos_token_id, pad_id(tokenizer)) if one is not None
        )
        yield _Sequence(ids[:end].tolist() or [start], int(text[0]) if len(text) else 0)
