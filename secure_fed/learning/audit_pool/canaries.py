"""Audited units made conspicuous, so that an audit of one run sees more (`evaluation.canaries`).

    mislabelled   every example of the unit gets a wrong label, drawn uniformly from the other classes
    rare_token    a rare token, or a few, that no other unit has, in place of tokens of every example of the unit; all of them
                  get one label, drawn for the unit. In language modelling the tokens alone are replaced (`rare_tokens`).
    direction     the unit pulls the model along a random direction of its own (`canary_directions`)

They are planted in the whole audit pool, before the coins remove non-members: members and non-members differ in nothing else.
After that they are treated like all other units. The canary comes from a hash of the unit's name under the seed, so a resumed
run and an audit find the same. It reveals nothing of the coins, which come from another hash.

The guarantee of a run with canaries is for the data with planted canaries. A unit's tokens also depend on the other units in
the pool, since no two units may get the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.canary_context import CanaryContext, draw, label_of, mapping
from secure_fed.learning.audit_pool.rare_tokens import rare_tokens, with_token
from secure_fed.learning.audit_pool.unit import Unit
from secure_fed.learning.data.pointing import Pointing

_CLIP_NORMS = 30.0
_ADAPTS = 0.2  # the rate of `privacy.mechanisms.AdaptiveGaussian`


def planted(kind: str, units: Sequence[Unit], context: CanaryContext) -> tuple[Unit, ...]:
    """The units with their canaries, members and non-members alike; ConfigError if this kind cannot be planted."""
    changed: Callable[[Unit], list[Any]]
    if kind == "none" or (kind == "direction" and context.unit == "client"):
        return tuple(units)
    if kind == "mislabelled":
        changed = partial(_mislabelled, classes=context.labels(kind), seed=context.seed)
    elif kind == "rare_token":
        tokens = rare_tokens([unit.name for unit in units], context)

        def changed(unit: Unit) -> list[Any]:
            items = [mapping(kind, unit.examples[i]) for i in range(len(unit.examples))]
            return [with_token(item, i, unit.name, tokens[unit.name], context) for i, item in enumerate(items)]
    elif kind == "direction":
        changed = partial(_pointing, context=context)
    else:
        raise ConfigError(
            f"evaluation.canaries = {kind!r} is not known; it must be 'none', 'mislabelled', 'rare_token' or 'direction'"
        )
    return tuple(replace(unit, examples=changed(unit)) for unit in units)


def length_beyond_clipping(config: RunConfig) -> float | None:
    """The length of a direction client's change (`canary_directions.trains_towards`), so long that it is always clipped.

    30 clip norms, since a method may send only a part of the trained tensors; no more, since with a method that sends products
    the square of the length would leave nothing to the rest. An adaptive clip norm multiplies it by its largest growth over all
    rounds, at most a million. None without client-level privacy: then nothing is clipped, and the client's change has the
    length of its local steps.
    """
    privacy = config.privacy
    if privacy.unit != "client":
        return None
    growth = 0.0 if privacy.clip_quantile is None else _ADAPTS * config.federation.rounds * privacy.clip_quantile
    return _CLIP_NORMS * privacy.clip * math.exp(min(growth, math.log(1e6)))


def _mislabelled(unit: Unit, classes: int, seed: int) -> list[Any]:
    """Label y becomes (y + s) mod classes, s uniform over 1 .. classes - 1 for each example."""
    made = []
    for i in range(len(unit.examples)):
        item: Mapping[str, Any] = mapping("mislabelled", unit.examples[i])
        name, label = label_of(item, classes)
        made.append({**item, name: (label + 1 + draw(classes - 1, seed, "label", unit.name, i)) % classes})
    return made


def _pointing(unit: Unit, context: CanaryContext) -> list[Any]:
    if not context.private:
        raise ConfigError(
            "evaluation.canaries = 'direction' replaces gradients of single examples, which are made only with privacy.unit = "
            "'example' or 'group'; set evaluation.canaries to 'mislabelled' or 'rare_token', or privacy.unit"
        )
    return [Pointing(unit.examples[i], unit.name, context.seed) for i in range(len(unit.examples))]
