"""The most frequent label of a test set: the accuracy of always predicting it, and whether a model is better."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_Z = 1.96  # two-sided, 95 %


@dataclass(frozen=True)
class Commonest:
    """share: the most frequent label's share of the labels that accuracy counts. of: the number of these labels."""

    share: float
    of: int

    @classmethod
    def among(cls, labels: Iterable[Hashable]) -> Commonest | None:
        """The most frequent of these labels; None without labels."""
        counts = Counter(labels)
        return cls(max(counts.values()) / counts.total(), counts.total()) if counts else None

    @classmethod
    def of_result(cls, result: Mapping[str, Any]) -> Commonest | None:
        """Read from a run's result; None for results of older versions, which lack it."""
        found = result.get("commonest")
        return None if found is None else cls(float(found["share"]), int(found["of"]))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def not_exceeded_by(self, accuracy: float) -> bool:
        """Whether the share lies in Wilson's 95 % interval of this accuracy, or above it."""
        n, z = self.of, _Z
        middle = accuracy + z * z / (2 * n)
        width = z * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
        return (middle - width) / (1 + z * z / n) <= self.share


def commonest_of_items(examples: Sequence[Any]) -> Commonest | None:
    """The most frequent label of items whose `labels` are one whole number each; None if any item's are not."""
    labels = []
    for number in range(len(examples)):
        item = examples[number]
        label: Any = item.get("labels") if isinstance(item, Mapping) else None
        label = label.item() if hasattr(label, "item") and getattr(label, "ndim", 1) == 0 else label
        if type(label) is not int:
            return None
        labels.append(label)
    return Commonest.among(labels)


def no_better(accuracy: float | None, common: Commonest | None) -> str:
    """The sentence on a model that is no better than its test set's most frequent label; empty if it is better, or unknown."""
    if accuracy is None or common is None or not common.not_exceeded_by(accuracy):
        return ""
    return (
        f"The accuracy of {accuracy:.1%} is no better than always giving the commonest label of the test set, "
        f"{common.share:.1%} (at 95 % confidence): the accuracy shows no learning."
    )
