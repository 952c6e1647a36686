"""The cost of a comparison in words: before it starts, from settings alone, and after it, from its runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from secure_fed.commands.comparison.totals import Charge, Total, best_only, totals
from secure_fed.config import RunConfig
from secure_fed.report.formatting import at_most, counted


def before(configs: Mapping[str, RunConfig], runs_each: int) -> list[str]:
    """The most that all private runs together will cost, as far as the settings state it; empty without privacy."""
    private = {name: config.privacy for name, config in configs.items() if config.privacy.unit != "none"}
    stated = [one for one in private.values() if one.epsilon is not None]
    open_ended = [name for name, one in private.items() if one.epsilon is None]
    lines = []
    if stated:
        epsilon = runs_each * math.fsum(one.epsilon or 0.0 for one in stated)
        delta = runs_each * math.fsum(one.delta for one in stated)
        lines.append(
            f"{counted(runs_each * len(stated), 'private run')} will cost at most epsilon {at_most(epsilon)} (delta "
            f"{delta:g}) together, for a unit in all of them"
        )
    if open_ended:
        lines.append(
            f"{', '.join(open_ended)}: a noise multiplier without privacy.epsilon costs what the result will state, in each of "
            f"{counted(runs_each, 'run')}; set privacy.epsilon to limit it"
        )
    return lines


def after(charges: Sequence[Charge], unprotected: Sequence[str]) -> list[str]:
    """The remarks on the cost of all private runs together. unprotected: configurations without a guarantee."""
    if not charges:
        return []
    alike: dict[Hashable, list[Total]] = {}
    for total in totals(charges):
        alike.setdefault(total.charges[0].promise, []).append(total)
    lines = [line for found in alike.values() for line in _group(found, len(charges))]
    if len(alike) > 1:
        lines.append(
            "Some of the runs protect other units, or count other neighbours, than others. Their epsilons do not add up, so "
            "none is stated against observers of all runs."
        )
    lines.append(_choice(charges))
    if unprotected:
        lines.append(f"No guarantee limits what the models of {', '.join(unprotected)} reveal.")
    return lines


def _group(found: Sequence[Total], runs: int) -> list[str]:
    """The remarks on totals of one promise, each about other units. runs: the number of private runs in all."""
    worst = max(found, key=lambda total: total.epsilon)
    lines = [_sum(worst, whole=len(worst.charges) == runs)] if len(worst.charges) > 1 else []
    if len(found) > 1:
        lines.append(_NOTES if _by_seed_alone(found) else _CLIENTS)
    price = best_only(worst)
    if price is not None and price[0] < worst.epsilon:
        lines.append(
            f"Publishing only the best of a random number of tries, {len(worst.charges)} on average, would cost epsilon "
            f"{at_most(price[0])} (delta {price[1]:g}). This command publishes every run, so it is not that (docs/privacy.md, "
            '"Choosing among several runs").'
        )
    return lines


def _by_seed_alone(found: Sequence[Total]) -> bool:
    """Whether these totals are about other units because each has notes of another seed."""
    seeds = {total.charges[0].seed for total in found}
    return len(seeds) == len(found) and all(total.apart == "notes" for total in found)


def _sum(total: Total, *, whole: bool) -> str:
    runs = counted(len(total.charges), "private run")
    which = f"All {runs}" if whole else f"The {runs} about the same units that cost most"
    added = (
        f", where the sum of epsilons is {at_most(total.epsilon_basic)}" if total.epsilon < total.epsilon_basic else ""
    )
    seen = f"; against observers who also see which clients take part, {at_most(total.epsilon_participants)}"
    seen = seen if total.epsilon_participants > total.epsilon else ", or which clients take part"
    return (
        f"{which} together: epsilon {at_most(total.epsilon)} (delta {total.delta:g}{added}) for {total.unit}, against "
        f"observers who see all their models{seen}. "
        "This holds if configurations and seeds were fixed before the first run; runs added in view of results need a ledger."
    )


def _choice(charges: Sequence[Charge]) -> str:
    if all(charge.public_test for charge in charges):
        return (
            "Choosing a row by its accuracy costs nothing on top: it follows from these models and a public test set."
        )
    return (
        "The accuracies are exact figures of rows that were held out of private ones. No epsilon covers these rows, nor a "
        "choice by their accuracy: set data.test to public rows."
    )


_NOTES = (
    "Each seed makes its own notes, and nobody has notes in the runs of two seeds: only runs with the same seed add up."
)
_CLIENTS = (
    "Clients that secure-fed draws are other clients with another seed or division. The rows of one lie with many clients of "
    "another, so no epsilon holds against observers of runs of several: name clients in the data (data.client), or compare "
    "with one seed."
)
