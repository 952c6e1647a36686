"""The head of an audited model: pre-trained, or of its adapter; never a newly initialised one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from secure_fed.errors import ModelError
from secure_fed.learning.models.loading import explained, last_layer, quiet
from secure_fed.learning.models.locate import locate
from secure_fed.learning.tasks.task import Task


def require_head(name: str, task: Task, label_names: Sequence[str]) -> None:
    """ModelError for a model whose head would be newly initialised, or has another number of classes than the texts."""
    import transformers

    if task.keeps_head:
        return
    with quiet(), explained(name):
        config = transformers.AutoConfig.from_pretrained(locate(name))
    kind = task.auto.removeprefix("AutoModel")
    made = list(config.architectures or [])
    if not any(one.endswith(kind) for one in made):
        raise ModelError(
            f"{name} is a {', '.join(made) or 'model'} without a head {kind}: name the --adapter that brings one"
        )
    if label_names and config.num_labels == 1 and task.auto == "AutoModelForSequenceClassification":
        raise ModelError(f"{name} has one output, and an audit of {task.title} needs one for each class")
    if label_names and config.num_labels != len(label_names):
        raise ModelError(
            f"{name} has {config.num_labels} classes, and the texts have {len(label_names)}: name all of the model's, in its "
            "order, with --labels"
        )


def require_head_of_either(adapter: Path, base: str, task: Task, model: Any, label_names: Sequence[str]) -> None:
    """ModelError if neither the base nor the adapter brings the task's head: it would be newly initialised."""
    from peft.utils import load_peft_weights

    if task.keeps_head:
        return
    with suppress(ModelError):
        require_head(base, task, label_names)
        return
    try:
        with quiet():
            stored = load_peft_weights(str(adapter), device="cpu")
    except (OSError, ValueError, RuntimeError, KeyError):
        return  # `adapted` says why
    missing = [name for name in last_layer(model) if not any(key.endswith(f".{name}") for key in stored)]
    if missing:
        raise ModelError(
            f"--adapter {adapter} has no {missing[0]}, and {base} has no head for {task.title}: give the --task "
            "that the adapter was trained for, or an adapter that was saved with its head (modules_to_save)"
        )


def require_adapter(adapter: Path) -> None:
    """ModelError, before anything is loaded, for a folder that is no adapter of PEFT's."""
    from peft import PeftConfig

    with _fitting(adapter):
        PeftConfig.from_pretrained(str(adapter))


def adapted(model: Any, adapter: Path) -> Any:
    """The model with the adapter on it. ModelError if the adapter is another model's."""
    from peft import PeftModel

    with _fitting(adapter):
        warnings.filterwarnings("error", ".*missing adapter keys")  # else PEFT initialises new ones
        return PeftModel.from_pretrained(model, adapter)


@contextmanager
def _fitting(adapter: Path) -> Iterator[None]:
    try:
        with quiet(), warnings.catch_warnings():
            yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, UserWarning) as error:
        first = " ".join(str(error).split())
        raise ModelError(
            f"--adapter {adapter} does not fit the model ({first:.160}): name its base with --model"
        ) from error
