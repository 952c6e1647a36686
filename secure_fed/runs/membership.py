"""Membership inference that every run reports beside its accuracy: how well one attack separates members from non-members.

The attack is the cheapest for its units, and has the final model (`of_pool`):

    dummies            how far the run's releases moved along their directions (`rounds/dummies.py`). They are nobody's data,
                        and a guarantee covers the figure
    direction canaries  how far the final model moved along their directions (`along`)
    other units         the loss threshold of Yeom et al. (2018, arXiv 1709.01604): the units that the final model fits best are
                        declared members (`fitted`); one forward pass over the audit pool

Coins decided which of these units trained. A negative result means little; a positive result means much.

A figure of rows needs no coins (`of_rows`): rows that trained against rows that did not. Every run has it whose owner names
rows that no client trains on (`evaluation.non_members`), and a private run also where it has no figure of dummies: then test
rows of the same kind stand for non-members. Since no coin decided who trained, it can mislead, and says how. In a deployment
each node finds the figure of its own rows, and keeps it.

Figures of the data are computed from members' losses without noise, so no guarantee covers them, and a private run keeps them
in `private/` for the owner of the data.
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
from secure_fed.learning.data.audit_unit import Pointing, Unit
from secure_fed.learning.data.encode import batches
from secure_fed.learning.data.holdout import GIVEN, HELD_OUT
from secure_fed.learning.data.sources import GENERATED
from secure_fed.learning.tasks.task import Collate, Confidence
from secure_fed.learning.training.canary_directions import direction, layout_of
from secure_fed.learning.training.objective import to_device
from secure_fed.methods.method import State
from secure_fed.rounds.dummies import SCORES
from secure_fed.runs import roc
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.tensors import Layout, Tensors

EXAMPLES = 32  # of a unit that are evaluated
MOST = 1000  # rows on each side
_CLIENTS = 50  # whose rows are read, where reading those of all clients takes too long
_FIGURES = ("auc", "auc_interval", "tpr_at_fpr")


def result_entries(assembly: Assembly, state: State) -> dict[str, Any]:
    """The entries of a result. A private run withholds those of rows and units of the data, which are not releases."""
    found, private = public_figure(assembly, state), assembly.protection.plan is not None
    units = of_data(assembly, state) if private else None
    rows = stand_ins(assembly)
    wanted = rows == "non_members" or (rows and private and found["auc"] is None and units is None)
    entries = {"membership_of_data": units, "membership_of_rows": of_rows(assembly, state) if wanted else None}
    return {"membership": found} | {name: entry for name, entry in entries.items() if entry}


def public_figure(assembly: Assembly, state: State) -> dict[str, Any]:
    """The run's figure. Where a private run has none: the reason, and where its owner finds another, or how to get one."""
    found = of_run(assembly, state)
    if found["auc"] is not None or assembly.protection.plan is None:
        return found
    if not assembly.everybody_here:
        elsewhere = _AT_NODES
    elif assembly.pools["data"].units:
        elsewhere = "the owner of the data has a figure of held-out units in private/, which no guarantee covers"
    elif stand_ins(assembly):
        elsewhere = "the owner of the data has a figure of single rows in private/, which no guarantee covers"
    else:
        elsewhere = _GIVE_ROWS if assembly.problem.facts["task"] == GIVEN else _NAME_ROWS
    return found | {"why": f"{found['why']}; {elsewhere}"}


def of_run(assembly: Assembly, state: State) -> dict[str, Any]:
    """The membership part of `result.json`; without numbers, the reason.

    of: "dummies" in a run that is private or that sets `evaluation.dummies`: a function of the releases, so that a guarantee
    covers it. Else "data".
    """
    config = assembly.config
    if config.privacy.unit == "none" and not config.evaluation.dummies:
        return of_pool(assembly, state, assembly.pools["data"])
    return of_pool(assembly, state, assembly.pools["dummies"])


def of_data(assembly: Assembly, state: State) -> dict[str, Any] | None:
    """Membership figures of held-out units of the data, None if there are none. Not noised: only for the data's owner."""
    held = assembly.pools["data"]
    return of_pool(assembly, state, held) if held.units else None


def of_pool(assembly: Assembly, state: State, held: AuditPool) -> dict[str, Any]:
    """The figures of the cheapest attack on these units."""
    dummies = held.of == "dummies"
    members = int(held.members.sum())
    attack = "dummies" if dummies else "one_run" if held.directions else "loss"
    entry: dict[str, Any] = {"of": held.of, "attack": attack, "unit": held.kind}
    entry |= {"members": members, "non_members": len(held.units) - members}
    nothing = entry | dict.fromkeys(_FIGURES)
    if held.why:
        return nothing | {"why": held.why}
    if not 0 < members < len(held.units):
        return nothing | {"why": "by chance all units of the audit pool are on one side: trained on, or held out"}
    if dummies:
        scores: NDArray[np.float64] | None = kept_scores(state, held)
    else:
        scores = along(assembly, state, held) if held.directions else fitted(assembly, state, held)
    if scores is None:
        return nothing | {"why": _NOT_ALONG.format(assembly.method.card.name)}
    if not np.isfinite(scores).all():
        return nothing | {"why": "the model gives no finite scores"}
    return entry | _figures(scores[held.members], scores[~held.members])


def _figures(members: NDArray[np.float64], non_members: NDArray[np.float64]) -> dict[str, Any]:
    found = roc.to_dict(roc.rank(members, non_members))
    return {name: found[name] for name in _FIGURES} | {"why": ""}


def kept_scores(state: State, dummies: AuditPool) -> NDArray[np.float64]:
    """(dummies,) their scores over all rounds (`rounds/dummies.py`); zeros before the first round."""
    if SCORES not in state.memory:
        return np.zeros(len(dummies.units))
    scores: NDArray[np.float64] = state.memory.tensor(SCORES).numpy()
    return scores


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


def fitted(assembly: Assembly, state: State, held: AuditPool) -> NDArray[np.float64]:
    """(units,) how well the model fits each."""
    examples, owner = looked_at(held.units)
    return mean_of_units(_fits(assembly, state, examples), owner, len(held.units))


def _fits(assembly: Assembly, state: State, examples: Sequence[Any]) -> NDArray[np.float64]:
    """(examples,) how well the model fits each."""
    problem, objective, size = assembly.problem, assembly.objective, assembly.config.evaluation.batch_size
    model = objective.load(state.tensors)
    with objective.reading:
        return confidences(model, examples, problem.collate, problem.confidence, size, objective.device)


def looked_at(units: Sequence[Unit]) -> tuple[list[Any], NDArray[np.int64]]:
    """At most `EXAMPLES` examples of each unit, and the unit of each example."""
    few = [[unit.examples[i] for i in range(min(len(unit.examples), EXAMPLES))] for unit in units]
    owner = np.repeat(np.arange(len(units)), [len(own) for own in few])
    return [example for own in few for example in own], owner


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


def mean_of_units(values: NDArray[np.float64], owner: NDArray[np.int64], units: int) -> NDArray[np.float64]:
    """(units,) the mean over each unit's examples; a unit without examples gets the mean over all."""
    counts = np.bincount(owner, minlength=units)
    sums = np.bincount(owner, values, minlength=units)
    return np.where(counts > 0, sums / np.maximum(counts, 1), values.mean() if len(values) else 0.0)


def stand_ins(assembly: Assembly) -> str:
    """The rows that stand for non-members: "non_members", which the user named, or "test", or "" if there are none.

    Test rows do if they are of the same kind as the training rows: held out of the same data, or made by the same generator.
    """
    problem = assembly.problem
    if len(problem.non_members):
        return "non_members"
    return "test" if problem.facts["test"]["from"] in _OF_TEST else ""


def of_rows(assembly: Assembly, state: State) -> dict[str, Any]:
    """The figure of at most `MOST` rows that trained, spread evenly over all of them, and as many that did not."""
    problem, origin = assembly.problem, stand_ins(assembly)
    members = _trained(problem.train, lazy=problem.lazy)
    named = problem.non_members if origin == "non_members" else problem.test
    others = [named[index] for index in _even(len(named), MOST)]
    entry: dict[str, Any] = {
        "of": "rows",
        "attack": "loss",
        "unit": "example",
        "non_members_from": origin,
        "members": len(members),
        "non_members": len(others),
        "misleads": misleads(assembly),
    }
    scores = _fits(assembly, state, [*members, *others])
    if not members or not np.isfinite(scores).all():
        why = "the model gives no finite scores" if members else "no row trained as it is"
        return entry | dict.fromkeys(_FIGURES) | {"why": why}
    return entry | _figures(scores[: len(members)], scores[len(members) :])


def misleads(assembly: Assembly) -> str:
    """The rows that stood for non-members, and how that may mislead."""
    unit, tested = assembly.config.privacy.unit, assembly.problem.facts["test"]["from"]
    rows = _NAMED if stand_ins(assembly) == "non_members" else _OF_TEST[tested]
    single = f" Single rows are compared, and privacy protects each {unit} as a whole."
    return rows + (single if unit in ("client", "person") else "")


def _trained(train: Sequence[Sequence[Any]], *, lazy: bool) -> list[Any]:
    """Rows that clients train on. Rows whose gradients a canary's direction replaces are left out."""
    clients = [train[number] for number in _even(len(train), _CLIENTS if lazy else len(train))]
    upto = np.cumsum([0, *map(len, clients)])
    chosen = []
    for place in _even(int(upto[-1]), MOST):
        client = int(np.searchsorted(upto, place, side="right")) - 1
        chosen.append(clients[client][int(place - upto[client])])
    return [row for row in chosen if not isinstance(row, Pointing)]


def _even(count: int, most: int) -> NDArray[np.int64]:
    """At most `most` of the numbers below `count`, spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)) if count else np.arange(0)


_WOULD = "would give the owner of the data a figure"
_NAME_ROWS = f"rows of the same kind that no client trains on, named as evaluation.non_members, {_WOULD}"
_GIVE_ROWS = f"rows of the same kind that no client trains on, given as non_members, {_WOULD}"
_AT_NODES = (
    "each member finds a figure of its own rows at its node, if it names rows it does not train on (non_members)"
)
_NOT_ALONG = (
    "with {} clients do not send the change of the same tensors in every round: to measure how far the model moved along a "
    "canary's direction, run `secure-fed audit`"
)
_NAMED = (
    "The non-members are the rows that were named as such, not chosen at random: if they differ from the training rows for "
    "another reason (time, source, preparation), the figure shows this difference as well."
)
_BY = "The non-members are the test rows, which were held out of the same data"
_CHOSEN = "A model that was chosen by its accuracy on them (evaluation.patience) fits them a little better."
_OF_TEST = {
    HELD_OUT["row"]: f"{_BY} at random. {_CHOSEN}",
    HELD_OUT["example"]: f"{_BY} by a hash of each row. {_CHOSEN}",
    HELD_OUT["person"]: f"{_BY} person by person: another person's rows may differ without any training. {_CHOSEN}",
    HELD_OUT["client"]: f"{_BY} client by client: another client's rows may differ without any training. {_CHOSEN}",
    GENERATED: f"The non-members are the test notes, which the same generator made. {_CHOSEN}",
}
