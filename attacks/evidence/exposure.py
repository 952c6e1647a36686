"""The units and clients that an attack ranks highest, over all units of the audit, members and non-members alike.

A list of members alone would hide false accusations. Texts are shown only on request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attacks.adversary.null import Floats
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.audit_pool.unit import Unit
from secure_fed.learning.data.pointing import plain
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.membership import roc_interval

MOST = 50  # units listed
MOST_CLIENTS = 20
FIRST = (10, 20, 50)  # false accusations are counted among so many first units


def accusations(held: AuditPool, scores: Floats) -> list[dict[str, int]]:
    """The number of held-out units among the highest scores; equal scores keep the order of the units."""
    members = held.members[_order(scores)]
    return [{"first": n, "false": int((~members[:n]).sum())} for n in FIRST if n <= len(members)]


def clients(held: AuditPool, scores: Floats) -> list[dict[str, Any]]:
    """The clients whose members score highest. score: the mean share of held-out units below a client's member, .5 by chance;
    beside it the same for the client's held-out units, None without any. Empty if the units are whole clients.
    """
    if held.kind == "client":
        return []
    shares = roc_interval.shares_below(scores, scores[~held.members])
    own: dict[str, tuple[list[float], list[float]]] = {}
    for unit, share, member in zip(held.units, shares, held.members, strict=True):
        inside, outside = own.setdefault(unit.client, ([], []))
        (inside if member else outside).append(float(share))
    rows: list[dict[str, Any]] = [
        {
            "client": name,
            "units": len(inside),
            "score": float(np.mean(inside)),
            "held_out": len(outside),
            "score_held_out": float(np.mean(outside)) if outside else None,
        }
        for name, (inside, outside) in own.items()
        if inside
    ]
    return sorted(rows, key=lambda one: -one["score"])[:MOST_CLIENTS]


def exposed(assembly: Assembly, scores: Floats, *, show_texts: bool) -> list[dict[str, Any]]:
    """The units with the highest scores, members and non-members."""
    held = assembly.audit_pool
    shares = roc_interval.shares_below(scores, scores[~held.members])
    return [
        {
            "unit": held.units[i].name,
            "client": held.units[i].client,
            "score": float(scores[i]),
            "share_below": float(shares[i]),
            "rank": rank,
            "member": bool(held.members[i]),
            "text": text(assembly, held.units[i]) if show_texts else None,
        }
        for rank, i in enumerate(_order(scores)[:MOST].tolist(), 1)
    ]


def _order(scores: Floats) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.argsort(-scores, kind="stable")


def text(assembly: Assembly, unit: Unit) -> str | None:
    """The first example of a unit as text, if the tokenizer can decode it."""
    tokenizer = assembly.problem.tokenizer
    if tokenizer is None or not len(unit.examples):
        return None
    example = plain(unit.examples[0])
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    return None if ids is None or np.ndim(ids) != 1 else str(tokenizer.decode(ids, skip_special_tokens=True))
