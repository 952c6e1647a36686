"""Digests by which a resumed run recognises its data, and a ledger its units."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from secure_fed.learning.data.on_disk import in_parts
from secure_fed.learning.data.rows import Rows

_READ = 2000  # examples


def of_rows(*parts: Rows) -> str:
    """SHA-256 over every text, label and owner, in order."""
    digest = hashlib.sha256()
    for rows in parts:
        columns = (rows.label_names, rows.text, rows.text_b, rows.label, rows.client)
        for column in (*columns, *((rows.person,) if rows.person is not None else ())):
            for text in _as_json(column):
                digest.update(text.encode())
    return digest.hexdigest()


def _as_json(column: Sequence[Any] | None) -> Iterator[str]:
    """The JSON of a column, in parts of bounded length."""
    if column is None:
        yield json.dumps(column)
        return
    yield "["
    for number, part in enumerate(in_parts(column)):
        yield (", " if number else "") + json.dumps(part)[1:-1]
    yield "]"


def of_units(rows: Rows, units: Iterable[Sequence[int]]) -> str:
    """SHA-256 over the assignment of rows to units, whatever the units' names and the order of rows and units.

    It decides whether two divisions have the same neighbouring data sets, which lack all rows of one unit.
    """
    columns = (rows.text, rows.text_b or (None,) * len(rows), rows.label)
    marks = [hashlib.sha256(json.dumps(row).encode()).hexdigest() for row in zip(*columns, strict=True)]
    held = sorted(_joined(sorted(marks[int(index)] for index in unit)) for unit in units if len(unit))
    return _joined([json.dumps(rows.label_names), *held])


def of_objects(train: Sequence[Sequence[Any]], *, each: bool) -> str:
    """`of_units` for a user's own examples, by their content: a unit is a client, or with `each` a single example.

    TypeError for examples whose content `content` cannot read.
    """
    marks = [[content(own[index]).hex() for index in range(len(own))] for own in train]
    held = [[mark] for own in marks for mark in own] if each else marks
    return _joined(["objects", *sorted(_joined(sorted(unit)) for unit in held)])


def in_order(parts: Sequence[Sequence[Any]]) -> str:
    """A digest of a user's own examples in their places: each part's length, and some 2,000 examples spread over all parts.

    TypeError for examples whose content `content` cannot read.
    """
    every = max(1, sum(map(len, parts)) // _READ)
    read = (own[index] for number, own in enumerate(parts) for index in range(number % every, len(own), every))
    marks = (content(example).hex() for example in read)
    return _joined(["in order", *(f"{len(own)}" for own in parts), *marks])


def of_sizes(sizes: Iterable[int]) -> str:
    """SHA-256 over the number of each client's examples: all that is known of objects without readable content."""
    return _joined(map(str, sizes))


def _joined(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def sealed(digest: str, key: str) -> str:
    """HMAC-SHA-256 of a digest with a secret key of the run. Without the key, nobody can check a guess of the data."""
    return hmac.new(bytes.fromhex(key), digest.encode(), hashlib.sha256).hexdigest()


def content(example: Any) -> bytes:
    """Bytes that are equal exactly for equal examples; TypeError for types whose content is unknown."""
    digest = hashlib.sha256()
    _tell(digest, example)
    return digest.digest()


def _tell(digest: Any, value: Any) -> None:
    kind = type(value)
    if kind is str or kind is int:  # the most common types, without the checks below
        said = repr(value).encode()
        digest.update(f"{kind.__name__} {len(said)} ".encode() + said)
        return
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"array {value.dtype.str} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"map {len(value)}".encode())
        for name in sorted(value, key=str):
            _tell(digest, str(name))
            _tell(digest, value[name])
    elif is_dataclass(value) and not isinstance(value, type):
        _tell(digest, {one.name: getattr(value, one.name) for one in fields(value)})
    elif isinstance(value, list | tuple | np.ndarray):
        digest.update(f"list {len(value)}".encode())
        for one in value:
            _tell(digest, one)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        said = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(f"{type(value).__name__} {len(said)} ".encode())
        digest.update(said)
    else:
        raise TypeError(f"there is a {type(value).__name__} in them")
