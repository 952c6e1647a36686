"""Membership scores of phantoms under noise correlated over rounds: from the releases with the correlation undone.

Rounds release X + C^-1 Z (`privacy.correlation`), as means over R. Row t of C (X + C^-1 Z) = C X + Z is the sum over j of c_j
times the release of round t - j: all information about a phantom is in these rows, whose noise is independent. Let e be the
contribution of a phantom in its turns, p_t its inner product with the mean of round t, and

    y_t = sum over j of c_j p_(t-j)        a_t = sum over j of c_j [it had its turn in round t - j].

Then y_t is about N(a_t |e|^2 / R, (|e| sigma)^2) for a member and N(0, (|e| sigma)^2) for a non-member, sigma being the
standard deviation of Z on a coordinate of a mean, and the log-likelihood ratio of a round is

    a_t (y_t - a_t |e|^2 / (2 R)) / (R sigma^2).

Its sum over all rounds is the most powerful score where e is the same in every turn and the other clients contribute nothing
along e. With |e| the clip norm and sigma = z |e| / R it has the law of a Gaussian mechanism of mu^2 = (a_0^2 + a_1^2 + ...) /
z^2, as in the guarantee. A lost round released nothing: its row is missing, and a phantom had no turn in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PAST, LATEST = "phantoms.past", "phantoms.latest"  # in a state's memory


@dataclass(frozen=True)
class Past:
    """The last rounds, one for each coefficient of C, the latest first. products, turns: (rounds, phantoms) p and [turn]."""

    products: Floats
    turns: Floats
    latest: int

    @classmethod
    def before(cls, round_: int, band: int, phantoms: int) -> Past:
        """An empty history: no round before this one released anything."""
        return cls(np.zeros((band, phantoms)), np.zeros((band, phantoms)), round_ - 1)

    @classmethod
    def of(cls, kept: dict[str, torch.Tensor]) -> Past:
        products, turns = kept[PAST].double().numpy()
        return cls(products, turns, int(kept[LATEST]))

    def kept(self) -> dict[str, torch.Tensor]:
        """The tensors for a state's memory."""
        rows = torch.from_numpy(np.stack([self.products, self.turns]))
        return {PAST: rows, LATEST: torch.tensor(float(self.latest), dtype=torch.float64)}

    def then(self, round_: int, products: Floats, turns: Floats) -> Past:
        """The history with this round's release as the latest; rounds in between were lost."""
        lost = np.zeros((max(0, round_ - self.latest - 1), len(products)))

        def moved(new: Floats, old: Floats) -> Floats:
            rows: Floats = np.vstack([new[None], lost, old])[: len(old)]
            return rows

        return Past(moved(products, self.products), moved(turns, self.turns), round_)


def evidence(past: Past, column: Floats, lengths: Floats, cohort: float, std: float) -> Floats:
    """(phantoms,) the amount that the latest round adds to each score. column: c. lengths: of e. std: sigma."""
    y, a = column @ past.products, column @ past.turns
    grown: Floats = a * (y - a * np.square(lengths) / (2 * cohort)) / (cohort * std**2)
    return grown
