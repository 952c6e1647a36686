"""A round's record, and the cost of its secure aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


@dataclass
class Spent:
    """The cost of masked sums: bytes of the protocol, models and masked vectors included, and seconds on either side.

    survivors: clients in the sum. left_out: clients among them that sent zeros because their contribution was not finite or
    out of range, 0 where the encoding does not count them.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    client_seconds: float = 0.0
    server_seconds: float = 0.0
    survivors: int = 0
    left_out: int = 0

    @staticmethod
    def together(passes: Sequence[Spent]) -> Record:
        """The cost of all passes of a round. `survivors` is the smallest number in any pass that had a sum."""
        added = {name: sum(getattr(one, name) for one in passes) for name in vars(passes[0])}
        return added | {"survivors": min((one.survivors for one in passes if one.survivors), default=None)}
