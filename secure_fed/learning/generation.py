"""Texts that a causal language model writes: new tokens after prompts of token ids.

transformers' `generate` keeps the keys and values of earlier tokens, so that each new token is one short pass, in batches that
are padded on the left. No list says for which models this gives the scores of the plain call: each call of `generated` compares
the two once, on nobody's tokens. They differ with virtual tokens, which stand before whole texts. Such a model reads the whole
text again for every token, in batches padded on the right, where no token of a text sees the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secure_fed.activity import Activity, activity
from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.virtual_tokens import positions_left
from secure_fed.learning.models.devices import device_of
from secure_fed.learning.tasks.next_tokens import last_scores
from secure_fed.learning.tasks.task import finite, logits

# float32 scores (B, V) of new tokens, the rows of the batch that they belong to, and the number of the token -> (B,) tokens
Choose = Callable[[Tensor, Sequence[int], int], Tensor]
Ids = Sequence[int]


@torch.no_grad()
def generated(
    model: nn.Module,
    prompts: Sequence[Ids],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
    stops: Ids = (),
) -> list[list[int]]:
    """The new tokens after each prompt, in order: up to `max_new_tokens`, or up to the first of `stops`, which is left out.

    These are the most likely tokens, or with a temperature above 0 draws from softmax(scores / temperature). A draw takes one
    uniform number, a function of the seed, the prompt's place and the token's, so an answer does not depend on the other
    prompts of its batch, except for rounding. Prompts of like length share a batch. A prompt has at least one token, and at
    most those of `prompt_room`.
    """
    shape = (len(prompts), max_new_tokens) if temperature else (len(prompts), 0)
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))  # too little memory shows at once
    written: list[list[int]] = [[] for _ in prompts]
    model.eval()
    with activity("writing texts") as now:
        write = _with_cache if prompts and max_new_tokens and keeps_cache(model) else _without_cache
        for start in range(0, len(prompts), batch_size):
            some = by_length[start : start + batch_size]
            now.total = max_new_tokens
            now.says(f"writing texts {start + 1} to {start + len(some)} of {len(prompts)}, tokens")
            choose = partial(_chosen, temperature, uniform[some], now)
            found = write(model, [prompts[index] for index in some], max_new_tokens, choose, stops)
            for index, own in zip(some, found, strict=True):
                written[index] = own
    return written


def prompt_room(model: nn.Module, max_length: int, max_new_tokens: int, setting: str) -> int:
    """The most tokens of a prompt: `max_length`, or fewer where prompt and answer together need more positions than there are.

    ConfigError about `setting`, the number of new tokens, if they leave no room.
    """
    limit = positions_left(model)
    if limit is not None and max_new_tokens >= limit:
        raise ConfigError(
            f"{setting} is {max_new_tokens}, and the model has positions for {limit} tokens, the prompt's among them: lower it"
        ).about(setting, max_new_tokens, f"below {limit}")
    return max_length if limit is None else min(max_length, limit - max_new_tokens)


def _chosen(
    temperature: float, uniform: Tensor, now: Activity, scores: Tensor, rows: Sequence[int], number: int
) -> Tensor:
    """A `Choose`; see `generated`. uniform: (B, tokens), or nothing at temperature 0."""
    now.step()
    finite(scores)
    if not temperature:
        return scores.argmax(1)
    below = (scores.cpu().double() / temperature).softmax(1).cumsum(1)
    drawn = torch.searchsorted(below, uniform[rows, number, None] * below[:, -1:], right=True)
    return drawn[:, 0].clamp(max=scores.shape[1] - 1).to(scores.device)


def _with_cache(
    model: nn.Module, prompts: Sequence[Ids], count: int, choose: Choose, stops: Ids, width: int = 0
) -> list[list[int]]:
    """By transformers' `generate`, without the settings for generation that the model's folder may have."""
    from transformers import GenerationConfig, LogitsProcessorList

    # Without PEFT's wrapper, whose adapters are inside the model.
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    batch = _padded(prompts, device_of(model), width=width, left=True)
    begun = batch["input_ids"].shape[1]

    def only(before: Tensor, scores: Tensor) -> Tensor:
        token = choose(scores.float(), range(len(scores)), before.shape[1] - begun)
        return torch.full_like(scores, -math.inf).scatter_(1, token[:, None], 0.0)

    settings = GenerationConfig(
        max_new_tokens=count, do_sample=False, pad_token_id=_ANY, eos_token_id=list(stops) or None, use_cache=True
    )
    theirs, causal.generation_config = causal.generation_config, GenerationConfig()
    try:
        found = causal.generate(**batch, generation_config=settings, logits_processor=LogitsProcessorList([only]))
    finally:
        causal.generation_config = theirs
    return [_until(own, stops) for own in found[:, begun:].tolist()]


def _without_cache(model: nn.Module, prompts: Sequence[Ids], count: int, choose: Choose, stops: Ids) -> list[list[int]]:
    """The whole text is read again for every token."""
    texts = [list(own) for own in prompts]
    going = list(range(len(texts)))
    for number in range(count):
        if not going:
            break
        batch = _padded([texts[row] for row in going], device_of(model))
        tokens = choose(last_scores(model, batch), going, number).tolist()
        for row, token in zip(going, tokens, strict=True):
            texts[row].append(token)
        going = [row for row, token in zip(going, tokens, strict=True) if token not in stops]
    return [_until(own[len(prompt) :], stops) for own, prompt in zip(texts, prompts, strict=True)]


@torch.no_grad()
def keeps_cache(model: nn.Module) -> bool:
    """Whether `generate` computes the scores of the plain call, behind padding and beside cached tokens.

    Compared on a short text of nobody's tokens, at its end and one token later, with the tolerance that rounding needs.
    """
    seen: list[Tensor] = []

    def choose(scores: Tensor, rows: Sequence[int], number: int) -> Tensor:
        seen.append(scores)
        return torch.full((len(scores),), _TEXT[-1], device=scores.device)

    model.eval()
    try:
        _with_cache(model, [_TEXT[:-1]], 2, choose, (), width=len(_TEXT) + 2)
        plain = logits(model, _padded([_TEXT], device_of(model)))[:, -2:]
    except Exception:  # of any kind: the model does not generate so, and the plain call tells whether it works at all
        return False
    types = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    rounding = max(torch.finfo(dtype).eps for dtype in types) ** 0.5 * float(plain.abs().max())
    return bool((torch.stack(seen, 1) - plain).abs().max() <= rounding)


def _padded(texts: Sequence[Ids], device: torch.device, *, width: int = 0, left: bool = False) -> dict[str, Tensor]:
    """The texts as a batch of at least `width` tokens, padded on the right, or on the left."""
    width = max(width, *map(len, texts))
    ids = torch.full((len(texts), width), _ANY, device=device)
    real = torch.zeros_like(ids)
    for row, own in enumerate(texts):
        place = slice(width - len(own), width) if left else slice(len(own))
        ids[row, place], real[row, place] = torch.tensor(own, device=device), 1
    return {"input_ids": ids, "attention_mask": real}


def _until(tokens: list[int], stops: Ids) -> list[int]:
    """The tokens before the first of `stops`."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in stops), len(tokens))]


_ANY = 0  # a token of every vocabulary, in the place of padding, which no token of a text sees
_TEXT = (0, 1, 1, 0, 1)
