"""The effect of one guarantee's noise on each method, by the number of entries it releases; for `secure-fed budget plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from privacy.promises import Possible, in_turn, least_cohort, pick
from secure_fed.methods.catalogue import on
from secure_fed.methods.counted import usual_classes
from secure_fed.methods.method import Method, State
from secure_fed.report.terminal import PlainConsole
from secure_fed.rounds.way import reached, unsteady

if TYPE_CHECKING:
    from privacy.planning import Setting
    from privacy.target import Target

_EXPLAINED = (
    "Numbers: under noise in a round, each counted once for every pass of it; of FRA those alone whose noise can reach the "
    "model. Length: of that noise, over the longest way that these numbers can travel. Hopeless below: with smaller "
    "cohorts the noise is longer than that, whatever central noise is chosen. What a method makes of a release beyond that "
    "(products of noised factors) is not counted, nor that noise cancels less over rounds where what is taken in changes (FRA)."
)


@dataclass(frozen=True)
class Space:
    """The number of a method's noised entries, the best way to add noise, and the smallest cohort that is not hopeless."""

    method: str
    numbers: int
    noise: str
    correlation: str
    length: float
    hopeless_below: int | None


def spaces(model: str, pooling: str, setting: Setting, target: Target, possible: Possible) -> Iterator[Space]:
    """A row for each method with client-level privacy that fits the model, least noise first. pooling: as `model.pooling`."""
    rows = (_space(*made, setting, target, possible) for made in on(model, usual_classes(model), pooling))
    yield from sorted(rows, key=lambda row: (row.length, row.method))


def show(console: PlainConsole, model: str, rows: list[Space]) -> None:
    from rich.table import Table

    table = Table("method", title=f"Methods on {model}", title_style="bold")
    for head in ("numbers", "noise", "correlation", "length", "hopeless below"):
        table.add_column(head, justify="left" if head in ("noise", "correlation") else "right")
    for row in rows:
        least = "any cohort" if row.hopeless_below is None else str(row.hopeless_below)
        table.add_row(row.method, f"{row.numbers:,}", row.noise, row.correlation, f"{row.length:.3f}", least)
    console.print(table)
    console.print(_EXPLAINED)


def _space(name: str, method: Method, state: State, setting: Setting, target: Target, possible: Possible) -> Space:
    numbers, passes = reached(method, state), len(method.plan(state).passes)
    own, correlated = replace(setting, dim=numbers), passes == 1 and not unsteady(method, state, setting.rounds)
    way = pick(own, in_turn(own, target, replace(possible, correlated=correlated)))
    least = least_cohort(own, target, correlated=correlated)
    return Space(name, numbers, way.noise, way.correlation, way.share(own) or 0.0, least)
