"""Numbers formatted for people. Every function returns `MISSING` for a number that was not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context

from secure_fed.learning.tasks import headline

MISSING = "–"
NOT_FINITE = "not finite"

_BYTE_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def number(value: float | None, digits: int = 3) -> str:
    """`0.8714` -> "0.871", `12345` -> "12,345"."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return NOT_FINITE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """A learning rate or another number whose size is not known beforehand: `0.0003` -> "0.0003"."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.4g}"


def at_most(value: float | None, digits: int = 3) -> str:
    """Rounded up, so that an upper bound stays one: `7.961` -> "7.97", `15_737.7` -> "15,800"."""
    if value is None or not math.isfinite(value):
        return number(value)
    bound = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    short = f"{bound:,f}"
    return short.rstrip("0").rstrip(".") if "." in short else short


def percent(value: float | None) -> str:
    """`0.8714` -> "87.1 %"."""
    if value is None or not math.isfinite(value):
        return number(value)
    return headline.percent(value)


def byte_unit(largest: float) -> tuple[float, str]:
    """The best decimal unit for numbers up to `largest` bytes, as (bytes in one unit, its name)."""
    power = 0
    while power + 1 < len(_BYTE_UNITS) and largest >= 999.5 * 1000**power:  # a number that would round to 1000
        power += 1
    return float(1000**power), _BYTE_UNITS[power]


def size(count: float | None) -> str:
    """`1_234_567` bytes -> "1.23 MB"."""
    if count is None or not math.isfinite(count):
        return number(count)
    one, name = byte_unit(count)
    shown = count / one
    digits = 0 if one == 1 or shown >= 99.95 else 1 if shown >= 9.995 else 2
    return f"{shown:,.{digits}f} {name}"


def duration(seconds: float | None) -> str:
    """The two largest units: `135` -> "2 min 15 s"."""
    if seconds is None or not math.isfinite(seconds):
        return number(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def time(seconds: float | None) -> str:
    """As `duration`, with fractions below ten seconds: `0.65` -> "0.65 s", `0.0096` -> "9.6 ms"."""
    if seconds is None or not math.isfinite(seconds) or seconds >= 9.95:
        return duration(seconds)
    return f"{seconds:.2g} s" if seconds >= 0.995 or not seconds else f"{1000 * seconds:.3g} ms"


def power_of_two(bound: float) -> str:
    """A small probability, rounded up: `7e-13` -> "2^-40.3"."""
    return f"2^{-math.floor(-10 * math.log2(bound)) / 10:g}"


def counted(count: int | None, singular: str, plural: str = "") -> str:
    """`1, "client"` -> "1 client"; `8, "client"` -> "8 clients"."""
    return f"{number(count)} {singular if count == 1 else plural or singular + 's'}"


def listed(names: Sequence[str]) -> str:
    """`["a", "b", "c"]` -> "a, b and c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
