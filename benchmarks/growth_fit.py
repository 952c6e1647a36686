"""Fits of measured seconds to the documented work, and plots of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from runs_file import put_picture


@dataclass(frozen=True)
class Point:
    """seconds: measured at a documented cost of `work`. series: the series in the plot. at: the place on the axis."""

    work: float
    seconds: float
    series: str
    at: float | None = None  # the work, if not given

    @property
    def place(self) -> float:
        return self.work if self.at is None else self.at


@dataclass(frozen=True)
class Fit:
    """seconds = fixed + each * work, with the least sum of squared relative errors and neither coefficient negative.

    If the documented work is the same at every point, `each` is 0.
    """

    fixed: float
    each: float
    exponent: float  # of a fit of seconds as a power of the axis value instead
    worst: float  # largest ratio of measured to fitted seconds, or of fitted to measured

    def __str__(self) -> str:
        return (
            f"{1e3 * self.fixed:.2f} ms + {1e9 * self.each:.4g} ns each; every point within {self.worst:.2f}x of that; "
            f"as a power: {self.exponent:.2f}"
        )


@dataclass(frozen=True)
class Panel:
    """One plot: points, and the label of its axis."""

    title: str
    label: str
    points: Sequence[Point]

    def __str__(self) -> str:
        fit = fitted(self.points) if spread(self.points) else "too few sizes to say"
        return f"    {self.title + ', ' + self.label + ':':66}{fit}"


def spread(points: Sequence[Point]) -> bool:
    """Whether there are enough different sizes for a meaningful fit."""
    return len({point.place for point in points}) > 2


def fitted(points: Sequence[Point]) -> Fit:
    work, seconds, place = (
        np.array([getattr(point, name) for point in points]) for name in ("work", "seconds", "place")
    )
    columns = np.stack([1 / seconds, work / seconds], 1)
    fixed, each = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
    if fixed < 0:
        fixed, each = 0.0, alone(columns[:, 1])
    elif each < 0 or np.ptp(work) == 0:
        fixed, each = alone(columns[:, 0]), 0.0
    exponent = np.polyfit(np.log(place), np.log(seconds), 1)[0]
    ratios = np.abs(np.log(seconds / (fixed + each * work)))
    return Fit(float(fixed), float(each), float(exponent), float(np.exp(ratios.max())))


def alone(column: NDArray[np.float64]) -> float:
    """The coefficient of least squared error with this column alone."""
    return float(column.sum() / (column**2).sum())


def draw(axis: Any, panel: Panel) -> None:
    for series in dict.fromkeys(point.series for point in panel.points):
        ours = [point for point in panel.points if point.series == series]
        axis.plot([p.place for p in ours], [p.seconds for p in ours], "o", markersize=4, label=series)
    if spread(panel.points):
        fit = fitted(panel.points)
        ends = [max(panel.points, key=lambda p, sign=sign: sign * p.place) for sign in (-1, 1)]
        places, work = (np.geomspace(*(getattr(end, name) for end in ends), 100) for name in ("place", "work"))
        axis.plot(places, fit.fixed + fit.each * work, color="black", linewidth=0.8, label="documented cost")
    low, high = (pick(point.seconds for point in panel.points) for pick in (min, max))
    if high < 5 * low:  # show at least a decade, so that noise does not look like growth
        centre = (low * high) ** 0.5
        axis.set_ylim(centre / 10**0.5, centre * 10**0.5)
    axis.set(xscale="log", yscale="log", title=panel.title, xlabel=panel.label, ylabel="seconds, one thread")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def plot(panels: Sequence[Panel], place: Path, columns: int = 2) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5.2 * columns, 4 * rows), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        draw(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.tight_layout()
    put_picture(place, figure)
