"""One unit of an audit pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unit:
    """One unit of the audit pool. name: "client-0007", or "client-0007/13" for the 14th example (or group) of that client."""

    name: str
    client: str
    examples: Sequence[Any]
