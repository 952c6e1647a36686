"""LiRA (Carlini et al. 2022, Algorithm 1) as an attack on a run; its formulas are in `attacks.shadow_scores`."""

from __future__ import annotations

import numpy as np

from attacks.adversary.case import Case, Finding, Settings
from attacks.adversary.null import Floats
from attacks.shadow_scores import OWN_VARIANCE, Bools, offline, online, require_references
from secure_fed.runs.membership.measured import mean_of_units

__all__ = ["OWN_VARIANCE", "offline", "online", "require_references", "run", "run_offline"]


def run(case: Case, settings: Settings) -> Finding:
    """The online score, with shrunk distances."""
    return Finding(
        scores=online(*_confidences(case, settings), shrunk=True), measured={"references": settings.references}
    )


def run_offline(case: Case, settings: Settings) -> Finding:
    """The offline score, with the same references."""
    return Finding(scores=offline(*_confidences(case, settings)), measured={"references": settings.references})


def _confidences(case: Case, settings: Settings) -> tuple[Floats, Floats, Bools]:
    """Confidences of the target and of the references, and the units that each reference was trained on."""
    references = case.references(settings.references)
    _, owner = case.looked_at
    each = case.reference_confidences(settings.references)
    reference_phi = np.stack([mean_of_units(phi, owner, len(case.units)) for phi in each])
    return case.unit_confidences(case.seen.final), reference_phi, references.inside


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("lira"))
