"""How the seconds that `secure_aggregation.py` measured grow with the documented work, and a plot of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Point:
    work: float  # words of 32 bits that the documented cost counts
    seconds: float
    series: str  # what it is drawn as


@dataclass(frozen=True)
class Fit:
    """seconds = fixed + word * work, with the least sum of squared relative errors and neither coefficient negative."""

    fixed: float
    word: float
    exponent: float  # of work, where seconds are fitted as a power of it instead
    worst: float  # largest ratio of measured to fitted seconds, either way up

    def __str__(self) -> str:
        return (
            f"{1e3 * self.fixed:.2f} ms + {1e9 * self.word:.3f} ns a word; every point within {self.worst:.2f}x of that; "
            f"as a power of the work: {self.exponent:.2f}"
        )


def spread(points: list[Point]) -> bool:
    """Whether there are enough different sizes for a fit to say anything."""
    return len({point.work for point in points}) > 2


def fitted(points: list[Point]) -> Fit:
    work, seconds = (np.array([getattr(point, name) for point in points]) for name in ("work", "seconds"))
    columns = np.stack([1 / seconds, work / seconds], 1)
    fixed, word = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
    if fixed < 0:
        fixed, word = 0.0, float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
    exponent = np.polyfit(np.log(work), np.log(seconds), 1)[0]
    ratios = np.abs(np.log(seconds / (fixed + word * work)))
    return Fit(float(fixed), float(word), float(exponent), float(np.exp(ratios.max())))


def draw(axis: Any, points: list[Point], title: str, label: str) -> None:
    fit = fitted(points)
    for series in dict.fromkeys(point.series for point in points):
        ours = [point for point in points if point.series == series]
        axis.plot([p.work for p in ours], [p.seconds for p in ours], "o", markersize=4, label=series)
    ends = np.geomspace(min(p.work for p in points), max(p.work for p in points), 100)
    axis.plot(ends, fit.fixed + fit.word * ends, color="black", linewidth=0.8, label="linear in the work")
    axis.set(xscale="log", yscale="log", title=title, xlabel=label, ylabel="seconds, one thread")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def plot(clients: list[Point], servers: list[Point], place: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "secure_aggregation"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10.4, 4))
    draw(axes[0], clients, "One client's masking", "k d: neighbours x words")
    draw(axes[1], servers, "The server: adding up and unmasking", "n d + drops k d: words")
    figure.tight_layout()
    figure.savefig(place, metadata={"Date": None})
