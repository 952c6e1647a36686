"""The figure of a result."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = Mapping[str, Sequence[tuple[int, float]]]


class Drawing(Figure):
    """A figure that a notebook shows, whether or not pyplot was imported there."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=80)
        return buffer.getvalue()


def drawn(panels: Mapping[str, Curves]) -> Figure:
    """A figure of the panels that have points, side by side, over the rounds."""
    shown = {name: curves for name, curves in panels.items() if any(curves.values())}
    figure = Drawing(figsize=(3.8 * max(1, len(shown)), 2.8), layout="constrained")
    for place, (name, curves) in enumerate(shown.items(), start=1):
        _draw(figure.add_subplot(1, len(shown), place), name, {label: own for label, own in curves.items() if own})
    return figure


def _draw(axes: Axes, name: str, curves: Curves) -> None:
    for label, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel="round", ylabel=name if len(curves) > 1 else next(iter(curves)))
    axes.set_ylim(0, 1 if name in ("accuracy", "F1") else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False)
