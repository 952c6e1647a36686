"""The common task of ours and the peers, read from the folder of `whole_runs.py`, without importing secure-fed.

Every peer takes the adapted model, batches, local training and evaluation from here, so the comparison is of how a round's
clients are run. Batches are padded to their own longest example.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Example = tuple[list[int], int]  # token ids, label


@dataclass(frozen=True)
class Work:
    """Clients' examples, a test set, and the settings: rounds, cohort, batch, lr, rank, alpha, noise (0: not private), clip."""

    folder: Path
    clients: list[list[Example]]
    test: list[Example]
    settings: dict[str, Any]

    @classmethod
    def read(cls, folder: str) -> Work:
        place = Path(folder)
        return cls(place, **json.loads((place / "work.json").read_text(encoding="utf-8")))

    def adapted(self) -> nn.Module:
        """The model with PEFT's LoRA on query and value; pooler and classifier train in full."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForSequenceClassification, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(self.folder / "model")
        lora = LoraConfig(
            r=self.settings["rank"],
            lora_alpha=self.settings["alpha"],
            target_modules=["query", "value"],
            modules_to_save=["pooler", "classifier"],
        )
        adapted: nn.Module = get_peft_model(model, lora)
        return adapted

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trainable(model).values(), self.settings["lr"], weight_decay=0.0)


@functools.cache
def loaded(folder: str) -> tuple[Work, nn.Module]:
    """Work and adapted model, loaded once in a process."""
    work = Work.read(folder)
    return work, work.adapted()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def padded(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Token ids (B, L), mask (B, L), labels (B,)."""
    lengths = torch.tensor([len(ids) for ids, _ in examples])
    ids = torch.zeros(len(examples), int(lengths.max()), dtype=torch.long)
    for row, (own, _) in zip(ids, examples, strict=True):
        row[: len(own)] = torch.tensor(own)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([label for _, label in examples])}


def shuffled(examples: Sequence[Example], batch_size: int, rng: np.random.Generator) -> Iterator[dict[str, Tensor]]:
    """One epoch."""
    order = rng.permutation(len(examples))
    for start in range(0, len(order), batch_size):
        yield padded([examples[int(i)] for i in order[start : start + batch_size]])


def train(model: nn.Module, work: Work, client: int, rng: np.random.Generator) -> None:
    """Train one client for one epoch, in place, with a new optimiser."""
    model.train()
    optimizer = work.optimizer(model)
    for batch in shuffled(work.clients[client], work.settings["batch"], rng):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


@torch.inference_mode()
def accuracy(model: nn.Module, test: Sequence[Example], batch_size: int = 64) -> float:
    model.eval()
    right = 0
    ordered = sorted(test, key=lambda example: len(example[0]))
    for start in range(0, len(ordered), batch_size):
        batch = padded(ordered[start : start + batch_size])
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(-1) == labels).sum())
    return right / len(test)


@dataclass
class Clock:
    """Start of the first round and end of every round, in seconds since the process was launched; and the accuracies."""

    ticks: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    def tick(self, accuracy: float | None = None) -> None:
        self.ticks.append(time.time() - float(os.environ["BENCHMARK_BEGAN"]))
        if accuracy is not None:
            self.accuracies.append(accuracy)

    def report(self, work: Work, trains: int) -> None:
        """Print the last line of this process. trains: the count of trained numbers, which are also sent."""
        if len(self.ticks) != work.settings["rounds"] + 1:
            sys.exit(f"{len(self.ticks) - 1} rounds ended, not {work.settings['rounds']}")
        print(json.dumps({"ticks": self.ticks, "accuracy": self.accuracies[-1], "trains": trains}), flush=True)
