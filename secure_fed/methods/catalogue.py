"""What `secure-fed methods` prints: every method, counted for one model."""

from __future__ import annotations

from typing import Any

from secure_fed.config import MethodConfig, ModelConfig
from secure_fed.methods import METHODS, build
from secure_fed.methods.method import State
from secure_fed.models.loading import load_classifier
from secure_fed.tensors import Tensors

_LABELS = ("no", "yes")


def catalogue(model: str) -> list[dict[str, Any]]:
    """A row for every method at default settings, with a two-class head on the named model.

    bytes_per_round is what one client sends and receives in the method's first round.
    """
    return [_row(name, model) for name in METHODS]


def _row(name: str, model: str) -> dict[str, Any]:
    method = build(MethodConfig(name=name))
    loaded = load_classifier(ModelConfig(name=model), _LABELS, seed=0)
    state = State(method.prepare(loaded.model, loaded.head, seed=0))
    plan = method.plan(state)
    after = state.tensors.select(plan.trainable)
    no_means: dict[str, Tensors] = {}
    up = sum(method.contribute(pass_name, state.tensors, after, no_means).wire_size for pass_name in plan.passes)
    down = state.tensors.select(plan.down).wire_size
    card = method.card
    return {
        "name": card.name,
        "paper": card.paper,
        "travels": card.travels,
        "mean_exact": card.mean_exact,
        "units": ["none", *card.units],
        "refusals": dict(card.refusals),
        "trainable": after.numel,
        "bytes_per_round": up + down,
        "bytes_up": up,
        "bytes_down": down,
    }
