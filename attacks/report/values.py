"""Typed values from untrusted JSON: a value of the wrong type counts as missing. Nothing here raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Interval = tuple[float, float]
Row = Mapping[str, Any]

LARGEST = 1e12  # no figure of an audit is near it; a larger number may not fit into a float or onto a page


def number(value: object) -> float | None:
    """A finite number of plausible size, else None, also for True and False."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return None
    return float(value)


def share(value: object, default: float) -> float:
    """A number strictly between 0 and 1, else the default."""
    found = number(value)
    return found if found is not None and 0 < found < 1 else default


def count(value: object) -> int | None:
    """A non-negative integer, else None."""
    found = number(value)
    return None if found is None or found < 0 or found != int(found) else int(found)


def words(value: object) -> str:
    """A text or a number as text, else ""."""
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def row(value: object) -> Row:
    """A mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def rows(value: object) -> tuple[Row, ...]:
    """The mappings in a list."""
    return tuple(one for one in value if isinstance(one, Mapping)) if isinstance(value, list | tuple) else ()


def interval(value: object) -> Interval | None:
    """Two numbers in order, else None."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    low, high = map(number, value)
    return None if low is None or high is None or low > high else (low, high)


def numbers(value: object) -> list[float]:
    """A list of finite numbers; empty if any element is not one."""
    found = [number(one) for one in value] if isinstance(value, list | tuple) else []
    kept = [one for one in found if one is not None]
    return kept if len(kept) == len(found) else []
