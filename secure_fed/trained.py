"""A finished (or interrupted) run, read back: its model with the trained tensors in it, ready to predict or to export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secure_fed import fingerprint
from secure_fed.config import RunConfig
from secure_fed.data.encode import Collate, batches, encode, pad_id
from secure_fed.data.rows import Rows
from secure_fed.errors import ModelError, RunDirectoryError
from secure_fed.export import write_adapter, write_merged
from secure_fed.methods import build
from secure_fed.methods.method import Method, State
from secure_fed.model_card import ModelCard, run_facts
from secure_fed.models.heads import head_of
from secure_fed.models.loading import load_classifier
from secure_fed.personal import completed
from secure_fed.run_dir import RESULT, read_config, read_facts, read_object
from secure_fed.run_store import Checkpoint, read_checkpoint, read_records
from secure_fed.tasks import classification
from secure_fed.tensors import Layout
from secure_fed.training import Objective, to_device


@dataclass(frozen=True)
class Trained:
    """A run's model, of one client where tensors are personal, and what it says about itself."""

    config: RunConfig
    method: Method
    model: nn.Module
    tokenizer: Any
    head: tuple[str, ...]
    label_names: tuple[str, ...]
    state: State
    accuracy: float | None
    client: str | None
    statement: str = ""

    @property
    def card(self) -> ModelCard:
        """The README of an export."""
        facts = run_facts(self.config, self.method.card, self.state.round, self.accuracy, self.client, self.statement)
        pad = pad_id(self.tokenizer)
        return ModelCard(self.config.method.name, self.config.model.name, self.label_names, facts, pad)

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
        if not scores.isfinite().all():
            raise ModelError(
                "the scores of this run's model are not finite numbers: its training diverged; "
                "train again with a lower training.lr"
            )
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


def load(run_dir: Path, client: str | None = None) -> Trained:
    """The run in this directory, after its last finished round.

    client: whose model, for a run with personal tensors, and only for one. Its accuracy was not measured on the test set.
    """
    facts, config = read_facts(run_dir), read_config(run_dir)
    checkpoint = _last(run_dir, facts)
    personal, seed = config.method.personal, config.federation.seed
    tensors = completed(checkpoint.state.tensors, personal, client, facts["clients"], checkpoint.personal)
    labels = tuple(facts["label_names"])
    loaded = load_classifier(config.model, labels, seed)
    head = head_of(loaded.model, loaded.head, config.method.modules_to_save)
    method = build(config.method)
    same_layout = Layout.of(tensors) == Layout.of(method.prepare(loaded.model, head, seed))
    if not same_layout or fingerprint.of_model(loaded.model, tensors) != facts["model_digest"]:
        raise RunDirectoryError(
            f"{run_dir} holds the state of another model than {config.model.name!r} is now; restore the one it was trained on"
        )
    Objective(loaded.model, classification.loss, next(loaded.model.parameters()).device).load(tensors)
    accuracy = None if personal else _accuracy(run_dir, checkpoint.state.round)
    return Trained(
        config,
        method,
        loaded.model,
        loaded.tokenizer,
        head,
        labels,
        checkpoint.state,
        accuracy=accuracy,
        client=client,
        statement=stated(run_dir, facts),
    )


def stated(run_dir: Path, facts: Mapping[str, Any]) -> str:
    """What protects a run: in its result's words, or before there is one, in those of its plan."""
    if (run_dir / RESULT).exists():
        return str(read_object(run_dir, RESULT).get("privacy_statement", ""))
    planned = facts.get("privacy", {}).get("text", "")
    return f"{_UNFINISHED}: {planned}" if planned else ""


def _last(run_dir: Path, facts: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint of a run whose model a configuration describes."""
    if not facts["label_names"]:
        raise RunDirectoryError(
            f"{run_dir} was trained on a model given in Python, which only that program can make: "
            "there, write it with Federation.export"
        )
    checkpoint = read_checkpoint(run_dir)
    if checkpoint is None:
        raise RunDirectoryError(
            f"{run_dir} has no finished round yet; go on with `secure-fed train --resume --out {run_dir}`"
        )
    return checkpoint


def _accuracy(run_dir: Path, rounds: int) -> float | None:
    measured = [record["accuracy"] for record in read_records(run_dir, rounds) if "accuracy" in record]
    return measured[-1] if measured else None


_UNFINISHED = "Of a run that has not ended, as planned (what an interrupted round made again comes on top)"
