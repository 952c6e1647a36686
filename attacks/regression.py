"""Membership from training steps: the regression coefficients of a step on the gradients of examples.

Local training moves a model along minus the gradients of its examples. But gradients of different examples are similar,
especially within a class, so the cosine between an example's gradient and a step shows mostly how usual the example is. A
regression on all gradients together isolates an example's own part. Let the rows of X be unit vectors along -g of the audited
units and of a population that certainly did not train, all at the state where the step d began. Then ridge regression of the
step on them,

    a = (X X^T + RIDGE m I)^-1 X d / |d|,       m the mean of the diagonal of X X^T,

gives each row the part of the step that no other row explains. Each step's coefficients are standardised over all rows, most of
which did not contribute to the step; a unit's score is the sum of its standardised coefficients over the rounds.

The step is the update of the unit's client if updates are seen, else the sum, else the change of the global state in a round.
For a method that sends products of factors, or splits them again, it is pulled back to the trained tensors (`adversary.steps`).

This corresponds to whitening before a matched filter: the population shows in which directions gradients vary anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.adversary.case import Case, Finding, Inapplicable, Settings
from attacks.adversary.null import Floats
from attacks.adversary.steps import EVERYBODY, examples_of, flattened, gradients, spaced, stepping, steps, trained_names
from secure_fed.tensors.tensors import Tensors

RIDGE = 0.1
ROUNDS = 12  # in which each unit is scored, unless the settings give a number
POPULATION = 300
_NUMBERS = 2**27  # entries of X: with more coordinates than this allows, X is sketched


def needed(rows: Tensor, towards: Tensor, ridge: float = RIDGE) -> Floats:
    """(rows, steps) coefficients a, from gradients (rows, P) and steps (steps, P); 0 for a gradient of 0."""
    x, d = -_units(rows), _units(towards)
    inner = (x @ x.T).double()
    inner.diagonal().add_(ridge * inner.diagonal().mean())
    return np.asarray(torch.linalg.solve(inner, (x @ d.T).double()).cpu().numpy())


def run(case: Case, settings: Settings) -> Finding:
    """(units,) scores; 0 for a unit whose client was seen in no round."""
    if case.seen.updates and case.assembly.audit_pool.kind == "client":
        raise Inapplicable("a whole client's membership needs no attack: every client that sends an update takes part")
    whose = stepping(case)
    if not whose:
        raise Inapplicable(
            "the steps of rounds were not kept: set evaluation.record to 'models' before the run, or to 'updates'"
        )
    clients = np.array([unit.client for unit in case.units])
    reached = {round_: np.isin(clients, list(names)) | (EVERYBODY in names) for round_, names in whose.items()}
    covered = {round_: np.flatnonzero(units) for round_, units in reached.items() if units.any()}
    # share of the units that a round covers
    usual = sum(map(len, covered.values())) / max(1, len(covered) * len(clients))
    rounds = spaced(list(covered), settings.max_rounds or math.ceil(ROUNDS / max(usual, 1e-9)))
    total, seen = np.zeros(len(clients)), np.zeros(len(clients))
    for round_ in rounds:
        towards, units = steps(case, round_), covered[round_]
        standing = _standing(case, round_, towards, units)
        for column, name in enumerate(towards):
            own = (clients[units] == name) | (name == EVERYBODY)
            total[units[own]] += standing[own, column]
            seen[units[own]] += 1
    return Finding(total, {"rounds": len(rounds), "units_without": int((seen == 0).sum())})


def _standing(case: Case, round_: int, towards: Mapping[str, Tensors], units: NDArray[np.int64]) -> Floats:
    """(units, steps) coefficients of a round, standardised within each step."""
    assembly, before = case.assembly, case.seen.states[round_]
    shared = [set(step) for step in towards.values()]
    names = [name for name in trained_names(assembly, before, round_) if all(name in one for one in shared)]
    flat = torch.stack([flattened(step, names) for step in towards.values()]).to(assembly.objective.device)
    population = case.from_population(POPULATION)
    examples, owner = examples_of(case, units)
    count = len(units) + len(population)
    whose = np.concatenate([owner, np.arange(len(units), count)])
    sketch = Sketch(flat.shape[1], _NUMBERS // count)
    rows = flat.new_zeros(count, sketch.width)
    for some, found in gradients(assembly, before, names, [*examples, *population], whose):
        rows[torch.from_numpy(some).to(rows.device)] = sketch(found)
    part = needed(rows, sketch(flat))
    spread = part.std(axis=0)
    standing = np.divide(part - part.mean(axis=0), spread, out=np.zeros(part.shape), where=spread > 0)
    return np.asarray(standing[: len(units)])


class Sketch:
    """Vectors of P coordinates in at most `width`. Inner products are exact or, if P is larger, unbiased: every coordinate is
    added with a random sign to a random place (Charikar et al. 2002), the same for all vectors.
    """

    def __init__(self, size: int, width: int) -> None:
        self.width = min(size, max(1, width))
        self._size = size
        generator = torch.Generator().manual_seed(0)
        if self.width < size:
            self._place = torch.randint(self.width, (size,), generator=generator)
            self._sign = torch.randint(2, (size,), generator=generator) * 2.0 - 1.0

    def __call__(self, vectors: Tensor) -> Tensor:
        """(n, P) -> (n, width)."""
        if self.width == self._size:
            return vectors
        place, sign = self._place.to(vectors.device), self._sign.to(vectors.device)
        added: Tensor = vectors.new_zeros(len(vectors), self.width).index_add_(1, place, vectors * sign)
        return added


def _units(rows: Tensor) -> Tensor:
    along: Tensor = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    return along


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("regression"))
