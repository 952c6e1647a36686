"""The training steps of each round in an adversary's view, in the coordinates of the trained tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.case import Case
from attacks.steps import alignment
from secure_fed.methods.method import State
from secure_fed.runs.recording import Summed, Update
from secure_fed.tensors.tensors import Tensors

EVERYBODY = ""  # stands for all clients if single clients' steps are not seen


def stepping(case: Case) -> dict[int, frozenset[str]]:
    """The rounds with known steps, and the clients of these steps: single clients if updates are seen, else `EVERYBODY`."""
    seen = case.seen
    whose: dict[int, frozenset[str]] = {}
    for round_ in sorted(seen.states):
        clients = frozenset(one.client for one in seen.updates if one.round == round_ and one.weight > 0)
        if clients:
            whose[round_] = clients
        elif round_ + 1 in seen.states or any(one.round == round_ and one.weight > 0 for one in seen.sums):
            whose[round_] = frozenset({EVERYBODY})
    return whose


def steps(case: Case, round_: int) -> dict[str, Tensors]:
    """The known steps of a round, by client, from updates; else one step of all clients, from the sum, or from the states
    before and after.
    """
    seen = case.seen
    if updates := [one for one in seen.updates if one.round == round_ and one.weight > 0]:
        return of_clients(case, round_, updates)
    if sums := [one for one in seen.sums if one.round == round_ and one.weight > 0]:
        return {EVERYBODY: of_sums(case, round_, sums)}
    return {EVERYBODY: alignment.of_states(case.assembly, seen.states[round_], seen.states[round_ + 1], round_)}


def of_clients(case: Case, round_: int, updates: Sequence[Update]) -> dict[str, Tensors]:
    """The contributions of each client over all passes of a round."""
    means = _means(updates)
    sent: dict[str, Tensors] = {}
    for update in updates:
        step = _pulled_back(case, round_, update.pass_name, update.contribution, means)
        sent[update.client] = sent[update.client] + step if update.client in sent else step
    return sent


def of_sums(case: Case, round_: int, sums: Sequence[Summed]) -> Tensors:
    """The mean over clients of the contributions in all passes of a round."""
    means = {one.pass_name: one.total * (1 / one.weight) for one in sums}
    first, *others = (_pulled_back(case, round_, name, mean, means) for name, mean in means.items())
    for other in others:
        first = first + other
    return first


def _pulled_back(
    case: Case, round_: int, pass_name: str, contribution: Tensors, means: Mapping[str, Tensors]
) -> Tensors:
    assembly, before = case.assembly, case.seen.states[round_]
    order = assembly.method.plan(State(before, round=round_)).passes
    earlier = {name: means[name] for name in order[: order.index(pass_name)]}
    return alignment.of_contribution(assembly, before, round_, pass_name, contribution, earlier)


def _means(updates: Sequence[Update]) -> dict[str, Tensors]:
    """The mean contribution of each pass."""
    total: dict[str, Tensors] = {}
    weight: dict[str, float] = {}
    for update in updates:
        part, name = update.contribution * update.weight, update.pass_name
        total[name] = total[name] + part if name in total else part
        weight[name] = weight.get(name, 0.0) + update.weight
    return {name: total[name] * (1 / weight[name]) for name in total}


def examples_of(case: Case, units: NDArray[np.int64]) -> tuple[list[Any], NDArray[np.int64]]:
    """The selected examples of these units, and each example's index into `units`, ascending."""
    looked_at, owner = case.looked_at
    places = np.full(len(case.units), -1)
    places[units] = np.arange(len(units))
    at = np.flatnonzero(places[owner] >= 0)
    return [looked_at[i] for i in at], places[owner[at]]


def spaced(rounds: Sequence[int], most: int | None) -> list[int]:
    """At most `most` of the rounds, evenly spaced, including the first and the last."""
    if most is None or len(rounds) <= most:
        return list(rounds)
    return [rounds[int(i)] for i in np.linspace(0, len(rounds) - 1, max(1, most)).round()]
