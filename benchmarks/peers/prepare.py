"""The input folder of every way of a whole run: the model, saved by transformers, and token ids of clients and test set."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

TESTS, LENGTH = 256, 64  # test examples; the most tokens of a text
TINY = "secure_fed/learning/models/tiny"


def texts(folder: Path | None, split: str, count: int) -> list[tuple[str, int]]:
    """Texts and labels: built-in notes, or drawn with a fixed seed from SPLIT.jsonl.gz in a folder."""
    if folder is None:
        from secure_fed.learning.data import notes

        made = notes.generate(count, seed=0, split=split)
        return list(zip(made.text, made.label, strict=True))
    with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    order = np.random.default_rng(0).permutation(len(rows))[:count]
    return [(rows[int(i)]["text"], int(rows[int(i)]["label"])) for i in order]


def encoded(tokenizer: Any, found: Sequence[tuple[str, int]]) -> list[tuple[list[int], int]]:
    ids = tokenizer([text for text, _ in found], truncation=True, max_length=LENGTH)["input_ids"]
    return [(own, label) for own, (_, label) in zip(ids, found, strict=True)]


def prepare(place: Path, model: Path, data: Path | None, clients: int, each: int, settings: dict[str, Any]) -> None:
    """Write the folder for `clients` clients of `each` examples, the same for all ways."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    train, test = (
        encoded(tokenizer, texts(data, split, count)) for split, count in (("train", clients * each), ("test", TESTS))
    )
    torch.manual_seed(0)
    labels = 1 + max(label for _, label in train + test)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=labels, dtype=torch.float32)
    classifier.save_pretrained(place / "model")
    parts = [train[start : start + each] for start in range(0, len(train), each)]
    work = {"clients": parts, "test": test, "settings": settings}
    (place / "work.json").write_text(json.dumps(work), encoding="utf-8")
