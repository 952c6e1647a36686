"""Property inference: the share of an attribute in a client's data, from its update.

The adversary has the model that the client started from, and public examples with and without the attribute. From these it
simulates clients with chosen shares, trains them as the client trains, and learns to predict the share from the update (Melis
et al. 2019, section 4, classify updates; Ganju et al. 2018 classify models). The predictor is a ridge regression of the share
on the update, so an update may have more numbers than there are simulated clients. Its penalty is chosen on the simulated
clients alone, leaving each out in turn. It detects only linear effects: a property that moves updates equally in opposite
directions stays hidden.

The guess without an update is the mean share of the simulated clients. An attack that is no closer to the truth has found
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks.adversary.null import Floats

Update = Callable[[Sequence[Any]], Floats]  # (numbers,) the update of a client with these examples
PENALTIES = 10.0 ** np.arange(-4, 5)  # as multiples of the mean squared length of an update
SHUFFLES = 999


@dataclass(frozen=True)
class Shares:
    """guessed: (clients,) shares, from 0 to 1. without: the guess without an update, the same for every client."""

    guessed: Floats
    without: float

    def error(self, true: Floats) -> float:
        """The mean distance from the truth."""
        return float(np.abs(self.guessed - true).mean())

    def baseline(self, true: Floats) -> float:
        return float(np.abs(self.without - true).mean())

    def p_value(self, true: Floats, seed: int = 0) -> float:
        """The probability of so small an error under a random permutation of the guesses over clients, by sampling."""
        rng, found = np.random.default_rng(seed), self.error(true)
        shuffled = [np.abs(rng.permutation(self.guessed) - true).mean() for _ in range(SHUFFLES)]
        return float((1 + sum(one <= found + 1e-12 for one in shuffled)) / (1 + SHUFFLES))


def made_up(
    update: Update, having: Sequence[Any], lacking: Sequence[Any], clients: int, size: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Updates (clients, numbers) of simulated clients with `size` public examples, and their shares, uniform from 0 to 1."""
    updates, shares = [], []
    for _ in range(clients):
        count = int(rng.integers(size + 1))
        chosen = [having[i] for i in rng.integers(len(having), size=count)]
        chosen += [lacking[i] for i in rng.integers(len(lacking), size=size - count)]
        updates.append(update([chosen[i] for i in rng.permutation(size)]))
        shares.append(count / size)
    return np.stack(updates), np.array(shares)


def guessed(updates: Floats, shadows: Floats, shares: Floats) -> Shares:
    """Each client's share from its update (clients, numbers), learned on simulated clients (shadows, numbers) with `shares`."""
    centre, mean = shadows.mean(0), float(shares.mean())
    own, theirs = shadows - centre, updates - centre
    kernel = own @ own.T
    scale = float(np.trace(kernel)) / len(own) or 1.0
    best = min(PENALTIES * scale, key=lambda penalty: _left_out(kernel, shares - mean, penalty))
    weights = np.linalg.solve(kernel + best * np.eye(len(own)), shares - mean)
    return Shares(np.clip(mean + theirs @ own.T @ weights, 0.0, 1.0), mean)


def _left_out(kernel: Floats, shares: Floats, penalty: float) -> float:
    """The mean squared error for a simulated client of the regression on all others."""
    inverse = np.linalg.inv(kernel + penalty * np.eye(len(kernel)))
    return float(np.mean(np.square(inverse @ shares / np.diag(inverse))))
