"""The scale on which an audited regression model learned its labels: its outputs are (label - centre) / scale."""

from __future__ import annotations

from pathlib import Path

from secure_fed.errors import ConfigError, UsageError
from secure_fed.export.label_scale import FILE, LabelScale, read, stated
from secure_fed.learning.models.loading import explained, quiet
from secure_fed.learning.models.locate import locate

UNSCALED = LabelScale(0.0, 1.0)
_ASSUMED = (
    "The labels were taken as they are, since neither the model nor an option states their scale: if the model learned scaled "
    "labels, give --label-centre and --label-scale, or a leak goes unnoticed."
)


def learned(
    given: LabelScale | None, *, by: str, model: str, adapter: Path | None, whole: bool = True
) -> tuple[LabelScale, str]:
    """The scale that the model or its adapter states, else the given one, else none is assumed; and a sentence that says so.

    by: what gives the scale, options or a configuration. whole: it gives both numbers; otherwise one with its default counts
    as not given. ConfigError if it contradicts the model.
    """
    place = f"the config.json of {model}" if adapter is None else str(adapter / FILE)
    own = _of_model(model) if adapter is None else read(adapter)
    if given is not None and own is not None and not whole:
        given = LabelScale(
            *(mine if part == usual else part for part, usual, mine in zip(given, UNSCALED, own, strict=True))
        )
    if given is not None and own is not None and given != own:
        raise ConfigError(
            f"{by} give a label centre of {given.centre} and a scale of {given.scale}, and {place} states {own.centre} and "
            f"{own.scale}: give these two, or correct that file"
        )
    found = own or given
    if found is None:
        return UNSCALED, _ASSUMED
    return found, f"The model's outputs were compared with (label - {found.centre}) / {found.scale}."


def require_same(name: str, own: LabelScale) -> None:
    """Refuse a reference that states another scale: its losses would be of other numbers. own: of the audited model."""
    other = _of_model(name)
    if other is not None and other != own:
        raise UsageError(
            f"--reference {name} learned with a label centre of {other.centre} and a scale of {other.scale}, and the model is "
            f"read with {own.centre} and {own.scale}: leave it out"
        )


def _of_model(name: str) -> LabelScale | None:
    import transformers

    with quiet(), explained(name):
        config = transformers.AutoConfig.from_pretrained(locate(name))
    return stated(config.to_dict(), f"the configuration of {name}")
