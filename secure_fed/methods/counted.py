"""The catalogue's rows; the built-in model's rows are kept in a file, since computing them takes seconds.

After a change to a method, `python -m secure_fed.methods.counted` writes the file again; a test compares it with the catalogue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secure_fed.errors import ConfigError
from secure_fed.learning.data.notes_words import LABELS
from secure_fed.methods import METHODS

BUILTIN = "builtin/tiny"
KEPT = Path(__file__).with_name("counted.json")


def usual_classes(model: str) -> int:
    """The number of classes of the built-in model's data; two for any other model."""
    return len(LABELS) if model == BUILTIN else 2


def rows(model: str, overrides: Sequence[str], classes: int) -> list[dict[str, Any]]:
    """A row for every method, as `catalogue` returns it."""
    if classes < 2:
        raise ConfigError(f"--classes is {classes}, but a head needs at least 2 classes; give 2 or more")
    if (model, list(overrides), classes) == (BUILTIN, [], usual_classes(BUILTIN)):
        kept: list[dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8"))
        if [row["name"] for row in kept] == list(METHODS):
            return kept
    from secure_fed.methods.catalogue import catalogue

    return catalogue(model, overrides, classes)


if __name__ == "__main__":
    from secure_fed.methods.catalogue import catalogue

    text = json.dumps(catalogue(BUILTIN, (), usual_classes(BUILTIN)), indent=1)
    KEPT.write_text(text + "\n", encoding="utf-8")
