"""The current batch of a user's own training loop, shared by the loader, the model and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Turn:
    """One batch of the loader.

    rows: its number of examples. counted: whether they enter the step's sum; False for the placeholder of an empty draw.
    rehearsal: whether the batch belongs to `rehearsal`, which trains nothing. forward: whether the model has seen the batch.
    """

    rows: int
    counted: bool = True
    rehearsal: bool = False
    forward: bool = False
