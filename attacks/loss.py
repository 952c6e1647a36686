"""Loss threshold (Yeom et al. 2018, section III-B): examples that the final model fits better are more likely members.

score(x) = phi(x), the confidence of the model in x, averaged over the examples of a unit. It needs the final model and no other
training, so every adversary can make it. Unlike LiRA and RMIA, it does not account for an example's difficulty.
"""

from __future__ import annotations

from attacks.adversary.case import Case, Finding, Settings


def run(case: Case, settings: Settings) -> Finding:
    """(units,) mean confidences of the final state."""
    return Finding(scores=case.unit_confidences(case.seen.final))


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("loss"))
