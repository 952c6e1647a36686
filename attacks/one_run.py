"""The one-run audit (Steinke, Nasr and Jagielski 2023): one training run, many units, each in or out by a coin.

The run itself tossed the coins, so one run suffices. Units are ranked by a score; the highest are guessed in and the lowest out
(Algorithm 1). More right guesses than an (epsilon, delta)-private training allows give a lower bound on epsilon
(`attacks.evidence.bounds`, from the scores of this attack and the coins). The score of a unit under the final model is

    labels and tokens planted   phi of the planted examples, averaged over a unit: a model that never saw the unit has no
                                reason to be confident in a wrong label
    directions                  how far the model moved from its start along the unit's direction (`canary_cosine`)

For ordinary units, with nothing planted, this equals the loss threshold, whose lower bound is computed in the same way.
"""

from __future__ import annotations

from dataclasses import replace

from attacks import canary_cosine
from attacks.adversary.case import Case, Finding, Inapplicable, Seen, Settings


def run(case: Case, settings: Settings) -> Finding:
    """(units,) scores of the final state."""
    planted = case.assembly.config.evaluation.canaries
    if case.assembly.audit_pool.directions:
        final = Seen(case.seen.vantage, case.seen.final)
        return canary_cosine.run(replace(case, seen=final), settings)
    if planted == "none":
        raise Inapplicable(
            "no canaries were planted (evaluation.canaries): for ordinary units the loss threshold shows as much"
        )
    return Finding(case.unit_confidences(case.seen.final), {"canaries": planted})


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("one_run"))
