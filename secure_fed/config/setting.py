"""One setting: a dataclass field whose metadata hold its one-line explanation and its limits.

The checks, the error messages and the commented TOML file all read the same metadata, so they agree.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import Field, field
from operator import ge, gt, le, lt
from typing import Any

from secure_fed.errors import ConfigError

Setting = Field[Any]
TEXTS, NUMBERS = "tuple[str, ...]", "tuple[float, ...]"
_SPOKEN = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    TEXTS: "a list of texts",
    NUMBERS: "a list of numbers",
}
_HOLDS: dict[str, Callable[[Any, Any], bool]] = {"above": gt, "at_least": ge, "below": lt, "at_most": le}
_LARGEST = 10**9  # of a whole number without a limit of its own


def key(default: Any, doc: str, **limits: Any) -> Any:
    """A setting: its default, its meaning, and any of `choices`, `above`, `at_least`, `below`, `at_most`.

    A default of None leaves the choice to the run; `optional` is the value that the commented TOML file shows. `same` maps
    other words for a choice to that choice.
    """
    return field(default=default, metadata={"doc": doc, **limits})


class Typed(str):
    """A value as typed on a command line: read as TOML if this gives the right type, otherwise as plain text."""

    def toml(self) -> Any:
        try:
            return tomllib.loads(f"value = {self}")["value"]
        except (ValueError, RecursionError):  # ValueError: no TOML, or a number of thousands of digits
            return str(self)


def coerced(name: str, setting: Setting, value: Any) -> Any:
    """The value in the setting's type. A value of another type, or outside the limits, is a ConfigError about `name`."""
    fits = _of_type(name, setting, value)
    if fits is None:
        return None
    if isinstance(fits, float) and not math.isfinite(fits):
        raise _refused(name, fits, str(fits), "a finite number")
    limits = setting.metadata
    if type(fits) is int and "at_most" not in limits and fits > _LARGEST:
        raise _refused(name, fits, f"{fits:.3g}" if fits < 10**300 else "far larger", f"at most {_LARGEST:,}")
    if "same" in limits:
        fits = limits["same"].get(fits, fits)
    if "choices" in limits and fits not in limits["choices"]:
        raise _refused(name, fits, f"{fits!r:.80}", f"one of {', '.join(map(_shown, limits['choices']))}")
    for word, holds in _HOLDS.items():
        if word in limits and not holds(fits, limits[word]):
            raise _refused(name, fits, str(fits), f"{word.replace('_', ' ')} {limits[word]}")
    return fits


def _of_type(name: str, setting: Setting, value: Any) -> Any:
    kinds = [kind.strip() for kind in str(setting.type).split("|")]
    typed = value.toml() if isinstance(value, Typed) else value
    if typed is None and "None" in kinds:
        return None
    if type(typed).__name__ in kinds:
        return typed
    if type(typed) is int and "float" in kinds:
        return _float(name, typed)
    if isinstance(typed, list | tuple) and TEXTS in kinds and all(isinstance(item, str) for item in typed):
        return tuple(typed)
    if isinstance(typed, list | tuple) and NUMBERS in kinds and all(type(item) in (int, float) for item in typed):
        return tuple(_float(name, item) for item in typed)
    if isinstance(value, Typed) and "str" in kinds:
        return str(value)
    if isinstance(typed, str) and kinds == [TEXTS]:
        return (typed,)
    expected = " or ".join(_SPOKEN[kind] for kind in kinds if kind != "None")
    raise _refused(name, typed, f"{value!r:.80}", expected)


def _float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        message = f"{name} has hundreds of digits, but it must be a finite number"
        raise ConfigError(message, setting=name, value=value, limit="a finite number") from error


def _refused(name: str, value: Any, shown: str, limit: str) -> ConfigError:
    return ConfigError(f"{name} is {shown}, but it must be {limit}", setting=name, value=value, limit=limit)


def limits_in_words(setting: Setting) -> str:
    """The suffix of the explanation: "(at least 1)", "(mean | adam)" or nothing."""
    if "choices" in setting.metadata:
        return f" ({' | '.join(map(_shown, setting.metadata['choices']))})"
    words = [f"{word.replace('_', ' ')} {setting.metadata[word]}" for word in _HOLDS if word in setting.metadata]
    return f" ({', '.join(words)})" if words else ""


def _shown(choice: Any) -> str:
    """A choice as TOML has it; an empty word in quotes."""
    return str(choice).lower() if isinstance(choice, bool) else str(choice) or "''"
