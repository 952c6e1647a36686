"""Membership of rows that trained against rows that did not, where no coin decided: a figure for the owner of the data alone.

Every run has it whose owner names rows that no client trains on (`evaluation.non_members`), and a private run also where it has
no figure of phantoms: then test rows of the same kind stand for non-members. As in `measured`, the score is how well the final
model fits a row (loss threshold, Yeom et al. 2018).

It is computed from members' losses without noise, so no guarantee covers it, and a private run keeps it in `private/`. Since no
coin decided who trained, it can mislead, and says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fed.learning.data.audit_unit import Pointing
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.learning.data.sources import GENERATED
from secure_fed.methods.method import State
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.membership import measured, roc

MOST = 1000  # rows on each side
_CLIENTS = 50  # whose rows are read, where reading those of all clients takes too long


def stand_ins(assembly: Assembly) -> str:
    """The rows that stand for non-members: "non_members", which the user named, or "test", or "" if there are none.

    Test rows do if they are of the same kind as the training rows: held out of the same data, or made by the same generator.
    """
    problem = assembly.problem
    if problem.sizes is not None:  # of a deployment: no party has members' rows beside others
        return ""
    if len(problem.non_members):
        return "non_members"
    return "test" if problem.facts["test"]["from"] in _OF_TEST else ""


def of_rows(assembly: Assembly, state: State) -> dict[str, Any]:
    """The figure: of at most `MOST` rows that trained, spread evenly over all of them, and as many that did not."""
    problem, objective, origin = assembly.problem, assembly.objective, stand_ins(assembly)
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
    model, batch_size = objective.load(state.tensors), assembly.config.evaluation.batch_size
    with objective.reading:
        scores = measured.confidences(
            model, [*members, *others], problem.collate, problem.confidence, batch_size, objective.device
        )
    if not members or not np.isfinite(scores).all():
        why = "the model gives no finite scores" if members else "no row trained as it is"
        return entry | {"auc": None, "auc_interval": None, "tpr_at_fpr": None, "why": why}
    found = roc.to_dict(roc.rank(scores[: len(members)], scores[len(members) :]))
    return entry | {name: found[name] for name in ("auc", "auc_interval", "tpr_at_fpr")} | {"why": ""}


def misleads(assembly: Assembly) -> str:
    """The rows that stood for non-members, and how that may mislead."""
    unit, tested = assembly.config.privacy.unit, assembly.problem.facts["test"]["from"]
    rows = _NAMED if stand_ins(assembly) == "non_members" else _OF_TEST[tested]
    single = (
        f" Single rows are compared, and privacy protects each {unit} as a whole."
        if unit in ("client", "group")
        else ""
    )
    return f"{rows}{single}"


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


_NAMED = (
    "The non-members are the rows that were named as such. No coin chose them: if they differ from the training rows for "
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
