"""`--fail-above NAME=NUMBER`: the limit above which an audit exits with a special status, for pipelines."""

from __future__ import annotations

import math

from secure_fed.errors import ConfigError

ABOVE_LIMIT, CANNOT_TELL = 4, 5  # exit statuses


def limit_of(written: str | None, name: str, give: str, most: float = 1.0) -> float:
    """The number after `name=`, from 0 to `most`; `most` without the option. give: the advice in the error message."""
    if written is None:
        return most
    found, _, value = written.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if found != name or not 0 <= number <= most:
        raise ConfigError(f"--fail-above is {written!r:.40}: {give}")
    return number
