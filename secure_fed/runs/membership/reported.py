"""The membership part of a run's result: a figure or a reason in every run, and the figures for the owner of the data alone."""

from __future__ import annotations

from typing import Any

from secure_fed.learning.data.holdout import GIVEN
from secure_fed.methods.method import State
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.membership import measured
from secure_fed.runs.membership.rows import of_rows, stand_ins


def public(assembly: Assembly, state: State) -> dict[str, Any]:
    """The run's figure. Where a private run has none: the reason, and where its owner finds another, or how to get one."""
    found = measured.of_run(assembly, state)
    if found["auc"] is not None or assembly.protection.plan is None:
        return found
    if assembly.problem.sizes is not None:
        return found | {"why": _DEPLOYED}
    if assembly.pools["data"].units:
        elsewhere = "the owner of the data has a figure of held-out units in private/, which no guarantee covers"
    elif stand_ins(assembly):
        elsewhere = "the owner of the data has a figure of single rows in private/, which no guarantee covers"
    else:
        elsewhere = _GIVEN if assembly.problem.facts["task"] == GIVEN else _NAMED
    return found | {"why": f"{found['why']}; {elsewhere}"}


def whole(assembly: Assembly, state: State) -> dict[str, Any]:
    """The entries of a result. A private run withholds those of rows and units of the data, which are not releases."""
    found, private = public(assembly, state), assembly.protection.plan is not None
    of_data = measured.of_data(assembly, state) if private else None
    rows = stand_ins(assembly)
    wanted = rows == "non_members" or (rows and private and found["auc"] is None and of_data is None)
    entries = {"membership_of_data": of_data, "membership_of_rows": of_rows(assembly, state) if wanted else None}
    return {"membership": found} | {name: entry for name, entry in entries.items() if entry}


_WOULD = "would give the owner of the data a figure"
_NAMED = f"rows of the same kind that no client trains on, named as evaluation.non_members, {_WOULD}"
_GIVEN = f"rows of the same kind that no client trains on, given as non_members, {_WOULD}"
_DEPLOYED = (
    "a deployment has no phantoms, since the party that ran one would know what it contributes, and nobody has members' rows "
    "beside others; a simulation of these settings has a figure (secure-fed train), and a member can audit the final model on "
    "rows of its own (secure-fed audit model)"
)
