"""The effect of one guarantee's noise on each method, by the number of entries it releases; for `secure-fed budget plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from privacy.promises import Possible, in_turn, least_cohort, pick
from secure_fed.commands.ways import noise_in_words
from secure_fed.methods.catalogue import on
from secure_fed.methods.counted import usual_classes
from secure_fed.methods.method import Method, State
from secure_fed.report.terminal import NARROW, PlainConsole
from secure_fed.rounds.open_settings import reached, unsteady

if TYPE_CHECKING:
    from privacy.planning import Setting
    from privacy.target import Target

_EXPLAINED = (
    "Numbers: the noised numbers of a round; one that is sent in two passes counts twice; of FRA only those whose noise "
    "reaches the model. Noise: the way with the least noise for this method. Length: of the final noise, divided by the "
    "longest distance that these numbers can move. Hopeless below: with smaller cohorts the noise is longer than this "
    "distance, whatever central noise is chosen. Not counted: products of noised factors, and that noise cancels less if a "
    "method's space changes between rounds (FRA)."
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

    table = Table(title=f"Methods on {model}", title_style="bold", **NARROW)
    table.add_column("method", no_wrap=True)
    for head in ("numbers", "noise", "length", "hopeless\nbelow"):
        table.add_column(head, justify="left" if head == "noise" else "right")
    for row in rows:
        least = "any cohort" if row.hopeless_below is None else str(row.hopeless_below)
        table.add_row(
            row.method, f"{row.numbers:,}", noise_in_words(row.noise, row.correlation), f"{row.length:.3f}", least
        )
    console.print(table)
    console.print(_EXPLAINED)


def _space(name: str, method: Method, state: State, setting: Setting, target: Target, possible: Possible) -> Space:
    numbers, passes = reached(method, state), len(method.plan(state).passes)
    own, correlated = replace(setting, dim=numbers), passes == 1 and not unsteady(method, state, setting.rounds)
    way = pick(own, in_turn(own, target, replace(possible, correlated=correlated)))
    least = least_cohort(own, target, correlated=correlated)
    return Space(name, numbers, way.noise, way.correlation, way.share(own) or 0.0, least)
