"""The verdict on the signals: void if a baseline explains them, else a leak, else nothing found.

Tests are one-sided: members score higher than the others (Mann and Whitney; `p_values`, also for equal scores). The smallest
of k p-values is multiplied by k (Bonferroni), so a model that never saw the members is called a leak with a probability of at
most ALPHA, whatever the signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attacks.evidence.baseline import Baseline
from secure_fed.runs.membership.roc import Ranking

ALPHA = 0.05
BLIND = {"words": "their words and labels", "length": "their length", "dates": "their dates"}


@dataclass(frozen=True)
class Found:
    """A signal's ranking, and the probability of one as good if the members were not in the training."""

    ranking: Ranking
    p_value: float


@dataclass(frozen=True)
class Verdict:
    """level: "void", "leak" or "nothing". best: the strongest signal."""

    level: str
    best: str
    sentences: tuple[str, ...]


def judged(found: Mapping[str, Found], baselines: Mapping[str, Baseline | str]) -> Verdict:
    """baselines: by what each uses ("words" or other), its result without the model, or the reason why it was not tried."""
    best = min(found, key=lambda name: (found[name].p_value, -found[name].ranking.auc))
    corrected = min(1.0, found[best].p_value * len(found))
    ranking = found[best].ranking
    low, high = ranking.auc_interval
    right = f"{100 * ranking.auc:.0f} right ({100 * low:.0f} to {100 * high:.0f})"
    tried = f"{len(found)} signals were tried" if len(found) > 1 else "One signal was tried"
    differ = {by: one for by, one in baselines.items() if not isinstance(one, str) and not one.at_chance}
    if differ:
        level = "void"
        by = max(differ, key=lambda name: differ[name].ranking.auc)
        first = (
            f"Members and others differ by {BLIND[by]} alone: a classifier without the model is right in "
            f"{100 * differ[by].ranking.auc:.0f} of 100 guesses. So the figures here show how the texts were chosen, not "
            "what the model remembers."
        )
    elif corrected < ALPHA:
        level = "leak"
        first = (
            f"The model gives away which texts were in its training: of 100 guesses which of two texts trained, its {best} "
            f"gets {right}; a coin gets 50. If it had never seen the members, a signal as good as this would come up with a "
            f"probability of {corrected:.2g}{' (of all signals together)' if len(found) > 1 else ''}."
        )
    else:
        level = "nothing"
        first = (
            f"{tried}, and none separates members from others better than chance: of 100 guesses which of two texts trained, "
            f"the best, {best}, gets {right}."
        )
    sentences = [first]
    for by, why in baselines.items():
        if isinstance(why, str):
            sentences.append(f"Whether they differ by {BLIND[by]} alone was not checked: {why}.")
    if level == "nothing":
        sentences.append("Other attacks, with reference models or with observations from the training, may show more.")
    sentences.append(
        "No epsilon follows: membership was not decided by coins, so other differences cannot be ruled out."
    )
    return Verdict(level, best, tuple(sentences))
