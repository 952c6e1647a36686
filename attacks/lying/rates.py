"""An attack's success rate with its interval, beside the rate of a guess without any update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest

from attacks.lying.trials import Outcome


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
        """Whether the attack is better than the guess, at 97.5 % confidence."""
        return self.interval[0] > self.guess


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
