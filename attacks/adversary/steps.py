"""What an adversary sees of training: steps, gradients to compare them with, and releases as vectors.

Steps (`steps`, `of_clients`) are in the coordinates of the trained tensors. Local training moves these along minus the gradient
of the mean loss of its examples. So the cosine between a unit's -g and a step d indicates whether the unit contributed:

    cos(u) = <-g_u, d> / (|g_u| |d|)        g_u: of the unit's mean loss at the state that the step began at

If a method sends products of factors, or splits them again in every round, a difference of factors means little, so the change
is pulled back through the map c(w) that computes the contribution: with its Jacobian J at the state, d = J^T c. The inner
product of d with a step v of the factors equals that of J v with the contribution.

Releases (`releases_of`) are in the coordinates of a client's contribution. The most informative one in an adversary's view is,
for an example, its client's contribution if updates are seen; else the sums; else the change of the global state in each round,
written as the contribution of a client that trained exactly this change; else the change over all rounds.

Turns (`weights_of`) are the rounds that are informative about a unit under a public order of participation. Let c_t be the
release of round t over its norm |c_t|, and w_t its weight in the sum V that a unit's direction is compared with
(`canary_cosine`). If secret coins draw cohorts, every round has weight one. Under a public order a round without the unit's
turn has weight zero, because it contains nothing of the unit. If the noise is correlated over rounds, C^-1 Z, the rounds around
a turn share its noise and help to remove it. Row t of C times the releases has independent noise and contains the unit a_t
times: a = C [turns]. The sum over t of a_t times row t is most powerful if the other clients add nothing along the direction,
so w = C^T a |c|. A sum before the server's noise has no such noise, and there only turns count. All inputs are public: the
order, the settings, and the releases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.adversary.case import Case, Inapplicable
from attacks.adversary.null import Floats
from privacy.participation import PublicOrder
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.models.adapters.lora import pairs, scaling_of
from secure_fed.learning.training.common_passes.step_gradients import example_gradients
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.pass_shapes import length
from secure_fed.methods.method import State
from secure_fed.rounds.server import turns_of
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.recording import Summed, Update
from secure_fed.tensors.tensors import Layout, LowRank, Member, Tensors, dense

EVERYBODY = ""  # stands for all clients if single clients' steps are not seen
_One = TypeVar("_One")
_NUMBERS = 2**26  # numbers of per-example gradients at once
_EXAMPLES = 64


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
    return {EVERYBODY: of_states(case.assembly, seen.states[round_], seen.states[round_ + 1], round_)}


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
    return of_contribution(assembly, before, round_, pass_name, contribution, earlier)


def _means(updates: Sequence[Update]) -> dict[str, Tensors]:
    """The mean contribution of each pass."""
    total: dict[str, Tensors] = {}
    weight: dict[str, float] = {}
    for update in updates:
        part, name = update.contribution * update.weight, update.pass_name
        total[name] = total[name] + part if name in total else part
        weight[name] = weight.get(name, 0.0) + update.weight
    return {name: total[name] * (1 / weight[name]) for name in total}


def of_contribution(
    assembly: Assembly,
    before: Tensors,
    round_: int,
    pass_name: str,
    contribution: Tensors,
    means: Mapping[str, Tensors],
) -> Tensors:
    """A contribution pulled back to the trained tensors. If a contribution is a plain change, it is returned as it is.

    before: the state at the start of the round. means: the mean contributions of the round's earlier passes.
    """
    names = trained_names(assembly, before, round_)
    leaves = {name: before.tensor(name).detach().clone().requires_grad_() for name in names}
    sent = assembly.method.contribute(pass_name, before, Tensors(leaves), means)
    products = [_inner(sent[name], contribution[name]) for name in sent if name in contribution]
    moving = [product for product in products if product.requires_grad]
    if not moving:
        return Tensors((name, torch.zeros_like(leaf)) for name, leaf in leaves.items())
    found = torch.autograd.grad(
        torch.stack(moving).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return Tensors(zip(leaves, found, strict=True))


def _inner(one: Member, other: Member) -> Tensor:
    """The inner product of two members, differentiable in the first; low-rank products are not formed."""
    if isinstance(one, LowRank) and isinstance(other, LowRank):
        return ((one.left.T @ other.left) * (one.right @ other.right.T)).sum()
    if isinstance(one, LowRank):
        return ((one.left.T @ dense(other)) * one.right).sum()
    if isinstance(other, LowRank):
        return ((other.left.T @ one) * other.right).sum()
    return (one * other).sum()


def of_states(assembly: Assembly, before: Tensors, after: Tensors, round_: int) -> Tensors:
    """The change of the global state in a round, for the trained tensors that kept their shape.

    If tensors changed that did not train, or a method sends something other than its tensors, factors were split again. Then
    the change of s B A is used for every adapted matrix, pulled back to A and B.
    """
    names = [name for name in trained_names(assembly, before, round_) if after[name].shape == before[name].shape]
    plain = {name: after.tensor(name) - before.tensor(name) for name in names}
    state = State(before, round=round_)
    layout = assembly.method.layout(state, assembly.method.plan(state).passes[-1])
    sends_products = any(name not in before for name, _ in layout.entries)
    split = any(name not in names and not torch.equal(after.tensor(name), before.tensor(name)) for name in before)
    if not (sends_products or split):
        return Tensors(plain)
    scale = scaling_of(assembly.method) ** 2
    for pair in pairs(before):
        (a, b), (a_new, b_new) = ((side.tensor(pair.a), side.tensor(pair.b)) for side in (before, after))
        if pair.a in plain:
            plain[pair.a] = scale * ((b.T @ b_new) @ a_new - (b.T @ b) @ a)
        if pair.b in plain:
            plain[pair.b] = scale * (b_new @ (a_new @ a.T) - b @ (a @ a.T))
    return Tensors(plain)


def trained_names(assembly: Assembly, state: Tensors, round_: int) -> tuple[str, ...]:
    """The tensors that local training of that round changes and sends."""
    trainable = assembly.method.plan(State(state, round=round_)).trainable
    return tuple(name for name in trainable if name not in assembly.server.personal)


def cosines(
    assembly: Assembly,
    before: Tensors,
    round_: int,
    examples: Sequence[Any],
    owner: NDArray[np.int64],
    directions: Sequence[Tensors],
) -> Floats:
    """(units, directions) cosines of -g_u at `before` with each direction; 0 where one of them is zero.

    owner: the unit of each example, in order: 0, ..., 0, 1, ... . Dropout is off.
    """
    shared = [set(direction) for direction in directions]
    names = [name for name in trained_names(assembly, before, round_) if all(name in one for one in shared)]
    # (K, P)
    flat = torch.stack([flattened(direction, names) for direction in directions]).to(assembly.objective.device)
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    found = np.zeros((int(owner.max()) + 1 if len(owner) else 0, len(directions)))
    for units, rows in gradients(assembly, before, names, examples, owner):
        scale = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)[:, None] * norms
        found[units] = torch.where(scale > 0, -(rows @ flat.T).double() / scale, 0.0).cpu().numpy()
    return found


def gradients(
    assembly: Assembly, before: Tensors, names: Sequence[str], examples: Sequence[Any], owner: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Yields groups of units and the gradients (units, P) of the sum of each unit's losses at `before`. Dropout is off."""
    placed = Placed.of(before, names, assembly.objective.device)
    assembly.objective.eval()
    numbers = sum(before.tensor(name).numel() for name in names)
    for units, at, local in _batches(examples, owner, numbers):
        found = example_gradients(assembly.objective, assembly.problem.collate, placed, [examples[i] for i in at])
        rows = torch.cat([found[name].detach().reshape(len(at), -1) for name in names], 1)
        yield units, rows.new_zeros(len(units), rows.shape[1]).index_add_(0, local.to(rows.device), rows)


def _batches(
    examples: Sequence[Any], owner: NDArray[np.int64], numbers: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], Tensor]]:
    """Yields groups of whole units of similar length: the units, their examples, and the unit of each example."""
    most = max(1, min(_EXAMPLES, _NUMBERS // max(1, numbers)))
    lengths = np.array([length(example) for example in examples], dtype=np.int64)
    counts = np.bincount(owner)
    longest = np.zeros(len(counts), dtype=np.int64)
    np.maximum.at(longest, owner, lengths)
    places = np.split(np.arange(len(owner)), np.cumsum(counts)[:-1])
    groups: list[list[int]] = []
    for unit in [int(unit) for unit in np.argsort(longest, kind="stable") if counts[unit]]:
        if not groups or counts[groups[-1]].sum() + counts[unit] > most:
            groups.append([])
        groups[-1].append(unit)
    for chosen in groups:
        at = np.concatenate([places[unit] for unit in chosen])
        yield np.array(chosen), at, torch.from_numpy(np.repeat(np.arange(len(chosen)), counts[chosen]))


def flattened(tensors: Tensors, names: Sequence[str]) -> Tensor:
    """(P,) the coordinates of the tensors `names`, concatenated."""
    parts = tensors.parts()
    return torch.cat([parts[name].detach().reshape(-1).float() for name in names])


def examples_of(case: Case, units: NDArray[np.int64]) -> tuple[list[Any], NDArray[np.int64]]:
    """The selected examples of these units, and each example's index into `units`, ascending."""
    looked_at, owner = case.looked_at
    places = np.full(len(case.units), -1)
    places[units] = np.arange(len(units))
    at = np.flatnonzero(places[owner] >= 0)
    return [looked_at[i] for i in at], places[owner[at]]


def spaced(rounds: Sequence[_One], most: int | None) -> list[_One]:
    """At most `most` rounds, or releases, evenly spaced, including the first and the last."""
    if most is None or len(rounds) <= most:
        return list(rounds)
    return [rounds[int(i)] for i in np.linspace(0, len(rounds) - 1, max(1, most)).round()]


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
    found = lru_cache(1)(lambda client: spaced(releases(case, client), most))
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
    first = case.assembly.method.plan(State(before, round=round_)).passes[0]
    return _release(case, round_, before, total) if pass_name == first else None


def _stepped(case: Case, a: int, b: int) -> Release | None:
    """The release of the rounds from `a` to `b`, without the part that the server's momentum, a known setting, carried over."""
    states, optimizer = case.seen.states, case.assembly.config.federation
    change = _change(case, a, states[a], states[b])
    if change is not None and optimizer.server_optimizer == "momentum" and a - 1 in states and b == a + 1:
        earlier = _change(case, a - 1, states[a - 1], states[a])
        if earlier is not None and Layout.of(earlier) == Layout.of(change):
            change = change.dense() - earlier.dense() * optimizer.server_beta
    return None if change is None else _release(case, a, states[a], change)


def _over_all(case: Case) -> list[Release | None]:
    """The change over all rounds, once for every set of tensors that trained in some round."""
    assembly, before = case.assembly, case.assembly.initial.tensors
    rounds: dict[tuple[str, ...], int] = {}
    for round_ in range(assembly.config.federation.rounds):
        rounds.setdefault(assembly.method.plan(State(before, round=round_)).trainable, round_)
    found: list[Release | None] = []
    for round_ in rounds.values():
        change = _change(case, round_, before, case.seen.final)
        if change is None:
            raise Inapplicable(
                "the tensors of this method lost entries over the rounds, so the last cannot be compared with the first"
            )
        found.append(_release(case, round_, before, change))
    return found


def _change(case: Case, round_: int, before: Tensors, after: Tensors) -> Tensors | None:
    """The change of the global state, as a contribution; None if it lost entries."""
    method, plan = case.assembly.method, case.assembly.method.plan(State(before, round=round_))
    sent = [name for name in plan.trainable if name not in case.assembly.server.personal]
    if Layout.of(before.select(sent)) != Layout.of(after.select(sent)):
        return None
    return method.contribute(plan.passes[0], before, after.select(sent), {})


def _release(case: Case, round_: int, before: Tensors, released: Tensors) -> Release:
    """The release of a round's first pass."""
    assembly = case.assembly
    plan = assembly.method.plan(State(before, round=round_))
    sent = tuple(name for name in plan.trainable if name not in assembly.server.personal)
    released = released.without(assembly.protection.contribution_mechanism.counters)
    layout = Layout.of(released)
    lr = case.seen.lr.get(round_, assembly.config.training.rate)
    moved = unit_vector(released, layout)
    return Release(before, plan.trainable, sent, plan.passes[0], layout, moved, released.norm(), lr, round_)


def unit_vector(tensors: Tensors, layout: Layout) -> Floats:
    """The tensors in the coordinates of the layout, divided by their norm; zeros stay zeros."""
    flat: Floats = layout.flatten(tensors, torch.float64).numpy()
    norm = float(np.linalg.norm(flat))
    return flat / norm if norm else flat


Weights = Callable[[Unit, Sequence[Release]], Floats]


def public(case: Case) -> bool:
    """Whether the rounds in which a unit can have taken part are public."""
    return isinstance(case.assembly.sampler, PublicOrder)


def weights_of(case: Case) -> Weights:
    """(releases,) the weights of a unit's releases, at most one. A unit without a turn has equal weights."""
    by_rounds = len(case.seen.states) > 1 or case.seen.sums or case.seen.updates
    if not (public(case) and by_rounds):
        return lambda unit, seen: np.ones(len(seen))
    turns, rounds = _turns(case)
    plan = case.assembly.protection.plan
    band = (1.0,) if plan is None else plan.correlation.column
    column = np.zeros(rounds)
    column[: len(band)] = band[:rounds]
    number = {unit.name: index for index, unit in enumerate(case.units)}

    def weights(unit: Unit, seen: Sequence[Release]) -> Floats:
        """Ones for rounds with the unit's turn; under correlated noise, C^T C of these, times the length of each release."""
        own = turns[:, number[unit.name]]
        if len(band) > 1 and not case.seen.sums:
            own = np.correlate(np.convolve(column, own)[:rounds], column, "full")[rounds - 1 :]
            found = np.array([own[release.round] * release.length for release in seen])
        else:
            found = np.array([own[release.round] for release in seen])
        most = float(np.abs(found).max(initial=0.0))
        return found / most if most else np.ones(len(seen))

    return weights


def _turns(case: Case) -> tuple[Floats, int]:
    """(rounds, units) 1 if a unit, or its client, has its turn; and the number of rounds.

    A client that was held out has a place in the order too, which stays empty.
    """
    assembly, pool = case.assembly, case.assembly.audit_pool
    of_client, order = pool.kind == "client", assembly.sampler
    dummies = of_client and pool.of == "dummies"
    names = assembly.server.names if dummies else assembly.pools["data"].names
    place = {name: index for index, name in enumerate(names)}
    hosts = [place[unit.name if of_client else unit.client] for unit in case.units]
    rounds, passes = assembly.config.federation.rounds, len(assembly.method.plan(assembly.initial).passes)
    turns = turns_of(assembly.server, hosts, passes)
    if isinstance(order, PublicOrder) and not dummies:
        turns = replace(turns, draw=lambda round_: order.places_of_round(round_).tolist())
    return np.stack([turns.rates(round_) for round_ in range(rounds)]), rounds
