"""An attack's success rate with its interval, beside the rate of a guess without any update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest, fisher_exact

from attacks.lying.trials import Outcome

_ERROR = 0.025


@dataclass(frozen=True)
class Rate:
    """hits: of `of` trials; for membership, of the trials with a member. interval: exact, 95 %, over trials. guess: the mean
    success rate of a guess.

    refused: trials that a client or the protocol refused; they count as misses. why: the first refusal. false_alarms: among the
    `quiet` trials, which have no member.
    """

    hits: int
    of: int
    interval: tuple[float, float]
    guess: float
    refused: int
    why: str
    false_alarms: int
    quiet: int

    @property
    def works(self) -> bool:
        """Whether the attack is better than the guess, and recognises members more often than it accuses others; each at 97.5 %
        confidence.
        """
        return self.interval[0] > self.guess and (not self.quiet or self._above_false_alarms() < _ERROR)

    def _above_false_alarms(self) -> float:
        """The probability of so many more hits than false alarms if both are equally likely (Fisher)."""
        trials = [[self.hits, self.of - self.hits], [self.false_alarms, self.quiet - self.false_alarms]]
        return float(fisher_exact(trials, alternative="greater").pvalue)


def rate(outcomes: Sequence[Outcome]) -> Rate:
    """The rate of these trials."""
    loud = [one for one in outcomes if not one.quiet]
    hits = sum(one.hit for one in loud)
    answered = [one.guess for one in outcomes if not one.refused]
    refusals = [one.refused for one in outcomes if one.refused]
    quiet = [one for one in outcomes if one.quiet]
    interval = binomtest(hits, len(loud)).proportion_ci(0.95) if loud else (0.0, 1.0)
    return Rate(
        hits,
        len(loud),
        (float(interval[0]), float(interval[1])),
        sum(answered) / len(answered) if answered else 0.0,
        len(refusals),
        refusals[0] if refusals else "",
        sum(one.hit for one in quiet),
        len(quiet),
    )
