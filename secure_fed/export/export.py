"""A trained model as a folder that others can load: an adapter, or the whole model with the adapter merged in.

A LoRA adapter, however it was trained, is written as PEFT's folder, and any other adapter as a folder of our own format, which
`secure_fed.load_adapter` reads. Each is written beside its destination and renamed into place, so that an export which fails or
is killed leaves no incomplete folder there. Unlike a checkpoint, it is not synced to the disk: after a power cut, export again.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from secure_fed.config import RunConfig
from secure_fed.errors import MethodError, ModelError, UsageError
from secure_fed.export import adapter_folder, peft_folder
from secure_fed.export.label_scale import label_scale_of, write_label_scale
from secure_fed.export.model_card import LABELS, Kind, ModelCard
from secure_fed.learning.models import quantised
from secure_fed.learning.models.adapters.lora import LoraForm
from secure_fed.learning.models.loading import quiet
from secure_fed.learning.tasks.chat_template import ChatTemplate
from secure_fed.methods.method import LoraShaped, Method, State
from secure_fed.tensors.tensors import Tensors


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that an export needs."""

    def save_pretrained(self, save_directory: Any) -> Any: ...


@dataclass(frozen=True)
class Adapted:
    """A model that a method has adapted and trained, and its model card.

    model: as adapted by the method's `prepare`, with the tensors of `state` loaded. head: its parameters, trained or not.
    initial: the tensors that `prepare` returned. state: complete; its personal tensors, if any, are one client's. tokenizer:
    None where the program has its own.
    """

    config: RunConfig
    method: Method
    model: nn.Module
    head: tuple[str, ...]
    initial: Tensors
    state: State
    card: ModelCard
    tokenizer: Tokenizer | None = None


def write_adapter(out_dir: Path, adapted: Adapted) -> None:
    """Write the adapter and the head, as a folder for PEFT or for `secure_fed.load_adapter`.

    Either, loaded on a fresh base model of the same kind, gives the same outputs as this model.
    """
    method, model, head, card = adapted.method, adapted.model, adapted.head, adapted.card
    with _appearing(out_dir) as folder:
        if isinstance(method, LoraShaped):
            form, start = (method.as_lora(adapted.initial, own) for own in (adapted.state.tensors, adapted.initial))
            peft_folder.fill(folder, model, head, form, start, card.base_model, card.revision)
            kind: Kind = "peft"
            if card.labels:  # in no config.json: with one, transformers looks for the base model's weights beside it
                names = [card.labels["id2label"][index] for index in sorted(card.labels["id2label"])]
                (folder / LABELS).write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
        else:
            given = adapted.tokenizer is None
            adapter_folder.fill(folder, adapted.config, model, head, adapted.state, card, given=given)
            kind = "own"
        if adapted.tokenizer is not None:  # else a program made the labels of its own
            write_label_scale(folder, adapted.config.data)
        _finish(folder, card.text(kind), adapted.tokenizer)


def write_merged(out_dir: Path, adapted: Adapted, base: nn.Module) -> None:
    """Write the whole model as a folder for `from_pretrained`. base: as for `merge`; it is saved."""
    save = getattr(base, "save_pretrained", None)
    if save is None:
        raise ModelError(
            f"a merged export needs a transformers model, and {type(base).__name__} has no save_pretrained: "
            "export the adapter"
        )
    merge(adapted, base)
    if (scale := label_scale_of(adapted.config.data)) is not None:
        base.config.update(scale.to_dict())  # type: ignore[union-attr, operator]
    if adapted.config.data.task == "chat" and adapted.tokenizer is not None:
        _end_with_turns(base, adapted.tokenizer)
    with _appearing(out_dir) as folder, quiet():
        save(folder)
        _finish(folder, adapted.card.text("merged"), adapted.tokenizer)


def merge(adapted: Adapted, base: nn.Module) -> None:
    """Put the trained change into the weights of `base`, in place.

    base: the original base model, except for the head's values. Refuses a method whose layers are no change of the base model's
    own weights.
    """
    method, tensors = adapted.method, adapted.state.tensors
    quantised.restore(base)
    if isinstance(method, LoraShaped):
        _add_products(base, method.as_lora(adapted.initial, tensors))
        _copy(base, tensors.select(name for name in adapted.head if name in tensors))
    elif _shapes(base) == _shapes(adapted.model):
        _copy(base, tensors)
    else:
        raise MethodError(
            f"{method.card.name} puts layers into the model that cannot be merged into its weights: export the "
            "adapter, without --merged, and load it with secure_fed.load_adapter"
        )


def _end_with_turns(model: Any, tokenizer: Any) -> None:
    """Let `generate` stop at the end of the assistant's turn, besides where the base model stops.

    The run trained every answer to end with this token. A base model that was no chat model stops at the end of a text alone,
    and would go on with the user's next turn.
    """
    settings = model.generation_config
    listed = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    if new := [one for one in ChatTemplate.of(tokenizer).ends if one not in listed]:
        settings.eos_token_id = [one for one in (*listed, *new) if one is not None]
        settings._from_model_config = False  # else transformers would make it again from config.json


@torch.no_grad()
def _add_products(base: nn.Module, form: LoraForm) -> None:
    """Replace every adapted matrix W by W + s B A."""
    for name, (a, b) in form.factors.items():
        layer = base.get_submodule(name)
        weight = layer.get_parameter("weight")
        product = form.adapter.scaling * (b.float() @ a.float())
        weight.add_((product.T if isinstance(layer, Conv1D) else product).to(weight))


@torch.no_grad()
def _copy(base: nn.Module, tensors: Tensors) -> None:
    for name in tensors:
        base.get_parameter(name).copy_(tensors.tensor(name))


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _finish(folder: Path, readme: str, tokenizer: Tokenizer | None) -> None:
    (folder / "README.md").write_text(readme, encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def _appearing(out_dir: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out_dir` on success and is deleted on failure."""
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} exists and is not an empty folder: give a new one to export to")
    folder = out_dir.parent / f".{out_dir.name}.{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True)
        yield folder
        if out_dir.exists():
            out_dir.rmdir()
        os.replace(folder, out_dir)
    except OSError as error:
        raise UsageError(f"cannot export to {out_dir}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
