"""The meaning of a guarantee in detail: the true-positive rates that it allows, other deltas, and groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fed.report.formatting import at_most, number, rate
from secure_fed.report.page import plots
from secure_fed.report.page.guarantee import Guarantee
from secure_fed.report.page.markup import figure, figures, folded, paragraph, table

Floats = NDArray[np.float64]


def in_detail(guarantee: Guarantee) -> str:
    """The section, folded away; empty for runs whose result lacks these numbers."""
    terms = guarantee.terms
    if not terms.get("curve"):
        return ""
    curve = table(("delta", "epsilon"), ((f"{one['delta']:g}", at_most(one["epsilon"])) for one in terms["curve"]))
    return folded(
        "The guarantee in detail",
        figures(_picture(terms)),
        paragraph(_mu(terms)),
        paragraph("All of these hold at once:"),
        curve,
        _groups(terms, guarantee.delta),
    )


def allowed(terms: Mapping[str, Any]) -> Callable[[Floats], Floats]:
    """The largest true-positive rate at a false-positive rate: by mu where it is exact, else by all (epsilon, delta)."""
    from scipy.special import ndtr, ndtri

    mu, curve = terms["gaussian_mu"], terms["curve"]

    def caught(alarms: Floats) -> Floats:
        if mu is not None:
            exact: Floats = ndtr(ndtri(alarms) + mu)
            return exact
        bounds = [np.ones_like(alarms)]
        for one in curve:
            up, down = np.exp(min(one["epsilon"], 700.0)), np.exp(-one["epsilon"])
            bounds += [up * alarms + one["delta"], 1 - down * (1 - one["delta"] - alarms)]
        least: Floats = np.min(bounds, axis=0)
        return least

    return caught


def _picture(terms: Mapping[str, Any]) -> str:
    title = "Catches that the guarantee allows"
    how = "Exact for this mechanism." if terms["gaussian_mu"] is not None else "By epsilon at all these deltas."
    return figure(
        title,
        plots.tradeoff("most catches at a rate of false alarms", allowed(terms)),
        f"Somebody who knows all else says who was in the training. No attack lies above the line; dashed: guessing. {how}",
    )


def _mu(terms: Mapping[str, Any]) -> str:
    mu = terms["gaussian_mu"]
    if mu is None:
        return "The guarantee is not exactly that of one Gaussian, so no mu is given."
    return f"It is exactly Gaussian differential privacy of mu {rate(mu)}: telling one draw of N(0, 1) from one of N(mu, 1)."


def _groups(terms: Mapping[str, Any], delta: float) -> str:
    rows = [(number(one["units"]), at_most(one["epsilon"])) for one in terms["groups"]]
    if not rows:
        return paragraph(f"At delta {delta:g} nothing follows for two units together.")
    loose = "" if all(one["exact"] for one in terms["groups"]) else " This bound is loose."
    return paragraph(f"For several units together, at delta {delta:g}:{loose}") + table(("units", "epsilon"), rows)
