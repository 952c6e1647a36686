"""Language modelling: every token is predicted from the tokens before it, in texts, or in the targets of prompts.

With `data.text_b` a row is a prompt and its target (instruction data), and the prompt is read but not learned, unless
`data.learn_prompt` is set. The loss of an example is the mean over its tokens, so that its weight does not depend on its
length; perplexity is computed over all tokens together. Texts are cut to `model.max_length` tokens. The texts are private.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secure_fed.config import DataConfig
from secure_fed.learning.data.encode import IGNORED, Collate, Encoded, Item, aligned, pad_id, per_token, require_room
from secure_fed.learning.data.rows import Rows, Table, Vocabulary, columns_of
from secure_fed.learning.tasks.next_tokens import surprise, token_figures, token_losses
from secure_fed.learning.tasks.task import Answer, Loss, Metrics, Task, finite

_LARGEST = 700.0  # exp() of more overflows a float


@dataclass(frozen=True)
class CausalLM(Task):
    """`Rows.text` is the text, or the prompt of the target `Rows.text_b`. Its models write texts (`config.settings.WRITE`)."""

    learn_prompt: bool = False

    auto = "AutoModelForCausalLM"
    keeps_head = True
    unlabelled = None

    @property
    def title(self) -> str:
        return "language modelling of targets" if self.columns.text_b else "language modelling"

    @property
    def learned(self) -> tuple[str, ...]:
        """The target, where a row has one: a prompt may be empty, and alone it is not learned."""
        return (self.columns.text_b or self.columns.text,)

    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Sequence[Any]:
        return [None] * sum(map(len, tables))

    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        require_room(tokenizer, max_length, pair=False)
        prompted = rows.text_b is not None
        prompts, targets = (rows.text, rows.text_b or ()) if prompted else ([""] * len(rows), rows.text)
        items = list(
            continuations(tokenizer, prompts, targets, max_length, ends=prompted, learn_prompt=self.learn_prompt)
        )
        return Encoded({name: tuple(item[name] for item in items) for name in ("input_ids", "labels")})

    def prompts(self, tokenizer: Any, rows: Rows, max_length: int) -> list[list[int]]:
        """The token ids, from 1 to `max_length`, after which the model writes its answer to each row: each text without the
        special tokens that end it; an empty one becomes the token that begins a text.

        Of a text that is too long the last tokens stay, and the special tokens that begin it.
        """
        begins = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        start = [one for one in begins if one is not None][:1]
        found = []
        for ids, spans in aligned(tokenizer, rows.text):
            text = np.flatnonzero(spans[:, 1] > spans[:, 0])
            lead, end = (int(text[0]), int(text[-1]) + 1) if len(text) else (0, 1)
            dropped = min(max(0, end - max_length), end - lead)
            found.append([*ids[:lead].tolist(), *ids[lead + dropped : end].tolist()] or start)
        return found

    def references(self, rows: Rows) -> Sequence[str]:
        """The right answer to each row, as text: the targets."""
        return rows.text_b or ()

    def stops(self, tokenizer: Any) -> list[int]:
        """The tokens that end an answer."""
        return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def collate(self, tokenizer: Any) -> Collate:
        return Collate(pad_id(tokenizer), per_token)

    def loss(self, label_names: Sequence[str]) -> Loss:
        return loss

    def metrics(self, label_names: Sequence[str]) -> Metrics:
        return metrics

    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """The log-likelihood of the text (or the target), the number of its tokens, and their perplexity."""
        losses, counted = token_losses(model, batch)
        sums, counts = finite(-losses).cpu().double().sum(1).tolist(), counted.sum(1).tolist()
        return [
            {"log_likelihood": round(total, 6), "tokens": count, "perplexity": _plain(perplexity(-total, count))}
            for total, count in zip(sums, counts, strict=True)
        ]


def build(data: DataConfig) -> CausalLM:
    return CausalLM(columns_of(data), data.learn_prompt)


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
    joined = []
    for prompt, target in zip(prompts, targets, strict=True):
        apart = prompt and target and not prompt[-1].isspace() and not target[0].isspace()
        joined.append(prompt + " " if apart else prompt)
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
        if len(kept):
            yield {"input_ids": ids[kept], "labels": labels[kept]}
        else:  # one padding token, because a model cannot read an empty sequence
            yield {"input_ids": np.array([pad_id(tokenizer)], dtype=np.int32), "labels": np.array([IGNORED])}


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B,) means over an example's labelled tokens; 0 if it has none."""
    losses, counted = token_losses(model, batch)
    return losses.sum(1) / counted.sum(1).clamp(min=1)


def metrics(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """perplexity, exp of the mean over all tokens; accuracy, the share of tokens predicted as most likely; the mean loss."""
    total = right = tokens = 0.0
    means = []
    for batch in batches:
        (losses, best), counted = token_figures(model, batch, _figures)
        means.append(losses.sum(1) / counted.sum(1).clamp(min=1))
        total += float(losses.cpu().double().sum())
        right += float(best.sum())
        tokens += float(counted.sum())
    return {
        "accuracy": right / tokens if tokens else math.nan,
        "perplexity": perplexity(total, tokens),
        "loss": float(torch.cat(means).mean()),
    }


def _figures(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's negative log-likelihood, and whether it is the most likely one."""
    return surprise(scores, targets), scores.argmax(1) == targets


def perplexity(total: float, tokens: float) -> float:
    """exp(total / tokens); not-a-number without tokens, and infinite beyond the largest float."""
    mean = total / tokens if tokens else math.nan
    return math.exp(mean) if not mean > _LARGEST else math.inf


def _plain(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
