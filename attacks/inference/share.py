"""Property inference: the share of an attribute in a client's data, from its update.

The adversary has the model that the client began with, and public examples with the attribute and without it. It makes clients
of these whose share it chooses, trains them as the client trains, and learns to tell the share by the update (Melis et al.
2019, section 4, who classify updates; Ganju et al. 2018, who classify models). Here the learner is a ridge regression of the
share on the update, so that an update of more numbers than there are made-up clients is no difficulty. Its strength is chosen
on the made-up clients alone, each being left out in turn. It sees what is linear in the update: a property that moves updates
as much one way as the other stays hidden from it.

The guess that needs no update is the mean share of the made-up clients. An attack no nearer to the truth has found nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks.any_model.signals import Floats

Update = Callable[[Sequence[Any]], Floats]  # (numbers,) what a client with these examples sends
PENALTIES = 10.0 ** np.arange(-4, 5)  # as multiples of the mean squared length of an update
SHUFFLES = 999


@dataclass(frozen=True)
class Shares:
    """guessed: (clients,) shares, from 0 to 1. without: the guess for everybody that needs no update."""

    guessed: Floats
    without: float

    def error(self, true: Floats) -> float:
        """The mean distance from the truth."""
        return float(np.abs(self.guessed - true).mean())

    def baseline(self, true: Floats) -> float:
        return float(np.abs(self.without - true).mean())

    def p_value(self, true: Floats, seed: int = 0) -> float:
        """The probability of so small an error if the guesses belonged to other clients: of all orders of them, by a sample."""
        rng, found = np.random.default_rng(seed), self.error(true)
        shuffled = [np.abs(rng.permutation(self.guessed) - true).mean() for _ in range(SHUFFLES)]
        return float((1 + sum(one <= found + 1e-12 for one in shuffled)) / (1 + SHUFFLES))


def made_up(
    update: Update, having: Sequence[Any], lacking: Sequence[Any], clients: int, size: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Updates (clients, numbers) and shares (clients,) of clients of `size` public examples, shares uniform from 0 to 1."""
    updates, shares = [], []
    for _ in range(clients):
        count = int(rng.integers(size + 1))
        chosen = [having[i] for i in rng.integers(len(having), size=count)]
        chosen += [lacking[i] for i in rng.integers(len(lacking), size=size - count)]
        updates.append(update([chosen[i] for i in rng.permutation(size)]))
        shares.append(count / size)
    return np.stack(updates), np.array(shares)


def guessed(updates: Floats, shadows: Floats, shares: Floats) -> Shares:
    """The share of each client by its update (clients, numbers), from made-up clients (shadows, numbers) of known shares."""
    centre, mean = shadows.mean(0), float(shares.mean())
    own, theirs = shadows - centre, updates - centre
    kernel = own @ own.T
    scale = float(np.trace(kernel)) / len(own) or 1.0
    best = min(PENALTIES * scale, key=lambda penalty: _left_out(kernel, shares - mean, penalty))
    weights = np.linalg.solve(kernel + best * np.eye(len(own)), shares - mean)
    return Shares(np.clip(mean + theirs @ own.T @ weights, 0.0, 1.0), mean)


def _left_out(kernel: Floats, shares: Floats, penalty: float) -> float:
    """The mean squared error for a made-up client of the regression on all others."""
    inverse = np.linalg.inv(kernel + penalty * np.eye(len(kernel)))
    return float(np.mean(np.square(inverse @ shares / np.diag(inverse))))
