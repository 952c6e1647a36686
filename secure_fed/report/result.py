"""A result that shows itself in a notebook, and draws its rounds.

A notebook is often passed on with its outputs. So only the public part of a private run is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.tasks.headline import scores, spoken
from secure_fed.runs import run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WITHHELD = (
    "The accuracy is withheld here: it was measured on rows held out of the clients' own data, and no noise covers it."
)
Points = list[tuple[int, float]]
_LABELS = {"train_loss": "train loss", "loss": "test loss"}


class Result(run.Result):
    """The outcome of a run: `summary` is `result.json`, `state` the global tensors.

    At the end of a notebook's cell, `result` shows its public part as a table, and `result.plot()` draws it by round.
    """

    def __repr__(self) -> str:
        """The method, the model and the data: a notebook keeps this text beside the table, so nothing private may be in it."""
        from secure_fed.report.terminal import title

        return f"<Result of {title(self.summary)}, {self.summary['rounds']} rounds>"

    def _repr_html_(self) -> str:
        from secure_fed.report.notebook import notebook_table
        from secure_fed.report.terminal import rows, title

        found = self.summary
        if found["unit"] == "none" or is_declared(found["test"]["from"]):
            return notebook_table(title(found), rows(found))
        untested = {**found, "macro_f1": None, "metrics": {}, "commonest": None}
        shown = [row for row in rows(untested) if row[0] != "accuracy"]
        return notebook_table(title(found), shown, _WITHHELD)

    def plot(self) -> Figure:
        """The headline metric and loss by round and, if a private run charges rounds for everybody, the epsilon spent."""
        from secure_fed.report.drawing import drawn

        names = scores(self.summary["task"])
        measured, loss = self._curves(*names), self._curves("train_loss", "loss")
        return drawn({spoken(names[0]): measured, "loss": loss, "epsilon": {"epsilon": self._epsilon()}})

    def _curves(self, *names: str) -> dict[str, Points]:
        return {_LABELS.get(name, spoken(name)): self._points(name) for name in names}

    def _points(self, name: str) -> Points:
        found = ((record["round"], record.get(name)) for record in self.public_records)
        return [(number, value) for number, value in found if isinstance(value, float) and math.isfinite(value)]

    def _epsilon(self) -> Points:
        if self.plan is None or self.plan.limits:  # limits count each client's releases, not rounds
            return []
        numbers: Sequence[int] = [record["round"] for record in self.public_records]
        again = max(0, self.summary["releases"] - self.plan.passes * max(numbers, default=0))  # by interrupted rounds
        return [(number, self.plan.epsilon(number * self.plan.passes + again)) for number in numbers]
