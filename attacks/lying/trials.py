"""Repeated trials of each attack of a lying server on a federation, with the rate of a guess without any update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks.adversary.active import Refused
from attacks.adversary.case import Inapplicable
from attacks.lying import labels, membership, replay, suppression, traps
from attacks.lying.table import Table
from secure_fed.learning.training.schedule import planned_steps
from secure_fed.tensors.tensors import Tensors


@dataclass(frozen=True)
class Outcome:
    """One trial. hit: the attack was right. guess: the probability that the same answer is right by chance. refused: why there
    was no answer. quiet: a trial without a member, where a hit is a false alarm.
    """

    hit: bool
    guess: float
    refused: str = ""
    quiet: bool = False


def _traps(table: Table) -> Outcome:
    """One random text of the victim is among the named texts; as many are named as the contribution or sum covers."""
    held = table.deal()
    crafted = traps.traps(table.head, table.public_inputs, table.server.limit)
    read, people = table.answer(crafted, held)
    return _named(table, read, held[0], people * table.each)


def _suppressed(table: Table) -> Outcome:
    """The same from a sum in which all clients but one get dead tensors: as many texts are named as the victim has."""
    held = table.deal()
    crafted = traps.traps(table.head, table.public_inputs, table.server.limit)
    read, _ = table.answer(suppression.dead(table.head), held, told=crafted)
    return _named(table, read, held[0], table.each)


def _named(table: Table, read: Tensors, truth: int, most: int) -> Outcome:
    names = traps.named(table.head, read, table.inputs, most, signs=table.adamw)
    return Outcome(truth in names, most / len(table.candidates))


def _membership(table: Table) -> Outcome:
    """In every other trial the victim has the target; the verdict has a false-positive rate of 1 / (nulls + 1)."""
    target, *held = table.deal()
    inside = table.flip()
    held = [target, *held[1:]] if inside else held
    point = table.inputs[target]
    crafted = membership.alarm(table.head, point, table.public_inputs, table.server.limit)
    read, _ = table.answer(crafted, held)
    nulls = [membership.score(table.head, one, point) for one in table.null_answers(crafted)]
    verdict = membership.is_member(membership.score(table.head, read, point), nulls)
    return Outcome(verdict, 1 / (table.nulls + 1), quiet=not inside)


def _replay(table: Table) -> Outcome:
    """In every other trial the victim has one more text; the server knows its other texts."""
    target, *rest = table.deal()
    inside = table.flip()
    crafted = membership.alarm(table.head, table.inputs[target], table.public_inputs, table.server.limit)
    read, people = table.answer(crafted, [target, *rest] if inside else rest)
    if people > 1:
        read = read - table.usual(crafted, people - 1)
    with_, without = (
        table.server.replayed(0, crafted, [table.candidates[one] for one in texts]) for texts in ([target, *rest], rest)
    )
    return Outcome(replay.has_text(read, with_, without) == inside, 0.5)


def _labels(table: Table) -> Outcome:
    """The victim's counts of all classes, exactly; the guess rounds the public shares."""
    held, config = table.deal(), table.server.assembly.config.training
    read, people = table.answer(labels.flat(table.head, config.optimizer), held)
    steps = table.server.falling.as_long(planned_steps(table.each, config))
    rate = people * table.server.lr * config.head_times
    counts = labels.counts(table.head, read, config.optimizer, rate, steps, table.each)
    true = np.bincount([_label(table.candidates[one]) for one in held], minlength=table.head.classes)
    return Outcome(bool((counts.numpy() == true).all()), _guessed_labels(table))


def _guessed_labels(table: Table) -> float:
    """How often the rounded public shares equal a client's counts, over candidates in order, with one hit added: among few
    clients, no hit does not show that a guess is never right.
    """
    classes, each = table.head.classes, table.each
    of = np.array([_label(one) for one in table.candidates])
    import torch

    shares = np.bincount([_label(one) for one in table.public], minlength=classes) / len(table.public)
    guess = labels.whole(torch.from_numpy(shares), each).numpy()
    dealt = [np.bincount(of[at : at + each], minlength=classes) for at in range(0, len(of) - each + 1, each)]
    return (1 + sum(bool((one == guess).all()) for one in dealt)) / (1 + len(dealt))


def _label(example: Any) -> int:
    label = example.get("labels") if isinstance(example, dict) else None
    if not isinstance(label, int | np.integer) or label < 0:
        raise Inapplicable("the attack counts labels, and needs one whole-number label an example")
    return int(label)


@dataclass(frozen=True)
class Lie:
    """An attack. stated: the definition of success, for readers of the table."""

    name: str
    title: str
    paper: str
    stated: str
    trial: Callable[[Table], Outcome]


LIES = {
    one.name: one
    for one in (
        Lie(
            "traps",
            "Traps for single texts",
            "Fowl et al. 2022, Shi et al. 2026",
            "a text of the client is named",
            _traps,
        ),
        Lie(
            "membership", "A unit that fires for one text", "Nguyen et al. 2023", "a member is recognised", _membership
        ),
        Lie(
            "suppression",
            "Dead gradients for the others of a sum",
            "Pasquini et al. 2022",
            "a text of the client is named",
            _suppressed,
        ),
        Lie("replay", "Replay with a text and without", "Nasr et al. 2021", "with or without is recognised", _replay),
        Lie("labels", "Counts of labels from one step", "Wainakh et al. 2022", "all counts are right", _labels),
    )
}


def tried(lie: Lie, table: Table, trials: int) -> list[Outcome]:
    """The outcomes of `trials` trials. A refusal counts as a failure."""
    return [_tried(lie, table) for _ in range(trials)]


def _tried(lie: Lie, table: Table) -> Outcome:
    try:
        return lie.trial(table)
    except Refused as error:
        return Outcome(False, 0.0, str(error))
