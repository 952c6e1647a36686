"""AdapterHub's own adapters beside a head, fine-tuned in one place.   python adapter_hub.py KIND SETTINGS

SETTINGS: one JSON object with the arguments of `fine_tuned`, a folder `model`, and `pooling`, "mean" or "model". Prints the
test accuracy. It runs in its own environment, because `adapters` needs another version of transformers than secure-fed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapters
import torch
from fine_tuning import classes_of, fine_tuned
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, logging

WIDTH = 384  # of MiniLM; the bottlenecks below are our defaults
KINDS = {
    "Houlsby": lambda: adapters.DoubleSeqBnConfig(reduction_factor=WIDTH // 64, non_linearity="gelu"),
    "Pfeiffer": lambda: adapters.SeqBnConfig(reduction_factor=WIDTH // 64),
    "Compacter": lambda: adapters.CompacterConfig(reduction_factor=WIDTH // 16, phm_dim=4),
}


class Classifier(nn.Module):
    """A linear head on the mean over tokens, or on the encoder's pooler output for the first token."""

    def __init__(self, encoder: Any, classes: int, pooling: str) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.dropout, self.classifier = nn.Dropout(0.1), nn.Linear(encoder.config.hidden_size, classes)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, attention_mask: Tensor, **given: Tensor) -> Any:
        found = self.encoder(attention_mask=attention_mask, **given)
        if self.pooling == "mean":
            there = attention_mask[:, :, None]
            read = (found.last_hidden_state * there).sum(1) / there.sum(1)
        else:
            read = found.pooler_output
        return SimpleNamespace(logits=self.classifier(self.dropout(read)))


def main(kind: str, settings: dict[str, Any]) -> float:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    place, pooling = settings.pop("model"), settings.pop("pooling")
    files = {split: Path(each) for split, each in settings.pop("files").items()}
    torch.manual_seed(settings["seed"])
    encoder = AutoModel.from_pretrained(place)
    adapters.init(encoder)
    encoder.add_adapter("a", config=KINDS[kind]())
    encoder.train_adapter("a")  # freezes everything else, including the pooler
    encoder.set_active_adapters("a")
    model = Classifier(encoder, classes_of(files), pooling)
    return fine_tuned(model, AutoTokenizer.from_pretrained(place), files, **settings)


if __name__ == "__main__":
    print(main(sys.argv[1], json.loads(sys.argv[2])))
