"""The catalogue's rows; the built-in model's rows are kept in a file, since computing them takes seconds.

After a change to a method, `python -m secure_fed.methods.counted` writes the file again; a test compares it with the catalogue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secure_fed.errors import ConfigError
from secure_fed.learning.data.notes import LABELS
from secure_fed.methods import METHODS

BUILTIN = "builtin/tiny"
WITH_CLASSES = ("classification", "multi_label", "tokens")
KEPT = Path(__file__).with_name("counted.json")


def usual_classes(model: str) -> int:
    """The number of classes of the built-in model's data; two for any other model."""
    return len(LABELS) if model == BUILTIN else 2


def classes_of(model: str, task: str, given: int | None) -> int | None:
    """The number of classes to count for; None for a task without classes. given: as the user chose, or None."""
    if task not in WITH_CLASSES:
        if given is not None:
            raise ConfigError(
                f"--classes is {given}, and has no effect with --task {task}, which has no classes; leave it out"
            ).about("--classes", given, f"left out with --task {task}")
        return None
    if given is not None and given < 2:
        raise ConfigError(f"--classes is {given}, but a head needs at least 2 classes; give 2 or more").about(
            "--classes", given, "at least 2"
        )
    return usual_classes(model) if given is None else given


def rows(
    model: str, overrides: Sequence[str], classes: int | None, task: str = "classification"
) -> list[dict[str, Any]]:
    """A row for every method, as `catalogue` returns it. classes: as `classes_of` returns it."""
    if (model, list(overrides), classes, task) == (BUILTIN, [], usual_classes(BUILTIN), "classification"):
        kept: list[dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8"))
        if [row["name"] for row in kept] == list(METHODS):
            return kept
    from secure_fed.methods.catalogue import catalogue

    return catalogue(model, overrides, classes, task)


if __name__ == "__main__":
    from secure_fed.methods.catalogue import catalogue

    text = json.dumps(catalogue(BUILTIN, (), usual_classes(BUILTIN)), indent=1)
    KEPT.write_text(text + "\n", encoding="utf-8")
