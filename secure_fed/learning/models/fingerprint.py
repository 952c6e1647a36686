"""A digest by which a resumed run, and an exported adapter, know the base model that they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Container

import torch
from torch import nn


def of_model(model: nn.Module, but: Container[str]) -> str:
    """SHA-256 over the name, type, shape and bits of every parameter that `but` does not name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if name in but:
            continue
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
