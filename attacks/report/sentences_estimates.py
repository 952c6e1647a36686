"""Sentences on the main attack's estimates of epsilon: their names and their assumptions. They prove nothing."""

from __future__ import annotations

from attacks.report.audited import Audit, Estimated
from attacks.report.wording import at_least
from secure_fed.report.formatting import listed

NAMES = {"independent": "if canaries are independent", "sampled_gaussian": "if the mechanism is Gaussian too"}
SUPPOSES = {
    "independent": "the exact distribution of non-members' scores, and canaries that are independent of each other",
    "sampled_gaussian": "the same, and a Gaussian mechanism with the run's sampling rate and number of releases",
}


def estimates(audit: Audit) -> tuple[Estimated, ...]:
    """The main attack's estimates, if there is a guarantee to compare them with."""
    cell = audit.main_cell
    return cell.estimates if cell is not None and audit.covers(cell) else ()


def estimated(audit: Audit) -> str:
    """The sentence with all estimates, and a warning if one is above the accounted epsilon."""
    found, cell = estimates(audit), audit.main_cell
    if not found or cell is None:
        return ""
    points = ("" if one.point is None else f"; most likely {at_least(one.point)}" for one in found)
    named = ((at_least(one.epsilon), NAMES.get(one.name, one.name)) for one in found)
    values = listed([f"{value} ({name}{point})" for (value, name), point in zip(named, points, strict=True)])
    high = [one for one in found if cell.accounted is not None and one.epsilon > cell.accounted]
    return f"Estimates of epsilon, which assume more than fair coins and prove nothing, are {values}.{_HIGH if high else ''}"


_HIGH = " One is above the accounted epsilon. That contradicts nothing by itself, but check the noise and its code."
