"""A result that shows itself in a notebook, and draws its rounds.

A notebook is often passed on with its outputs. So only the public part of a private run is shown.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.tasks.headline import scores, spoken
from secure_fed.report.markup import notebook_table
from secure_fed.report.terminal import rows, title
from secure_fed.runs import run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[int, float]]
_LABELS = {"train_loss": "train loss", "loss": "test loss"}
_WITHHELD = (
    "The accuracy is withheld here: it was measured on rows held out of the clients' own data, and no noise covers it."
)


class Result(run.Result):
    """The outcome of a run: `summary` is `result.json`, `state` the global tensors.

    At the end of a notebook's cell, `result` shows its public part as a table, and `result.plot()` draws it by round.
    """

    def __repr__(self) -> str:
        """The method, the model and the data: a notebook keeps this text beside the table, so nothing private may be in it."""
        return f"<Result of {title(self.summary)}, {self.summary['rounds']} rounds>"

    def _repr_html_(self) -> str:
        found = self.summary
        if found["unit"] == "none" or is_declared(found["test"]["from"]):
            return notebook_table(title(found), rows(found))
        untested = {**found, "macro_f1": None, "metrics": {}, "commonest": None, "no_learning": None}
        shown = [row for row in rows(untested) if row[0] != "accuracy"]
        return notebook_table(title(found), shown, _WITHHELD)

    def plot(self) -> Figure:
        """The headline metric and loss by round and, if a private run charges rounds for everybody, the epsilon spent."""
        names = scores(self.summary["task"])
        measured, loss = self._curves(*names), self._curves("train_loss", "loss")
        return _drawn({spoken(names[0]): measured, "loss": loss, "epsilon": {"epsilon": self._epsilon()}})

    def _curves(self, *names: str) -> dict[str, Points]:
        """The finite numbers of these names by round, under the names that a reader knows."""
        found = {}
        for name in names:
            values = ((record["round"], record.get(name)) for record in self.public_records)
            finite = [(number, value) for number, value in values if isinstance(value, float) and math.isfinite(value)]
            found[_LABELS.get(name, spoken(name))] = finite
        return found

    def _epsilon(self) -> Points:
        if self.plan is None or self.plan.limits:  # limits count each client's releases, not rounds
            return []
        numbers: Sequence[int] = [record["round"] for record in self.public_records]
        again = max(0, self.summary["releases"] - self.plan.passes * max(numbers, default=0))  # by interrupted rounds
        return [(number, self.plan.epsilon(number * self.plan.passes + again)) for number in numbers]


def _drawn(panels: Mapping[str, Mapping[str, Points]]) -> Figure:
    """A figure of the panels that have points, side by side, over the rounds.

    A notebook shows it, whether or not pyplot was imported there.
    """
    from matplotlib.figure import Figure

    class Drawing(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=80)
            return buffer.getvalue()

    shown = {name: curves for name, curves in panels.items() if any(curves.values())}
    figure = Drawing(figsize=(3.8 * max(1, len(shown)), 2.8), layout="constrained")
    for place, (name, curves) in enumerate(shown.items(), start=1):
        _draw(figure.add_subplot(1, len(shown), place), name, {label: own for label, own in curves.items() if own})
    return figure


def _draw(axes: Axes, name: str, curves: Mapping[str, Points]) -> None:
    from matplotlib.ticker import MaxNLocator

    for label, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel="round", ylabel=name if len(curves) > 1 else next(iter(curves)))
    axes.set_ylim(0, 1 if name in ("accuracy", "F1") else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False)
