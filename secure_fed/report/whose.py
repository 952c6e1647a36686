"""The model that the test set's metrics are of, where tensors are personal."""

from __future__ import annotations


def measured_model(personal: bool, unit: str) -> str:
    """The subject of a sentence. personal: whether tensors stay with their clients. unit: the unit that privacy protects."""
    if not personal:
        return "The shared model"
    if unit == "none":
        return "A client's own model (the mean over those measured, at most ten)"
    return "The shared model with the personal tensors of the start"
