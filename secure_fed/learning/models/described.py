"""A head that starts from descriptions of the classes instead of random numbers, in a model whose head reads the mean.

    w_c = 20 / r (u_c - u),    b = 0

m_c is the vector that the head reads of the description of class c, r the mean length of all m_c, u_c = m_c / |m_c|, and u the
mean of all u_c, whose subtraction changes no probability and keeps the weights small. So a text scores highest for the class
whose description is most similar to it, by cosine. 20 is the factor with which sentence encoders are usually trained on
cosines. Descriptions are public, like the names of the classes, so they cost no privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unicodedata import normalize

import torch
from torch import Tensor

from secure_fed.config import ModelConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.device_map import device_of
from secure_fed.learning.models.mean_pooled import MeanPooledForSequenceClassification

_SCALE = 20.0


@torch.no_grad()
def start_from(
    model: MeanPooledForSequenceClassification, tokenizer: Any, config: ModelConfig, label_names: Sequence[str]
) -> None:
    """Set the head of the model from `config.descriptions`, cut like every text."""
    texts = in_order(config.descriptions, label_names)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=config.max_length)
    model.classifier.weight.copy_(rows(model.read(**inputs.to(device_of(model)))[0]))
    model.classifier.bias.zero_()


def rows(read: Tensor) -> Tensor:
    """(classes, d) w, from what the head reads of each description, (classes, d)."""
    units = torch.nn.functional.normalize(read, dim=1)
    found: Tensor = _SCALE / read.norm(dim=1).mean() * (units - units.mean(0))
    return found


def in_order(descriptions: Sequence[str], names: Sequence[str]) -> list[str]:
    """The descriptions, each "class=description", in the order of the classes; ConfigError unless each class has one."""
    found: dict[str, str] = {}
    for one in descriptions:
        name, text = (normalize("NFC", part.strip()) for part in one.partition("=")[::2])
        if name not in names or name in found or not text:
            raise ConfigError(
                f"model.descriptions has {one!r:.100}; give one 'class=description' for each class: {', '.join(names):.200}"
            )
        found[name] = text
    if missing := [name for name in names if name not in found]:
        raise ConfigError(f"model.descriptions has none for {', '.join(missing):.200}; give one for each class")
    return [found[name] for name in names]
