"""A finished (or interrupted) run, read back: its model with the global tensors in it, ready to predict or to export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secure_fed.config import RunConfig
from secure_fed.data.encode import Collate, batches, encode, pad_id
from secure_fed.data.rows import Rows
from secure_fed.errors import RunDirectoryError
from secure_fed.export import write_adapter, write_merged
from secure_fed.methods import build
from secure_fed.methods.method import Method, State
from secure_fed.model_card import ModelCard
from secure_fed.models.loading import load_classifier, locate
from secure_fed.outcome import NO_PRIVACY
from secure_fed.parts import head_of
from secure_fed.run_store import read_checkpoint, read_config, read_facts, read_records
from secure_fed.tasks import classification
from secure_fed.tensors import Layout
from secure_fed.training import Objective, to_device


@dataclass(frozen=True)
class Trained:
    """A run's model and what it says about itself."""

    config: RunConfig
    method: Method
    model: nn.Module
    tokenizer: Any
    head: tuple[str, ...]
    label_names: tuple[str, ...]
    state: State
    accuracy: float | None

    @property
    def card(self) -> ModelCard:
        """The README of an export: what the run was, and what protects it."""
        facts = {
            "method": f"{self.method.card.name} ({self.method.card.paper})",
            "rounds": str(self.state.round),
            "accuracy on the test set": "not measured" if self.accuracy is None else f"{self.accuracy:.4f}",
            "privacy": NO_PRIVACY,
        }
        pad = pad_id(self.tokenizer)
        return ModelCard(self.config.method.name, locate(self.config.model.name), self.label_names, facts, pad)

    @torch.no_grad()
    def predict(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """{"label", "probability"} for each text (or pair), in order."""
        rows = Rows(tuple(texts), (0,) * len(texts), self.label_names, tuple(pairs) if pairs is not None else None)
        encoded = encode(self.tokenizer, rows, self.config.model.max_length)
        device = next(self.model.parameters()).device
        scores = torch.empty(len(texts), len(self.label_names))
        self.model.eval()
        for batch in batches(encoded, self.config.evaluation.batch_size, Collate(pad_id(self.tokenizer)), None):
            inputs = to_device(batch.inputs, device)
            scores[torch.as_tensor(batch.indices)] = classification.logits(self.model, inputs).softmax(1).cpu()
        for probability, label in zip(*scores.max(1), strict=True):
            yield {"label": self.label_names[int(label)], "probability": round(float(probability), 6)}

    def export(self, out_dir: Path, *, merged: bool = False) -> Path:
        """Write the adapter as a PEFT folder, or with `merged` the whole model; refuses a folder that is not empty."""
        if merged:
            write_merged(out_dir, self.model, card=self.card, tokenizer=self.tokenizer)
        else:
            write_adapter(
                out_dir, self.model, self.head, adapter=self.method.adapter, card=self.card, tokenizer=self.tokenizer
            )
        return out_dir


def load(run_dir: Path) -> Trained:
    """The run in this directory, after its last finished round."""
    facts, config = read_facts(run_dir), read_config(run_dir)
    labels = tuple(facts["label_names"])
    if not labels:
        raise RunDirectoryError(
            f"{run_dir} was trained on a model given in Python; load its tensors there, with Federation"
        )
    checkpoint = read_checkpoint(run_dir)
    if checkpoint is None:
        raise RunDirectoryError(
            f"{run_dir} has no finished round yet; go on with `secure-fed train --resume --out {run_dir}`"
        )
    seed = config.federation.seed
    loaded = load_classifier(config.model, labels, seed)
    head = head_of(loaded.model, loaded.head, config.method.modules_to_save)
    method = build(config.method)
    initial = method.prepare(loaded.model, head, seed)
    if Layout.of(checkpoint.state.tensors) != Layout.of(initial):
        raise RunDirectoryError(
            f"{run_dir} holds the state of another model than {config.model.name!r} is now; restore the one it was trained on"
        )
    objective = Objective(loaded.model, classification.loss, next(loaded.model.parameters()).device)
    objective.load(checkpoint.state.tensors)
    measured = [record["accuracy"] for record in read_records(run_dir, checkpoint.state.round) if "accuracy" in record]
    return Trained(
        config,
        method,
        loaded.model,
        loaded.tokenizer,
        head,
        labels,
        checkpoint.state,
        accuracy=measured[-1] if measured else None,
    )
