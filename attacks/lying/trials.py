"""Repeated trials of each attack of a lying server on a federation, beside the success rate of a guess without any update.

`audited` makes the trials. For every trial, texts are drawn afresh (`Table`): the victim and the other clients of a sum get
texts from one part of the test set; the server gets public texts from another part. So trials are independent, except that they
share the federation. The crafted tensors are in `lies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest, fisher_exact
from torch import Tensor

from attacks.adversary.case import Inapplicable
from attacks.adversary.lying_server import LyingServer, Refused
from attacks.lying import lies
from attacks.lying.lies import Head
from attacks.options import say
from secure_fed.learning.training.local import planned_steps
from secure_fed.tensors.tensors import Tensors

_MOST_TEXTS = 64
_ERROR = 0.025
CANDIDATES, PUBLIC, FEWEST = 1000, 1000, 100
_OPEN_SUM = 10  # clients in a sum without masks


def audited(server: LyingServer, names: list[str], trials: int, seed: int = 0) -> dict[str, Any]:
    """The rates of these attacks against the clients of a federation, or the reason why one does not apply."""
    sizes = [len(one) for one in server.assembly.problem.train]
    each = max(2, min(_MOST_TEXTS, round(median(sizes))))
    table, rows = Table.laid(server, each, seed), []
    for lie in (LIES[name] for name in names):
        say(lie.title)
        row = {"attack": lie.name, "title": lie.title, "paper": lie.paper, "success": lie.stated}
        try:
            found = rate(tried(lie, table, trials))
            rows.append(row | asdict(found) | {"works": found.works, "applicable": True})
        except Inapplicable as error:
            rows.append(row | {"applicable": False, "why": str(error)})
    sees = "sums behind masks" if server.assembly.masks else "single updates"
    return {"round": server.round + 1, "texts": each, "trials": trials, "sees": sees, "cells": rows}


def tried(lie: Lie, table: Table, trials: int) -> list[Outcome]:
    """The outcomes of `trials` trials. A refusal counts as a failure."""

    def outcome() -> Outcome:
        try:
            return lie.trial(table)
        except Refused as error:
            return Outcome(False, 0.0, str(error))

    return [outcome() for _ in range(trials)]


@dataclass(frozen=True)
class Rate:
    """hits: of `of` trials; for membership, of the trials with a member. interval: exact, 95 %, over trials. guess: the mean
    success rate of a guess.

    refused: trials that a client or the protocol refused; they count as misses. why: the first refusal. false_alarms: among the
    `quiet` trials, which have no member.
    """

    hits: int
    of: int
    interval: tuple[float, float]
    guess: float
    refused: int
    why: str
    false_alarms: int
    quiet: int

    @property
    def works(self) -> bool:
        """Whether the attack is better than the guess, and recognises members more often than it accuses others; each at 97.5 %
        confidence.
        """
        if not self.quiet:
            return self.interval[0] > self.guess
        # the probability of so many more hits than false alarms if both are equally likely (Fisher)
        trials = [[self.hits, self.of - self.hits], [self.false_alarms, self.quiet - self.false_alarms]]
        return self.interval[0] > self.guess and float(fisher_exact(trials, alternative="greater").pvalue) < _ERROR


def rate(outcomes: Sequence[Outcome]) -> Rate:
    """The rate of these trials."""
    loud, quiet = ([one for one in outcomes if one.quiet is kind] for kind in (False, True))
    hits, alarms = (sum(one.hit for one in some) for some in (loud, quiet))
    answered = [one.guess for one in outcomes if not one.refused]
    guess = sum(answered) / len(answered) if answered else 0.0
    refusals = [one.refused for one in outcomes if one.refused]
    low, high = map(float, binomtest(hits, len(loud)).proportion_ci(0.95) if loud else (0.0, 1.0))
    return Rate(hits, len(loud), (low, high), guess, len(refusals), "".join(refusals[:1]), alarms, len(quiet))


@dataclass(frozen=True)
class Outcome:
    """One trial. hit: the attack was right. guess: the probability that the same answer is right by chance. refused: why there
    was no answer. quiet: a trial without a member, where a hit is a false alarm.
    """

    hit: bool
    guess: float
    refused: str = ""
    quiet: bool = False


def _trapped(table: Table, *, alone: bool = False) -> Outcome:
    """One random text of the victim is among the named texts; as many are named as the contribution or sum covers.

    alone: a sum is read in which all clients but one get dead tensors; then as many texts are named as the victim has.
    """
    held = table.deal()
    crafted = lies.traps(table.head, table.public_inputs, table.server.limit)
    read, people = table.answer(lies.dead(table.head), held, told=crafted) if alone else table.answer(crafted, held)
    most = table.each if alone else people * table.each
    names = lies.named(table.head, read, table.inputs, most, signs=table.adamw)
    return Outcome(held[0] in names, most / len(table.candidates))


def _membership(table: Table) -> Outcome:
    """In every other trial the victim has the target; the verdict has a false-positive rate of 1 / (nulls + 1)."""
    target, *held = table.deal()
    inside = table.flip()
    held = [target, *held[1:]] if inside else held
    point = table.inputs[target]
    crafted = lies.alarm(table.head, point, table.public_inputs, table.server.limit)
    read, _ = table.answer(crafted, held)
    nulls = [lies.score(table.head, one, point) for one in table.null_answers(crafted)]
    verdict = lies.is_member(lies.score(table.head, read, point), nulls)
    return Outcome(verdict, 1 / (table.nulls + 1), quiet=not inside)


def _replay(table: Table) -> Outcome:
    """In every other trial the victim has one more text; the server knows its other texts."""
    target, *rest = table.deal()
    inside = table.flip()
    crafted = lies.alarm(table.head, table.inputs[target], table.public_inputs, table.server.limit)
    read, people = table.answer(crafted, [target, *rest] if inside else rest)
    if people > 1:
        read = read - table.usual(crafted, people - 1)
    with_, without = (
        table.server.replayed(0, crafted, [table.candidates[one] for one in texts]) for texts in ([target, *rest], rest)
    )
    return Outcome(lies.has_text(read, with_, without) == inside, 0.5)


def _labels(table: Table) -> Outcome:
    """The victim's counts of all classes, exactly; the guess rounds the public shares."""
    held, config = table.deal(), table.server.assembly.config.training
    read, people = table.answer(lies.flat(table.head, config.optimizer), held)
    steps = table.server.falling.as_long(planned_steps(table.each, config))
    rate = people * table.server.lr * config.head_times
    counts = lies.counts(table.head, read, config.optimizer, rate, steps, table.each)
    true = np.bincount([_label(table.candidates[one]) for one in held], minlength=table.head.classes)
    return Outcome(bool((counts.numpy() == true).all()), _guessed_labels(table))


def _guessed_labels(table: Table) -> float:
    """How often the rounded public shares equal a client's counts, over candidates in order, with one hit added: among few
    clients, no hit does not show that a guess is never right.
    """
    classes, each = table.head.classes, table.each
    of = np.array([_label(one) for one in table.candidates])
    shares = np.bincount([_label(one) for one in table.public], minlength=classes) / len(table.public)
    guess = lies.whole(torch.from_numpy(shares), each).numpy()
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


_suppressed = partial(_trapped, alone=True)
_NAMED = "a text of the client is named"
_LISTED = (
    Lie("traps", "Traps for single texts", "Fowl et al. 2022, Shi et al. 2026", _NAMED, _trapped),
    Lie("membership", "A unit that fires for one text", "Nguyen et al. 2023", "a member is recognised", _membership),
    Lie("suppression", "Dead gradients for the others of a sum", "Pasquini et al. 2022", _NAMED, _suppressed),
    Lie("replay", "Replay with a text and without", "Nasr et al. 2021", "with or without is recognised", _replay),
    Lie("labels", "Counts of labels from one step", "Wainakh et al. 2022", "all counts are right", _labels),
)
LIES = {one.name: one for one in _LISTED}


@dataclass
class Table:
    """A lying server, and the texts for trials.

    each: the number of texts of a client. candidates: the texts that clients may have; inputs: their inputs to the head.
    public: other texts of the same kind, with their inputs. nulls: the number of simulated clients for a membership verdict.
    inside: whether the victim had the target in the last trial with a target, which alternates. With masks the server reads
    sums, else single contributions.
    """

    server: LyingServer
    head: Head
    each: int
    candidates: list[Any]
    inputs: Tensor
    public: list[Any]
    public_inputs: Tensor
    rng: np.random.Generator
    nulls: int = lies.NULLS
    inside: bool = False

    @classmethod
    def laid(cls, server: LyingServer, each: int, seed: int) -> Table:
        """Texts of the test set: half for clients, half public, up to a thousand each."""
        texts, rng = list(server.assembly.problem.test), np.random.default_rng(seed)
        order = rng.permutation(len(texts))
        cut = min(CANDIDATES, len(texts) // 2)
        if cut < FEWEST:
            raise Inapplicable(
                f"{len(texts)} test examples are too few: a lying server needs {2 * FEWEST} to prepare; give a larger "
                "data.test, or for the built-in notes more data.test_examples"
            )
        held, public = ([texts[i] for i in part] for part in (order[:cut], order[cut : cut + PUBLIC]))
        head = Head.of(server, held[0])
        return cls(server, head, each, held, head.inputs(server, held), public, head.inputs(server, public), rng)

    @property
    def adamw(self) -> bool:
        return self.server.assembly.config.training.optimizer == "adamw"

    @property
    def cohort(self) -> list[int]:
        """The clients of a sum, the victim first; without masks, the victim alone."""
        assembly = self.server.assembly
        return assembly.server.draw(self.server.round) if assembly.masks else [0]

    def flip(self) -> bool:
        """Whether the victim has the target in this trial."""
        self.inside = not self.inside
        return self.inside

    def deal(self) -> list[int]:
        """Indices of the candidates that the victim has in a trial."""
        return [int(one) for one in self.rng.choice(len(self.candidates), self.each, replace=False)]

    def answer(self, tensors: Tensors, held: Sequence[int], told: Tensors | None = None) -> tuple[Tensors, int]:
        """The contribution or sum that the server reads when the victim has these candidates, and the number of clients in it.

        told: tensors for the victim alone; then the server reads a sum, with masks or without.
        """
        texts, cohort = [self.candidates[one] for one in held], self.cohort
        if told is None and len(cohort) == 1:
            return self.server.answer(0, tensors, texts), 1
        if len(cohort) == 1:
            cohort = list(range(min(_OPEN_SUM, self.server.clients)))
        held_by = {one: texts if one == cohort[0] else self._of_others(held) for one in cohort}
        told_to = None if told is None else {cohort[0]: told}
        return self.server.summed(cohort, tensors, told_to, held_by), len(cohort)

    def null_answers(self, tensors: Tensors) -> list[Tensors]:
        """`nulls` simulations of the contribution or sum that the server reads if every client has public texts.

        Every sum has its own clients. If sums shared clients, the client with the largest score would be in several, and a real
        sum would exceed all of them too easily.
        """
        people = range(len(self.cohort))
        sums = ([self.server.answer(0, tensors, self._of_public()) for _ in people] for _ in range(self.nulls))
        return [own[0] if len(own) == 1 else self.server.simulated_sum(own) for own in sums]

    def usual(self, tensors: Tensors, clients: int) -> Tensors:
        """The simulated sum of `clients` clients with public texts, without noise: the server's expectation for others."""
        total = self.server.replayed(0, tensors, self._of_public())
        for _ in range(clients - 1):
            total = total + self.server.replayed(0, tensors, self._of_public())
        return total

    def _of_public(self) -> list[Any]:
        return [self.public[one] for one in self.rng.choice(len(self.public), self.each, replace=False)]

    def _of_others(self, held: Sequence[int]) -> list[Any]:
        rest = np.setdiff1d(np.arange(len(self.candidates)), held)
        return [self.candidates[one] for one in self.rng.choice(rest, self.each, replace=False)]
