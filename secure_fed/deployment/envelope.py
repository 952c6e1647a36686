"""An envelope: the content of one message between the coordinator and a node, before it means anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Envelope:
    """A header, which is one JSON object with a "kind", and named arrays."""

    header: bytes
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
