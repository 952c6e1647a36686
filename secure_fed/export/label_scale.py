"""The scale on which a regression model learned its labels, as an export states it: the model gives (label - centre) / scale.

An adapter has it in a file beside the weights, a whole model in its config.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from secure_fed.config import DataConfig
from secure_fed.errors import ModelError

LABEL_SCALE = "label_scale.json"
_NAMES = ("label_centre", "label_scale")


class LabelScale(NamedTuple):
    """The label that the model learned as 0, and the difference from it that the model learned as 1."""

    centre: float
    scale: float

    def to_dict(self) -> dict[str, float]:
        return dict(zip(_NAMES, self, strict=True))


def label_scale_of(data: DataConfig) -> LabelScale | None:
    """The scale of a run's labels; None for a task without numbers as labels."""
    return LabelScale(data.label_centre, data.label_scale) if data.task == "regression" else None


def write_label_scale(folder: Path, data: DataConfig) -> None:
    """Write the file of an adapter's folder, if the labels have a scale."""
    if (found := label_scale_of(data)) is not None:
        (folder / LABEL_SCALE).write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")


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
