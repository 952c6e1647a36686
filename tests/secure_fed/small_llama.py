"""A small Llama in a folder, texts beside it, and the settings of a federation that fine-tunes a model of such a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from secure_fed.methods import card
from tests.contracts.runs import OPTIONS

UNITS: dict[str, dict[str, Any]] = {
    "none": {},
    "client": {"unit": "client", "noise_multiplier": 0.5, "clip_norm": 0.5, "delta": 1e-3},
    "example": {"unit": "example", "noise_multiplier": 0.5, "clip_norm": 0.5, "delta": 1e-3},
}


def save(folder: Path, tokenizer: Any, **shape: Any) -> LlamaConfig:
    """Save a Llama of three layers and its tokenizer in the folder."""
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    usual = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    config = LlamaConfig(**{**usual, **special, **shape})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config


def write_texts(folder: Path, tokenizer: Any, long: int = 0) -> None:
    """Write train.jsonl of 24 texts, and test.jsonl of 6: `long` ones of 60 words each, the others of 4 to 9; three labels."""
    words = [word for word in tokenizer.get_vocab() if word.isalpha()]
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 6)):
        lengths = [*[60] * long, *(4 + number % 6 for number in range(count - long))]
        rows = [{"text": " ".join(rng.choice(words, length)), "label": at % 3} for at, length in enumerate(lengths)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def tables(folder: Path, model: str, method: str, unit: str, task: str) -> dict[str, dict[str, Any]]:
    """The settings of two rounds with three clients, by section; without privacy there is no audit, and no dummy with it."""
    own = {"rank": 2, "bottleneck": 4, **OPTIONS.get(method, {})}
    return {
        "model": {"name": str(folder / model), "max_length": 16},
        "data": {"task": task} | {split: str(folder / f"{split}.jsonl") for split in ("train", "test")},
        "federation": {"clients": 3, "cohort": 3, "rounds": 2},
        "method": {"name": method} | {name: value for name, value in own.items() if name in card(method).options},
        "training": {"steps": 1, "batch_size": 4},
        "privacy": UNITS[unit],
        "evaluation": {"audit_fraction": 0.0} | ({} if unit == "none" else {"dummies": 0}),
    }
