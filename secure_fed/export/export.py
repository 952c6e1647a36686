"""A trained model as a folder that others can load: an adapter, or the whole model with the adapter merged in.

A LoRA adapter, however it was trained, is written as PEFT's folder, and any other adapter as a folder of our own format, which
`secure_fed.load_adapter` reads. Each is written beside its destination and renamed into place, so that an export which fails or
is killed leaves no incomplete folder there. Unlike a checkpoint, it is not synced to the disk: after a power cut, export again.

    write_adapter, write_merged   a run read back from its directory (`export/trained.py`)
    write_federation              a federation that is still in memory, with a model that may be the user's own
    push                          the folder, to a repository of the Hugging Face Hub

A regression model learns its labels on a scale: it gives (label - centre) / scale. An adapter states the scale in a file beside
the weights (`LABEL_SCALE`), a whole model in its config.json.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from secure_fed.config import DataConfig, RunConfig
from secure_fed.errors import MethodError, ModelError, SecureFedError, UsageError
from secure_fed.export import adapter_folder, peft_folder
from secure_fed.export.model_card import LABELS, Kind, ModelCard, run_facts
from secure_fed.learning.models import quantised
from secure_fed.learning.models.adapters.lora import LoraForm
from secure_fed.learning.models.architecture import class_names
from secure_fed.learning.models.loading import quiet
from secure_fed.learning.tasks.chat import ChatTemplate
from secure_fed.methods.method import LoraShaped, Method, State
from secure_fed.rounds.client import existing
from secure_fed.rounds.client_models import completed
from secure_fed.runs import membership
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.durable import require_empty
from secure_fed.tensors.tensors import Tensors

LABEL_SCALE = "label_scale.json"
_NAMES = ("label_centre", "label_scale")


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
    tokenizer: Any = None


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
        scale = label_scale_of(adapted.config.data)
        if scale is not None and adapted.tokenizer is not None:  # else a program made the labels of its own
            (folder / LABEL_SCALE).write_text(json.dumps(scale.to_dict(), indent=2) + "\n", encoding="utf-8")
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


def write_federation(
    assembly: Assembly,
    state: State,
    out: Path,
    *,
    base_model: str,
    client: str | None,
    statement: str,
    noise_alone: Mapping[str, Any] | None,
) -> None:
    """Write the adapter and the head of this state; refuses a folder that is not empty.

    base_model: the name from which others load a user's own base model, if they can. client: the client whose personal tensors
    are written, if there are any. statement: the guarantee of this state in words, empty if there is none. noise_alone: the
    figures of the run's probe, if it made one.
    """
    config, problem = assembly.config, assembly.problem
    kept = {one.index: one.kept for one in existing(assembly.clients) if one.kept is not None}
    tensors = completed(state.tensors, config.method.personal, client, problem.names, kept)
    assembly.objective.load(tensors)
    # A private run's figure is a function of releases; others measure it on their data when they end.
    figure = None if assembly.protection.plan is None else membership.public_figure(assembly, state)
    classifies = type(problem.model).__name__.endswith("ForSequenceClassification")
    labels = tuple(problem.facts["label_names"]) or (class_names(problem.model) if classifies else ())
    facts = run_facts(config, assembly.method.card, state.round, {}, client, statement, noise_alone, figure)
    adapted = Adapted(
        config=config,
        method=assembly.method,
        model=problem.model,
        head=(*problem.head, *problem.fixed),
        initial=assembly.initial.tensors,
        state=replace(state, tensors=tensors),
        card=ModelCard.of(config, problem.model, problem.tokenizer, labels, facts, base_model),
        tokenizer=problem.tokenizer,
    )
    write_adapter(out, adapted)


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


def _finish(folder: Path, readme: str, tokenizer: Any) -> None:
    (folder / "README.md").write_text(readme, encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def _appearing(out_dir: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out_dir` on success and is deleted on failure."""
    require_empty(out_dir)
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


class LabelScale(NamedTuple):
    """The label that the model learned as 0, and the difference from it that the model learned as 1."""

    centre: float
    scale: float

    def to_dict(self) -> dict[str, float]:
        return dict(zip(_NAMES, self, strict=True))


def label_scale_of(data: DataConfig) -> LabelScale | None:
    """The scale of a run's labels; None for a task without numbers as labels."""
    return LabelScale(data.label_centre, data.label_scale) if data.task == "regression" else None


def read_label_scale(folder: Path) -> LabelScale | None:
    """The scale in an adapter's folder; None without the file. ModelError for a damaged one."""
    place = folder / LABEL_SCALE
    if not place.exists():
        return None
    try:
        fields = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{place} cannot be read ({error}): export the run again") from error
    return label_scale_in(fields if isinstance(fields, dict) else dict.fromkeys(_NAMES), str(place))


def label_scale_in(fields: Mapping[str, Any], place: str) -> LabelScale | None:
    """The scale among the fields of a model's configuration; None if they have none. place: of the fields, for errors."""
    if not any(name in fields for name in _NAMES):
        return None
    centre, scale = (fields.get(name, math.nan) for name in _NAMES)
    if not (_is_number(centre) and _is_number(scale) and scale > 0):
        raise ModelError(
            f"{place} has a label_centre of {centre!r:.40} and a label_scale of {scale!r:.40}; both must be finite numbers, "
            "and the scale above 0: export the run again"
        )
    return LabelScale(float(centre), float(scale))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_pushable(repository: str, base_model: str, *, merged: bool) -> None:
    """Refuse, before anything is written, a push that must fail or that nobody else could load."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"--push-to-hub is {repository!r}, which is no name on the Hub: give USER/NAME") from error
    if not merged and (base_model.startswith("builtin/") or Path(base_model).is_absolute()):
        raise UsageError(
            f"the adapter's base model is {base_model!r}, which is not on the Hub, so others could not load it: push the whole "
            "model with --merged, or train with the Hub id of a base model as model.name"
        )
    if constants.HF_HUB_OFFLINE:
        raise UsageError("--push-to-hub needs the network, and HF_HUB_OFFLINE switches it off: unset HF_HUB_OFFLINE")
    if huggingface_hub.get_token() is None:
        raise UsageError("--push-to-hub needs a token that may write: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str, *, public: bool = False) -> str:
    """Upload the folder, its README as the model card, and return the repository's address.

    A new repository is private, or public with `public`; without `public`, an existing public repository is refused.
    """
    try:
        import huggingface_hub

        hub = huggingface_hub.HfApi()
        hub.create_repo(repository, private=not public, exist_ok=True)
        if not public and not hub.model_info(repository).private:
            raise UsageError(
                f"{repository} is a public repository: add --public to publish there, or name another; {folder} is written"
            )
        uploaded = hub.upload_folder(
            repo_id=repository, folder_path=str(folder), commit_message="Exported by secure-fed"
        )
    except UsageError:
        raise
    except Exception as error:  # of any kind: the user can only check the name, the token and the network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise SecureFedError(
            f"{folder} is written, but it could not be pushed to {repository} ({reason}): check the name, the token "
            f"(`hf auth whoami`) and the network, then run `hf upload {repository} {folder}`"
        ) from error
    return str(getattr(uploaded, "repo_url", f"https://huggingface.co/{repository}"))
