"""Whom an attack exposes most: clients by their members, and single members. Texts are shown only on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attacks.case import Floats
from secure_fed import roc
from secure_fed.directions import plain
from secure_fed.federation import Federation
from secure_fed.holding import Held, Unit

MOST = 20  # lines of either list


def clients(held: Held, scores: Floats) -> list[dict[str, Any]]:
    """The clients whose members stand out most: score is the mean share of non-members below a member, .5 by chance."""
    shares = roc.shares_below(scores, scores[~held.members])
    own: dict[str, list[float]] = {}
    for unit, share, member in zip(held.units, shares, held.members, strict=True):
        if member:
            own.setdefault(unit.client, []).append(float(share))
    ranked = sorted(own.items(), key=lambda one: -float(np.mean(one[1])))
    return [{"client": name, "units": len(of), "score": float(np.mean(of))} for name, of in ranked[:MOST]]


def exposed(federation: Federation, scores: Floats, *, show_texts: bool) -> list[dict[str, Any]]:
    """The members that stand out most."""
    held = federation.held
    shares = roc.shares_below(scores, scores[~held.members])
    order = [i for i in np.argsort(-scores, kind="stable").tolist() if held.members[i]][:MOST]
    return [
        {
            "unit": held.units[i].name,
            "client": held.units[i].client,
            "score": float(scores[i]),
            "share_below": float(shares[i]),
            "rank": rank,
            "member": True,
            "text": text(federation, held.units[i]) if show_texts else None,
        }
        for rank, i in enumerate(order, 1)
    ]


def text(federation: Federation, unit: Unit) -> str | None:
    """The first example of a unit, as far as a tokenizer can say it."""
    tokenizer = federation.parts.tokenizer
    if tokenizer is None or not len(unit.examples):
        return None
    example = plain(unit.examples[0])
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    return None if ids is None or np.ndim(ids) != 1 else str(tokenizer.decode(ids, skip_special_tokens=True))
