"""The batch that a training loop of the user's own is at, as the loader, the model and the optimizer know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Turn:
    """One batch of the loader.

    rows: its examples. counted: whether they are in the step's sum; not the example that stands in for an empty draw.
    rehearsal: whether the batch is one of `rehearsal`, on which nothing is trained. forward: whether the model has seen it.
    """

    rows: int
    counted: bool = True
    rehearsal: bool = False
    forward: bool = False
