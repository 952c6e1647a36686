"""The releases of each round, as vectors in the coordinates of a client's contribution.

The most informative release in an adversary's view: for an example, its client's contribution if updates are seen; else the
sums; else the change of the global state in each round, written as the contribution of a client that trained exactly this
change; else the change over all rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from attacks.adversary.case import Case, Inapplicable
from attacks.adversary.null import Floats
from secure_fed.methods.method import State
from secure_fed.tensors.layout import Layout
from secure_fed.tensors.tensors import Tensors


@dataclass(frozen=True)
class Release:
    """The release of a round: `moved` is the unit vector of a contribution's coordinates, from clients that started at
    `before`; `length` is its norm before scaling. For a release of all rounds together, `round` is the first.

    trained: names that local training changes; sent: the ones among them that do not stay with the client. lr: local learning
    rate.
    """

    before: Tensors
    trained: tuple[str, ...]
    sent: tuple[str, ...]
    pass_name: str
    layout: Layout
    moved: Floats
    length: float
    lr: float
    round: int

    @property
    def linear(self) -> bool:
        """Whether the contribution is the change of the trained tensors, coordinate by coordinate."""
        return self.layout == Layout.of(self.before.select(self.sent))


def releases_of(case: Case, most: int | None) -> Callable[[str], list[Release]]:
    """`releases` by client, at most `most`, evenly spaced; computed once if they are the same for all clients.

    Otherwise the last client's are cached, because units are ordered by client.
    """
    found = lru_cache(1)(lambda client: evenly(releases(case, client), most))
    return found if _by_client(case) else lambda client: found("")


def _by_client(case: Case) -> bool:
    return bool(case.seen.updates) and case.assembly.audit_pool.kind != "client"


def releases(case: Case, client: str) -> list[Release]:
    """The finest releases in this adversary's view that a unit of that client may have moved."""
    seen = case.seen
    if _by_client(case):
        own = (update for update in seen.updates if update.client == client)
        found = [_of_contribution(case, one.round, one.pass_name, one.contribution) for one in own]
    elif seen.sums:
        found = [_of_contribution(case, one.round, one.pass_name, one.total) for one in seen.sums]
    elif len(seen.states) > 1:
        found = [_stepped(case, a, b) for a, b in itertools.pairwise(sorted(seen.states))]
    else:
        found = _over_all(case)
    return [release for release in found if release is not None and release.moved.any()]


def _of_contribution(case: Case, round_: int, pass_name: str, total: Tensors) -> Release | None:
    """The release of a contribution or of a sum, in the first pass; None for later passes, which depend on the first."""
    before = case.seen.states.get(round_, case.assembly.initial.tensors)
    return _release(case, round_, before, pass_name, total)


def _stepped(case: Case, a: int, b: int) -> Release | None:
    """The release of the rounds from `a` to `b`, without the part that the server's momentum, a known setting, carried over."""
    states, optimizer = case.seen.states, case.assembly.config.federation
    change = _change(case, a, states[a], states[b])
    if change is not None and optimizer.server_optimizer == "momentum" and a - 1 in states and b == a + 1:
        earlier = _change(case, a - 1, states[a - 1], states[a])
        if earlier is not None and Layout.of(earlier) == Layout.of(change):
            change = change.dense() - earlier.dense() * optimizer.server_beta
    return None if change is None else _release(case, a, states[a], _first_pass(case, a, states[a]), change)


def _changed(case: Case, round_: int, before: Tensors, after: Tensors) -> Release | None:
    """The change of the global state, as a contribution; None if it lost entries."""
    change = _change(case, round_, before, after)
    return None if change is None else _release(case, round_, before, _first_pass(case, round_, before), change)


def _first_pass(case: Case, round_: int, before: Tensors) -> str:
    return case.assembly.method.plan(State(before, round=round_)).passes[0]


def _change(case: Case, round_: int, before: Tensors, after: Tensors) -> Tensors | None:
    method, plan = case.assembly.method, case.assembly.method.plan(State(before, round=round_))
    sent = [name for name in plan.trainable if name not in case.assembly.server.personal]
    if Layout.of(before.select(sent)) != Layout.of(after.select(sent)):
        return None
    return method.contribute(plan.passes[0], before, after.select(sent), {})


def _over_all(case: Case) -> list[Release | None]:
    """The change over all rounds, once for every set of tensors that trained in some round."""
    assembly, before = case.assembly, case.assembly.initial.tensors
    rounds: dict[tuple[str, ...], int] = {}
    for round_ in range(assembly.config.federation.rounds):
        rounds.setdefault(assembly.method.plan(State(before, round=round_)).trainable, round_)
    found = [_changed(case, round_, before, case.seen.final) for round_ in rounds.values()]
    if None in found:
        raise Inapplicable(
            "the tensors of this method lost entries over the rounds, so the last cannot be compared with the first"
        )
    return found


def _release(case: Case, round_: int, before: Tensors, pass_name: str, released: Tensors) -> Release | None:
    assembly = case.assembly
    plan = assembly.method.plan(State(before, round=round_))
    if pass_name != plan.passes[0]:
        return None
    sent = tuple(name for name in plan.trainable if name not in assembly.server.personal)
    released = released.without(assembly.protection.contribution_mechanism.counters)
    layout = Layout.of(released)
    lr = case.seen.lr.get(round_, assembly.config.training.rate)
    return Release(
        before, plan.trainable, sent, pass_name, layout, unit_vector(released, layout), released.norm(), lr, round_
    )


def evenly(found: Sequence[Release], most: int | None) -> list[Release]:
    """At most `most` releases, evenly spaced."""
    if most is None or len(found) <= most:
        return list(found)
    return [found[i] for i in np.linspace(0, len(found) - 1, most).round().astype(int)]


def unit_vector(tensors: Tensors, layout: Layout) -> Floats:
    """The tensors in the coordinates of the layout, divided by their norm; zeros stay zeros."""
    flat: Floats = layout.flatten(tensors, torch.float64).numpy()
    norm = float(np.linalg.norm(flat))
    return flat / norm if norm else flat
