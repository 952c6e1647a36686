"""Texts and units to plant canaries in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from secure_fed.learning.audit_pool.canaries import CanaryContext
from secure_fed.learning.data.audit_unit import Unit

PAD, CLS = 0, 1
CONTEXT = CanaryContext(seed=3, unit="example", private=False, classes=3, vocabulary=400, special=frozenset({PAD, CLS}))
TEXTS = replace(CONTEXT, classes=None)


def text(number: int, length: int = 9) -> dict[str, Any]:
    ids = np.random.default_rng(number).integers(2, 100, length).astype(np.int32)
    ids[0] = CLS
    return {"input_ids": ids, "labels": number % 3}


def units(count: int, examples: int = 1) -> list[Unit]:
    items = [[text(i * examples + j) for j in range(examples)] for i in range(count)]
    return [Unit(f"client-{i % 4}/{i}", f"client-{i % 4}", own) for i, own in enumerate(items)]


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    assert list(before) == list(after)
    return [name for name in before if not np.array_equal(before[name], after[name])]
