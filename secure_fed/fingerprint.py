"""Digests by which a resumed run knows the data and the base model it was begun with."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Container, Iterable, Sequence

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


def of_units(rows: Rows, units: Iterable[Sequence[int]]) -> str:
    """SHA-256 over which rows belong together, whatever the units are called and in whichever order rows and units come.

    It is what decides whether two divisions have the same neighbours: data sets that lack all rows of one unit.
    """
    columns = (rows.text, rows.text_b or (None,) * len(rows), rows.label)
    marks = [hashlib.sha256(json.dumps(row).encode()).hexdigest() for row in zip(*columns, strict=True)]
    held = sorted(_joined(sorted(marks[int(index)] for index in unit)) for unit in units if len(unit))
    return _joined([json.dumps(rows.label_names), *held])


def of_sizes(sizes: Iterable[int]) -> str:
    """SHA-256 over how many examples each client has: all that is known of objects of the user's own."""
    return _joined(map(str, sizes))


def _joined(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def of_model(model: nn.Module, but: Container[str]) -> str:
    """SHA-256 over the name, type, shape and bits of every parameter that `but` does not name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if name in but:
            continue
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def sealed(digest: str, key: str) -> str:
    """A digest by a secret key of the run, HMAC-SHA-256. Whoever lacks the key cannot check a guess of what was digested."""
    return hmac.new(bytes.fromhex(key), digest.encode(), hashlib.sha256).hexdigest()
