"""The cosine between a change and the negative gradients of examples.

Local training moves the trained tensors along minus the gradient of the mean loss of its examples. So the cosine between a
unit's -g and a change of the model indicates whether the unit contributed:

    cos(u) = <-g_u, d> / (|g_u| |d|)        g_u: of the unit's mean loss at the state that the change began at

`d` is in the coordinates of the trained tensors. If a method sends products of factors, or splits them again in every round, a
difference of factors means little, so the change is pulled back through the map c(w) that computes the contribution: with its
Jacobian J at the state, d = J^T c. The inner product of d with a step v of the factors equals that of J v with the
contribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.adversary.null import Floats
from secure_fed.learning.models.adapters.lora import pairs, scaling_of
from secure_fed.learning.training.cohort.sums import example_gradients
from secure_fed.learning.training.kinds import length
from secure_fed.learning.training.local import Placed
from secure_fed.methods.method import State
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.tensors import LowRank, Member, Tensors, dense

_NUMBERS = 2**26  # numbers of per-example gradients at once
_EXAMPLES = 64


def trained_names(assembly: Assembly, state: Tensors, round_: int) -> tuple[str, ...]:
    """The tensors that local training of that round changes and sends."""
    trainable = assembly.method.plan(State(state, round=round_)).trainable
    return tuple(name for name in trainable if name not in assembly.server.personal)


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
    flat = torch.stack([flattened(direction, names) for direction in directions]).to(
        assembly.objective.device
    )  # (K, P)
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    found = np.zeros((int(owner.max()) + 1 if len(owner) else 0, len(directions)))
    for units, rows in gradients(assembly, before, names, examples, owner):
        scale = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)[:, None] * norms
        found[units] = torch.where(scale > 0, -(rows @ flat.T).double() / scale, 0.0).cpu().numpy()
    return found


def gradients(
    assembly: Assembly,
    before: Tensors,
    names: Sequence[str],
    examples: Sequence[Any],
    owner: NDArray[np.int64],
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Yields groups of units and the gradients (units, P) of the sum of each unit's losses at `before`. Dropout is off."""
    placed = Placed.of(before, names, assembly.objective.device)
    assembly.objective.eval()
    numbers = sum(before.tensor(name).numel() for name in names)
    for units, at, local in _batches(examples, owner, numbers):
        found = example_gradients(assembly.objective, assembly.problem.collate, placed, [examples[i] for i in at])
        rows = torch.cat([found[name].detach().reshape(len(at), -1) for name in names], 1)
        yield units, rows.new_zeros(len(units), rows.shape[1]).index_add_(0, local.to(rows.device), rows)


def flattened(tensors: Tensors, names: Sequence[str]) -> Tensor:
    """(P,) the coordinates of the tensors `names`, concatenated."""
    parts = tensors.parts()
    return torch.cat([parts[name].detach().reshape(-1).float() for name in names])


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
    chosen: list[int] = []
    for unit in [int(unit) for unit in np.argsort(longest, kind="stable") if counts[unit]]:
        if chosen and counts[chosen].sum() + counts[unit] > most:
            yield _batch(chosen, places)
            chosen = []
        chosen.append(unit)
    if chosen:
        yield _batch(chosen, places)


def _batch(
    chosen: Sequence[int], places: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor]:
    at = np.concatenate([places[unit] for unit in chosen])
    local = torch.from_numpy(np.repeat(np.arange(len(chosen)), [len(places[unit]) for unit in chosen]))
    return np.array(chosen), at, local


def _inner(one: Member, other: Member) -> Tensor:
    """The inner product of two members, differentiable in the first; low-rank products are not formed."""
    if isinstance(one, LowRank) and isinstance(other, LowRank):
        return ((one.left.T @ other.left) * (one.right @ other.right.T)).sum()
    if isinstance(one, LowRank):
        return ((one.left.T @ dense(other)) * one.right).sum()
    if isinstance(other, LowRank):
        return ((other.left.T @ one) * other.right).sum()
    return (one * other).sum()
