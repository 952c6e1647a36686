"""The current batch of a user's own training loop, shared by the loader, the model and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.own_loop.parts import Part


@dataclass
class Turn:
    """One batch of the loader.

    rows: its number of examples. counted: whether they enter the step's sum; False for the placeholder of an empty draw.
    rehearsal: which batch of a rehearsal (`parts`) it is; it trains nothing. None for a batch of a step. forward: whether the
    model has seen the batch.
    """

    rows: int
    counted: bool = True
    rehearsal: Part | None = None
    forward: bool = False
