"""Losses of examples under a model, and a language model's log-likelihoods of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.adversary.null import Floats
from secure_fed.errors import ModelError
from secure_fed.learning.data.encode import IGNORED, Encoded, batches
from secure_fed.learning.tasks.next_tokens import rows_together, token_figures
from secure_fed.learning.tasks.task import Task
from secure_fed.learning.training.objective import to_device

BATCH = 16
_PREDICTED_FROM = {"AutoModelForCausalLM": 1, "AutoModelForTokenClassification": 0}  # place of the first labelled token


@dataclass(frozen=True)
class Tokens:
    """A language model's predictions of a text's tokens, each from the tokens before it.

    said: (T,) the log-likelihood of each token. mean, deviation: (T,) mean and standard deviation of the log-likelihood of a
    token drawn from the model's distribution at that place.
    """

    said: Floats
    mean: Floats
    deviation: Floats


@torch.no_grad()
def losses_of(model: Any, task: Task, tokenizer: Any, examples: Encoded, label_names: Sequence[str]) -> Floats:
    """(examples,) the task's loss of each example."""
    loss, device = task.loss(label_names), next(model.parameters()).device
    found = np.zeros(len(examples))
    with rows_together():
        for batch in batches(examples, BATCH, task.collate(tokenizer), None):
            found[batch.indices] = loss(model, to_device(batch.inputs, device)).double().cpu().numpy()
    require_numbers(found)
    return found


@torch.no_grad()
def tokens_of(model: Any, task: Task, tokenizer: Any, examples: Encoded, size: int = BATCH) -> list[Tokens]:
    """The log-likelihoods of every predicted token, for each example."""
    found: dict[int, Tokens] = {}
    device = next(model.parameters()).device
    for batch in batches(examples, size, task.collate(tokenizer), None):
        with rows_together():
            parts, there = token_figures(model, to_device(batch.inputs, device), _figures)
        for row, index in enumerate(batch.indices.tolist()):
            found[index] = Tokens(*(part[row][there[row]].double().cpu().numpy() for part in parts))
    tokens = [found[index] for index in range(len(examples))]
    require_numbers(np.array([one.said.sum() + one.mean.sum() + one.deviation.sum() for one in tokens]))
    return tokens


def _figures(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p of each target, and the mean and the standard deviation of log p for tokens drawn by p."""
    log = scores.log_softmax(1)
    said = log.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    mean, square = _moments(log)
    return said, mean, (square - mean.square()).clamp_min(0).sqrt()


def _moments(log: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) means of log p and of its square, for tokens drawn by p; log: (N, V). A token with p = 0 adds nothing."""
    p = log.exp()
    weighted = torch.xlogy(p, p)
    return weighted.sum(-1), torch.xlogy(weighted, p).sum(-1)


def predicted(task: Task, examples: Encoded) -> list[int]:
    """The indices of the examples with a token to predict. The loss of the others is 0, as of a text known by heart."""
    if (first := _PREDICTED_FROM.get(task.auto)) is None:
        return list(range(len(examples)))
    return [index for index, own in enumerate(examples.columns["labels"]) if (own[first:] != IGNORED).any()]


def require_numbers(losses: Floats) -> None:
    """ModelError if a text's loss is not a number, because no attack could rank it."""
    if broken := int(np.isnan(losses).sum()):
        raise ModelError(
            f"the model gives {broken} of {len(losses)} texts a loss that is not a number (NaN): its weights are damaged, or "
            "they overflow in the precision that they are stored in; give a model that was saved whole, in float32"
        )
