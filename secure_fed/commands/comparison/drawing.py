"""The tasks' headline metric over rounds and over bytes, one line for each configuration, as one self-contained SVG.

Lines are means over seeds, with a band of one standard deviation to either side. Equal rows give equal bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from secure_fed.commands.comparison.rows import Row
from secure_fed.learning.tasks.headline import spoken
from secure_fed.report.formatting import byte_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHES = ("-", "--", "-.", ":")
_COLOURS = 10  # of matplotlib's cycle
_MOST_MARKERS = 30


def drawn(rows: Sequence[Row]) -> str:
    """The drawing; a configuration whose runs did not measure it has no line."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", fonttype="none", hashsalt="comparison")
        figure = Figure(figsize=(10, 4.4 + 0.22 * len(rows)), layout="constrained")
        by_round, by_bytes = figure.subplots(1, 2, sharey=True)
        unit, name = byte_unit(max((point.bytes for row in rows for point in row.curve), default=0))
        for place, row in enumerate(rows):
            _draw(by_round, place, row, [float(point.round) for point in row.curve])
            _draw(by_bytes, place, row, [point.bytes / unit for point in row.curve])
        by_round.set(xlabel="round", ylabel=" or ".join(dict.fromkeys(spoken(row.headline) for row in rows)))
        by_round.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        by_bytes.set(xlabel=f"sent up and down by all clients, {name}")
        for axes in (by_round, by_bytes):
            axes.grid(axis="y", alpha=0.4)
            axes.spines[["top", "right"]].set_visible(False)
        _name(figure, by_round, rows)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def _draw(axes: Axes, place: int, row: Row, across: Sequence[float]) -> None:
    """One line with its band; drawn even if it has no point, so that every configuration has its place in the legend."""
    style = {"color": f"C{place % _COLOURS}", "linestyle": _DASHES[place // _COLOURS % len(_DASHES)]}
    means = [point.score.mean for point in row.curve]
    axes.plot(across, means, marker="o" if len(means) <= _MOST_MARKERS else "", markersize=3, **style)  # type: ignore[arg-type]
    if any(point.score.deviation is not None for point in row.curve):
        widths = [point.score.deviation or 0.0 for point in row.curve]
        low, high = zip(*((mean - width, mean + width) for mean, width in zip(means, widths, strict=True)), strict=True)
        axes.fill_between(across, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _name(figure: Figure, axes: Axes, rows: Sequence[Row]) -> None:
    """Set the names verbatim: matplotlib leaves out names that begin with "_", and reads "$" as mathematics."""
    legend = figure.legend(axes.lines, [str(place) for place in range(len(rows))], loc="outside lower center", ncols=2)
    for text, row in zip(legend.get_texts(), rows, strict=True):
        text.set_parse_math(False)
        text.set_text(row.name)
