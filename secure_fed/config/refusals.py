"""Errors about a setting, with its value and its limit."""

from __future__ import annotations

from typing import Any, NoReturn

from secure_fed.config.sections import Sections
from secure_fed.errors import ConfigError


def value_of(config: Sections, name: str) -> Any:
    """The value of `section.key`."""
    section, _, setting = name.partition(".")
    return getattr(getattr(config, section), setting)


def wrong(config: Sections, name: str, limit: str, message: str) -> NoReturn:
    """Raise `message` as an error about the setting `name`, whose value is beyond `limit`."""
    raise ConfigError(message, setting=name, value=value_of(config, name), limit=limit)


def refuse(config: Sections, name: str, beside: str, why: str) -> NoReturn:
    """Refuse a setting's value that another setting excludes."""
    wrong(config, name, beside, f"{name} = {value_of(config, name)!r} is refused with {beside}: {why}")
