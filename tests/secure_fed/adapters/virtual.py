"""Shared by the tests of virtual tokens: small models whose logits differ, an encoder written out, models for several tasks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
)

from tests.secure_fed import small_models

TASKS = {
    "tokens": AutoModelForTokenClassification,
    "answers": AutoModelForQuestionAnswering,
    "words": AutoModelForCausalLM,
}


def lively(model: nn.Module) -> nn.Module:
    """The model in float64, with weights so large that the logits depend visibly on the text."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)
    return model.double().eval()


def made(architecture: str) -> nn.Module:
    return lively(small_models.make(architecture))


def for_task(architecture: str, task: str) -> nn.Module:
    """A model of the same shape with the task's head."""
    config: Any = small_models.make(architecture).config
    config.num_labels = 2 if task == "answers" else small_models.LABELS
    torch.manual_seed(0)
    model: nn.Module = TASKS[task].from_config(config)
    return lively(model)


def texts() -> list[Tensor]:
    """The texts of `small_models.batch` as separate (1, L) tensors without padding."""
    batch = small_models.batch()
    return [ids[mask.bool()][None] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def base_of(model: Any) -> Any:
    return getattr(model, model.base_model_prefix)


def by_head(x: Tensor, heads: int) -> Tensor:
    """(T, heads * d) -> (heads, T, d)."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1)


def bert_encoded(bert: Any, embedded: Tensor, before: Tensor | None = None, first: int = 0) -> Tensor:
    """BERT's layers written out for one text: word embeddings (T, H) at positions from `first` to hidden states (T, H).

    before: (layers, 2, heads, p, d), keys and values in front of the keys and values of the text.
    """
    names = bert.embeddings
    places = names.position_embeddings.weight[first : first + len(embedded)]
    x = names.LayerNorm(embedded + places + names.token_type_embeddings.weight[0])
    for number, layer in enumerate(bert.encoder.layer):
        own, heads = layer.attention.self, bert.config.num_attention_heads
        q, k, v = (by_head(part(x), heads) for part in (own.query, own.key, own.value))
        if before is not None:
            k, v = torch.cat([before[number, 0], k], 1), torch.cat([before[number, 1], v], 1)
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        mixed = (weights @ v).transpose(0, 1).flatten(1)
        x = layer.attention.output.LayerNorm(x + layer.attention.output.dense(mixed))
        x = layer.output.LayerNorm(x + layer.output.dense(functional.gelu(layer.intermediate.dense(x))))
    return x


def bert_logits(model: Any, hidden: Tensor) -> Tensor:
    """(classes,): the classifier on the pooler's output for the first token."""
    scores: Tensor = model.classifier(model.bert.pooler.dense(hidden[0]).tanh())
    return scores
