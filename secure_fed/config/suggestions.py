"""Suggestions for an unknown setting: the same name in another section, another library's name for it, or a similar name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

from secure_fed.config.sections import sections

# Names of Hugging Face's training arguments and PEFT's configurations, and of other federated libraries.
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "local_lr"), "training.lr"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "local_epochs"), "training.epochs"),
    **dict.fromkeys(("max_steps", "local_steps"), "training.steps"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), "training.batch_size"),
    **dict.fromkeys(("optim", "optimiser"), "training.optimizer"),
    **dict.fromkeys(("model_name", "model_name_or_path"), "model.name"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_len"), "model.max_length"),
    **dict.fromkeys(("dataset", "dataset_name"), "data.name"),
    **dict.fromkeys(("train_file", "train_data"), "data.train"),
    **dict.fromkeys(("test_file", "validation_file"), "data.test"),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "method.rank"),
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "lora_target_modules": "method.target_modules",
    **dict.fromkeys(("num_rounds", "num_server_rounds"), "federation.rounds"),
    "num_clients": "federation.clients",
    **dict.fromkeys(("clients_per_round", "num_selected_clients"), "federation.cohort"),
    "target_epsilon": "privacy.epsilon",
    "target_delta": "privacy.delta",
}


def meant(section: str, name: str) -> str:
    """The suggestion for `section.name`, which does not exist."""
    own = [field.name for field in dataclasses.fields(sections()[section])]
    if others := homes(name):
        return f"did you mean {' or '.join(others)}?"
    return nearest(name, own)


def homes(name: str) -> list[str]:
    """The settings, as `section.key`, that have this name here or in another library."""
    found = [
        f"{section}.{name}"
        for section, settings in sections().items()
        if name in {field.name for field in dataclasses.fields(settings)}
    ]
    return found or ([ELSEWHERE[name]] if name in ELSEWHERE else [])


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most similar to this one, or all known words."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(words)}"
