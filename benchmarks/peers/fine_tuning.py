"""Plain fine-tuning of a classifier in one place: AdamW on the trained weights, and the test accuracy, without secure-fed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 16
Row = dict[str, Any]


def rows_of(place: Path) -> list[Row]:
    return [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]


def fine_tuned(
    model: Any, tokenizer: Any, files: dict[str, Path], length: int, rate: float, seed: int, steps: int, falls: str
) -> float:
    """The test accuracy after `steps` steps of 16 texts, at a rate that is constant or falls linearly to zero.

    seed: draws the order of the texts. files: `train` and `test`, JSON Lines of text and label.
    """
    train, test = (rows_of(files[split]) for split in ("train", "test"))

    def scores(rows: Sequence[Row]) -> Any:
        texts = [row["text"] for row in rows]
        batch = tokenizer(texts, truncation=True, max_length=length, padding=True, return_tensors="pt")
        return model(**batch).logits

    moving = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(moving, rate, weight_decay=0.0)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1.0 if falls == "constant" else 0.0, steps)
    order = np.random.default_rng(seed).permutation(len(train))
    model.train()
    for step in range(steps):
        rows = [train[int(i)] for i in np.take(order, range(step * BATCH, (step + 1) * BATCH), mode="wrap")]
        loss = torch.nn.functional.cross_entropy(scores(rows), torch.tensor([row["label"] for row in rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        falling.step()
    model.eval()
    with torch.no_grad():
        parts = [test[start : start + 50] for start in range(0, len(test), 50)]
        hits = sum(int((scores(part).argmax(1) == torch.tensor([r["label"] for r in part])).sum()) for part in parts)
    return hits / len(test)


def classes_of(files: dict[str, Path]) -> int:
    return 1 + max(row["label"] for place in files.values() for row in rows_of(place))
