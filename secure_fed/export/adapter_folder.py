"""The export folder of an adapter that is no LoRA adapter, and loading a model from it.

    adapter.safetensors    every tensor of the method's state: the adapter and the head
    secure_fed.json        the method and its settings, the base model and the labels
    README.md, tokenizer

To load it, the method's `prepare` puts its layers into the base model again, and the tensors are loaded into them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import nn

from secure_fed.config import DataConfig, ModelConfig, RunConfig
from secure_fed.errors import ConfigError, ModelError, plainly
from secure_fed.export.model_card import ModelCard
from secure_fed.learning import tasks
from secure_fed.learning.models.architecture import class_names
from secure_fed.learning.models.devices import adopt, device_of
from secure_fed.learning.models.loading import digest_of, load
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.objective import Objective
from secure_fed.methods import build
from secure_fed.methods.method import State, fits
from secure_fed.tensors.tensors import Tensors

FORMAT = 1
TENSORS, NOTE = "adapter.safetensors", "secure_fed.json"

# A method may read any of these sections when it is built, except the location of the base model and the ledger's settings.
_SECTIONS = ("model", "federation", "method", "training", "privacy", "secure_aggregation")
_LEFT_OUT = {
    "model": ("name", "device", "trust_remote_code", "device_map", "max_memory"),
    "privacy": ("ledger", "data_set", "unit_name", "ledger_heads"),
}


@dataclass(frozen=True)
class Note:
    """The contents of `secure_fed.json`.

    settings: the sections of the run's configuration that a method may read when it is built. base_model: its name, empty if
    it has none. task: the value of `data.task`. base_digest: the digest of the parameters that did not train. given: whether
    the base model was passed as a Python object; then the settings do not limit the length of its texts. rounds: the number
    of finished rounds of the state.
    """

    settings: dict[str, dict[str, Any]]
    base_model: str
    task: str
    base_digest: str
    given: bool
    label_names: tuple[str, ...]
    head: tuple[str, ...]
    rounds: int


def fill(
    folder: Path,
    config: RunConfig,
    model: nn.Module,
    head: Sequence[str],
    state: State,
    card: ModelCard,
    *,
    given: bool,
) -> None:
    """Write the tensors and the note. given: whether the base model was passed as a Python object."""
    note = {
        "format": FORMAT,
        "base_model": card.base_model,
        "task": config.data.task,
        "base_digest": digest_of(model, state.tensors),
        "given": given,
        "label_names": list(card.label_names or class_names(model)),
        "head": list(head),
        "rounds": state.round,
        "settings": _settings(config, pooled=card.pooled),
    }
    (folder / TENSORS).write_bytes(state.tensors.to_bytes())
    (folder / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _settings(config: RunConfig, *, pooled: bool) -> dict[str, dict[str, Any]]:
    sections = config.to_dict()
    sections["model"] |= {"pooling": "mean"} if pooled else {}  # also for a model that was passed in Python
    return {
        section: {name: value for name, value in sections[section].items() if name not in _LEFT_OUT.get(section, ())}
        for section in _SECTIONS
    }


def load_adapter(folder: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The model that was exported to this folder, in evaluation mode.

    model: the base model, which is adapted in place; without it, the folder's base model is loaded by its name. Refuses a base
    model of other sizes, or with other frozen weights than the base model of the training. A refused model may have been
    adapted already.
    """
    path = Path(folder)
    note = _read_note(path)
    try:
        tensors = Tensors.from_bytes((path / TENSORS).read_bytes())
    except (OSError, safetensors.SafetensorError, KeyError) as error:
        raise ModelError(f"{path / TENSORS} cannot be read ({error}): export the run again") from error
    try:
        config = RunConfig.from_dict(note.settings)
    except ConfigError as error:
        raise ModelError(f"{path / NOTE} is damaged, or of another version of secure-fed: {error}") from error
    base = model if model is not None else _load_base(path, note, config)
    adopt(base)
    _require_head(path, note, base)
    method = build(config)
    initial = method.prepare(base, note.head, config.federation.seed)
    if not fits(method, initial, State(tensors, note.rounds)):
        raise ModelError(f"{path} holds an adapter of a model of other sizes than this {type(base).__name__}'s")
    if digest_of(base, tensors) != note.base_digest:
        raise ModelError(
            f"{path} holds an adapter that was trained beside other weights, or weights of another type, than this "
            f"{type(base).__name__} has: give the base model it was trained on ({note.base_model or 'a module of its own'})"
        )
    return Objective(base, classification.loss, device_of(base)).load(tensors).eval()


def _read_note(path: Path) -> Note:
    file = path / NOTE
    if not file.exists():
        peft = (path / "adapter_config.json").exists()
        remedy = "load it with PeftModel.from_pretrained" if peft else "give the OUT_DIR of `secure-fed export`"
        raise ModelError(f"{path} has no {NOTE}{', but is a PEFT adapter' if peft else ''}: {remedy}")
    with plainly(ModelError, f"{file} cannot be read", "export the run again"):
        fields = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else fields
        raise ModelError(f"{file} is of format {found!r:.40}, and this version of secure-fed reads format {FORMAT}")
    try:
        return Note(
            settings=dict(fields["settings"]),
            base_model=str(fields["base_model"]),
            task=str(fields["task"]),
            base_digest=str(fields["base_digest"]),
            given=bool(fields["given"]),
            label_names=tuple(map(str, fields["label_names"])),
            head=tuple(map(str, fields["head"])),
            rounds=int(fields["rounds"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file} is damaged ({type(error).__name__}: {error}): export the run again") from error


def _load_base(path: Path, note: Note, config: RunConfig) -> nn.Module:
    if not note.base_model:
        raise ModelError(
            f"{path} was trained on a module that only a program has: give it, as before training, load_adapter(folder, model)"
        )
    if note.task not in tasks.TASKS:
        raise ModelError(
            f"{path / NOTE} is damaged, or of another version of secure-fed: there is no task {note.task!r}"
        )
    chosen = replace(config.model, name=note.base_model, trust_remote_code=False)  # whatever the folder says
    if note.given:
        chosen = replace(chosen, max_length=2)  # the text length of a user's own model is unknown
    return base_model(chosen, replace(config.data, task=note.task), note.label_names, config.federation.seed)


def base_model(model: ModelConfig, data: DataConfig, label_names: Sequence[str], seed: int) -> nn.Module:
    """The base model of a run, with an untrained head if its task has a head."""
    return load(model, tasks.build(data), label_names, seed).model


def _require_head(path: Path, note: Note, base: nn.Module) -> None:
    there = {name for name, _ in base.named_parameters()}
    if missing := [name for name in note.head if name not in there]:
        raise ModelError(
            f"{path} holds an adapter of a model with {missing[0]}, which this {type(base).__name__} has not: "
            "give the base model it was trained on"
        )
