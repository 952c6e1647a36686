"""A probe's figures in sentences, from its entry in `result.json`: for refusals, progress, reports and model cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def noise_in_words(found: Mapping[str, Any]) -> str:
    """The loss before and after the noise alone, with chance beside it."""
    chance = "" if found["chance"] is None else f"; {_loss(found['chance'])} is chance, equal scores for all answers"
    return (
        f"this noise alone takes the loss from {_loss(found['start'])} to {_loss(found['noised'])} "
        f"({found['rows']} {found['texts']}{chance})"
    )


def noise_in_short(found: Mapping[str, Any]) -> str:
    """The same, short, for a table that has the accuracy."""
    chance = "" if found["chance"] is None else f", {_loss(found['chance'])} is chance"
    full = f", at steps that are not shortened {_loss(found['full'])}" if found["shortened"] else ""
    return f"takes the loss from {_loss(found['start'])} to {_loss(found['noised'])}{full}{chance} ({found['texts']})"


def shortened_steps(found: Mapping[str, Any]) -> str:
    """The sentence on steps that the server shortens; empty where it does not."""
    if not found["shortened"]:
        return ""
    return (
        "the server shortens its steps under this noise, and the model learns as much less: at full steps the noise would take "
        f"the loss to {_loss(found['full'])}"
    )


def hopeless_noise(found: Mapping[str, Any]) -> str:
    """The sentence on a hopeless run, with what would do; empty for any other."""
    if not found["hopeless"]:
        return ""
    other = "privacy.unit = 'example'" if found["unit"] == "client" else "a larger epsilon"
    enough = found["enough"]
    cohort = "" if enough is None else f"cohorts of about {enough:,}, among as many times more clients, would do, and "
    return f"the noise alone takes the model to chance, and hardly anything can be learned; {cohort}{other} needs less noise"


def _loss(loss: float | None) -> str:
    return "no finite number" if loss is None else f"{loss:.4g}"
