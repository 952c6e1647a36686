"""The base model and its tokenizer: built in, from a folder, or from the Hub, through transformers' Auto classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secure_fed.config import ModelConfig
from secure_fed.errors import ConfigError, ModelError

BUILTIN = {"builtin/tiny": Path(__file__).parent / "tiny"}


@dataclass(frozen=True)
class Loaded:
    """A model ready to be adapted.

    head: parameters that no pre-training has made: outside the base model, or newly initialised on loading. They train
    and travel with the adapter.
    """

    model: nn.Module
    tokenizer: Any
    head: tuple[str, ...]


def locate(name: str) -> str:
    """What transformers is given for `model.name`: a folder's path, or the Hub id."""
    if name in BUILTIN:
        return str(BUILTIN[name])
    if name.startswith("builtin/"):
        raise ModelError(f"model.name is {name!r}, but the built-in models are {', '.join(BUILTIN)}")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError(
                f"model.name is the folder {name!r}, but it has no config.json; give a saved transformers model"
            )
        return str(folder)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"model.name is {name!r}, but there is no such folder")
    return name


def load_classifier(config: ModelConfig, label_names: Sequence[str], seed: int) -> Loaded:
    """The model with a classification head for these labels; what is newly initialised depends on `seed` alone."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    device = find_device(config.device)
    place = locate(config.name)
    labels = {"id2label": dict(enumerate(label_names)), "label2id": {name: i for i, name in enumerate(label_names)}}
    with _quiet(), _explained(config.name), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = AutoTokenizer.from_pretrained(place)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            place, ignore_mismatched_sizes=True, output_loading_info=True, dtype=torch.float32, **labels
        )
    _give_padding(model, tokenizer)
    fresh = set(info["missing_keys"]) | {key[0] for key in info["mismatched_keys"]}
    model.to(device=device, dtype=getattr(torch, config.dtype))
    return Loaded(
        model, tokenizer, tuple(n for n, _ in model.named_parameters() if n in fresh or n in head_names(model))
    )


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Parameters outside the base model, for models that say which part that is (as transformers' do)."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not hasattr(model, prefix):
        return ()
    return tuple(name for name, _ in model.named_parameters() if not name.startswith(prefix + "."))


def find_device(name: str) -> torch.device:
    """The torch device of that name; `auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.device is {name!r}, which cannot be used here ({reason}); try cpu or auto") from error
    return device


def _give_padding(model: Any, tokenizer: Any) -> None:
    """Decoders often come without a padding token: their end-of-text token serves, since the mask hides it."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of model.name {tokenizer.name_or_path!r} has neither a padding nor an end token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """What transformers raises when a model cannot be had, as one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model.name is {name!r}, and it cannot be loaded ({first}); give a folder, builtin/tiny, or, online, a Hub id"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No load reports and progress bars: that a classifier's head is new is what we are here for."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
