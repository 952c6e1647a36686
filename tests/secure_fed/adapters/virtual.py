"""Small models whose logits differ visibly, for several tasks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering, AutoModelForTokenClassification

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
