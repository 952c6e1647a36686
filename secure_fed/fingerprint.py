"""Digests by which a resumed run knows the data and the base model it was begun with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container

import torch
from torch import nn

from secure_fed.data.rows import Rows


def of_rows(*parts: Rows) -> str:
    """SHA-256 over every text, label and owner, in order."""
    digest = hashlib.sha256()
    for rows in parts:
        columns = (rows.label_names, rows.text, rows.text_b, rows.label, rows.client)
        for column in (*columns, *((rows.group,) if rows.group is not None else ())):
            digest.update(json.dumps(column).encode())
    return digest.hexdigest()


def of_model(model: nn.Module, but: Container[str]) -> str:
    """SHA-256 over the name, type, shape and bits of every parameter that `but` does not name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if name in but:
            continue
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
