"""Membership inference that every run reports beside its accuracy: one attack, the cheapest for its units.

For phantoms, which are nobody's data: how far the run's releases move along their directions (`phantoms.scores`). For direction
canaries: how far the final model moved along theirs (`along`). For other units of the data: the loss threshold of Yeom et al.
(2018, arXiv 1709.01604), which declares the units that the final model fits best to be members. It needs one forward pass over
the audit pool. A negative result means little; a positive result means much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.audit_pool.unit import Unit
from secure_fed.learning.data.encode import batches
from secure_fed.learning.tasks.task import Collate, Confidence
from secure_fed.learning.training.canary_directions import direction, layout_of
from secure_fed.learning.training.objective import to_device
from secure_fed.methods.method import State
from secure_fed.rounds.phantoms.scores import SCORES
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.membership import roc
from secure_fed.tensors.layout import Layout
from secure_fed.tensors.tensors import Tensors

EXAMPLES = 32  # of a unit that are evaluated


@torch.no_grad()
def confidences(
    model: nn.Module,
    examples: Sequence[Any],
    collate: Collate,
    confidence: Confidence,
    batch_size: int,
    device: torch.device,
) -> NDArray[np.float64]:
    """(examples,) the confidence phi of each, in evaluation mode."""
    model.eval()
    found = np.empty(len(examples))
    for batch in batches(examples, batch_size, collate, None):
        found[batch.indices] = confidence(model, to_device(batch.inputs, device)).cpu().numpy()
    return found


def looked_at(units: Sequence[Unit]) -> tuple[list[Any], NDArray[np.int64]]:
    """At most `EXAMPLES` examples of each unit, and the unit of each example."""
    few = [[unit.examples[i] for i in range(min(len(unit.examples), EXAMPLES))] for unit in units]
    owner = np.repeat(np.arange(len(units)), [len(own) for own in few])
    return [example for own in few for example in own], owner


def mean_of_units(values: NDArray[np.float64], owner: NDArray[np.int64], units: int) -> NDArray[np.float64]:
    """(units,) the mean over each unit's examples; a unit without examples gets the mean over all."""
    counts = np.bincount(owner, minlength=units)
    sums = np.bincount(owner, values, minlength=units)
    return np.where(counts > 0, sums / np.maximum(counts, 1), values.mean() if len(values) else 0.0)


def fitted(assembly: Assembly, state: State, held: AuditPool) -> NDArray[np.float64]:
    """(units,) how well the model fits each."""
    units, problem = held.units, assembly.problem
    examples, owner = looked_at(units)
    model = assembly.objective.load(state.tensors)
    batch_size = assembly.config.evaluation.batch_size
    with assembly.objective.reading:
        phi = confidences(model, examples, problem.collate, problem.confidence, batch_size, assembly.objective.device)
    return mean_of_units(phi, owner, len(units))


def along(assembly: Assembly, state: State, held: AuditPool) -> NDArray[np.float64] | None:
    """(units,) <u, V> / |V|, with u each unit's direction and V the change of the global state over the run, where units are
    direction canaries: the score of an audit's attack `one_run`.

    None unless clients send the change of the trained tensors, coordinate by coordinate, and the same tensors train in every
    round.
    """
    initial, method, config = assembly.initial, assembly.method, assembly.config.federation
    plan = method.plan(initial)
    if any(method.plan(replace(initial, round=n)).trainable != plan.trainable for n in range(config.rounds)):
        return None
    whole = layout_of(initial.tensors, plan.trainable)
    sent = [name for name in plan.trainable if name not in assembly.server.personal]
    layout, after = layout_of(initial.tensors, sent), state.tensors.select(sent)
    if layout_of(after, sent) != layout:
        return None
    moved = method.contribute(plan.passes[0], initial.tensors, after, {})
    if layout_of(moved, list(moved)) != layout:
        return None
    pulled = (direction(unit.name, config.seed, whole).select(sent) for unit in held.units)
    towards = _unit_vector(moved, layout)
    return np.array([_unit_vector(one, layout) @ towards for one in pulled])


def _unit_vector(tensors: Tensors, layout: Layout) -> NDArray[np.float64]:
    flat: NDArray[np.float64] = layout.flatten(tensors, torch.float64).numpy()
    return flat / (np.linalg.norm(flat) or 1.0)


def of_run(assembly: Assembly, state: State) -> dict[str, Any]:
    """The membership part of `result.json`; without numbers, the reason.

    of: "phantoms" in a run that is private or that sets `evaluation.phantoms`: a function of the releases, so that a guarantee
    covers it. Else "data".
    """
    config = assembly.config
    if config.privacy.unit == "none" and not config.evaluation.phantoms:
        return of_pool(assembly, state, assembly.pools["data"])
    return of_pool(assembly, state, assembly.pools["phantoms"])


def of_data(assembly: Assembly, state: State) -> dict[str, Any] | None:
    """Membership figures of held-out units of the data, None if there are none. Not noised: only for the data's owner."""
    held = assembly.pools["data"]
    return of_pool(assembly, state, held) if held.units else None


def of_pool(assembly: Assembly, state: State, held: AuditPool) -> dict[str, Any]:
    """The figures of the cheapest attack on these units."""
    phantoms = held.of == "phantoms"
    members = int(held.members.sum())
    attack = "phantoms" if phantoms else "one_run" if held.directions else "loss"
    entry: dict[str, Any] = {"of": held.of, "attack": attack, "unit": held.kind}
    entry |= {"members": members, "non_members": len(held.units) - members}
    nothing = entry | {"auc": None, "auc_interval": None, "tpr_at_fpr": None}
    if held.why:
        return nothing | {"why": held.why}
    if not 0 < members < len(held.units):
        return nothing | {"why": "all coins of the audit pool fell on the same side"}
    scores = kept_scores(state, held) if phantoms else _scores_of_data(assembly, state, held)
    if scores is None:
        return nothing | {"why": _NOT_ALONG.format(assembly.method.card.name)}
    if not np.isfinite(scores).all():
        return nothing | {"why": "the model gives no finite scores"}
    found = roc.to_dict(roc.rank(scores[held.members], scores[~held.members]))
    return entry | {name: found[name] for name in ("auc", "auc_interval", "tpr_at_fpr")} | {"why": ""}


def kept_scores(state: State, phantoms: AuditPool) -> NDArray[np.float64]:
    """(phantoms,) their scores over all rounds (`phantoms.scores`); zeros before the first round."""
    if SCORES not in state.memory:
        return np.zeros(len(phantoms.units))
    scores: NDArray[np.float64] = state.memory.tensor(SCORES).numpy()
    return scores


def _scores_of_data(assembly: Assembly, state: State, held: AuditPool) -> NDArray[np.float64] | None:
    return along(assembly, state, held) if held.directions else fitted(assembly, state, held)


_NOT_ALONG = (
    "with {} clients do not send the change of the same tensors in every round: to measure how far the model moved along a "
    "canary's direction, run `secure-fed audit`"
)
