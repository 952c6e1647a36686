"""Dummies: clients without data, whose membership scores show what the releases of a private run tell about a member.

A member's training ends along a random direction; a non-member contributes zeros. A dummy is drawn as clients are, its
contribution is clipped by the same code, and noised where clients noise their contributions themselves. Members and non-members
differ in that contribution alone, which has length C or is zero, as the neighbours of a guarantee for clients do. The server
runs the dummies and adds what they contribute to the noised sum of the clients (`rounds/server.py`). A dummy adds nothing to
the counters of an adaptive clip norm, and keeps nothing.

The scores say how far a run's releases move along the dummies' directions. They use no private data. In every round, for every
pass with mean M over D coordinates, let e be the contribution of a dummy if it is a member: a function of its public
direction, of the state before the round, and of earlier means. Then

    x = sqrt(D) <e, M> / (|e| |M|)

is about N(0, 1) for a dummy that is no member or is not drawn (exactly a coordinate of a uniform point on the sphere, where e
is its direction itself), and about N(s, 1) with s = sqrt(D) |e| / (R |M|) for a drawn member, where a mean is a sum divided by
R. A dummy takes part with a probability p that everybody knows: 0 or 1 where the public seed draws cohorts, else the rate of
the secret coins. So the score of a dummy grows in every round by

    log(1 - p + p exp(sum over passes of s x - s^2 / 2)),

the most powerful score where this holds (Neyman and Pearson). Where noise is in the steps of training (examples, persons) the
distance that a dummy moves a mean is not known, and its score grows by p times the sum of its x. Where the server's noise is
correlated over rounds, releases of several rounds together contain more information than each alone: see `whitened_evidence`.

Scores are a function of releases (noised states and means), of directions, and of public numbers: post-processing of values
that the guarantee covers. They use no membership coin, no realised draw of secret coins, and no message of a client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from secure_fed.config import RunConfig
from secure_fed.learning.audit_pool.canaries import length_beyond_clipping
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.training.canary_directions import direction, layout_of, trains_towards
from secure_fed.methods.method import RoundPlan, State
from secure_fed.rounds.client import Client, ClientSetup
from secure_fed.rounds.server import Floats, Server, Turns
from secure_fed.rounds.transport import Request
from secure_fed.tensors.tensors import Layout, Tensors

# Names in a state's memory, which carries the scores from round to round, and through a kill.
SCORES, PAST, LATEST = "dummies", "dummies.past", "dummies.latest"
_KEPT = 1 << 26  # numbers, 256 MB
_ROUNDING = 1e-4  # of the cosine of a contribution with its direction


class Dummy(Client):
    """A client without data. member: whether its coin made it a member."""

    def __init__(self, index: int, name: str, setup: ClientSetup, *, member: bool) -> None:
        super().__init__(index, name, (), setup)
        self.member = member

    @property
    def personal(self) -> Tensors:
        return Tensors()

    @property
    def _context(self) -> Tensors:
        return Tensors()

    def _clipped(self, contribution: Tensors, clip_norm: float) -> Tensors:
        bounded = super()._clipped(contribution, clip_norm)
        counters = self._setup.protection.contribution_mechanism.counters
        nothing = counters if self.member else list(bounded)
        return bounded | {name: torch.zeros(bounded[name].shape) for name in nothing}

    def pulls(self, request: Request) -> Tensors:
        """Its contribution to a pass, without counters, noise and charge. The passes of a round must come in order."""
        if request.pass_name == request.plan.passes[0]:
            self._takes_part = True
            setup = self._setup
            self._before = setup.initial | request.tensors
            rng = np.random.default_rng(0)  # training along a direction does not use it
            trained = setup.train(setup.objective, setup.job(self._before, request, (), rng))
            self._after = trained.after.without(setup.personal)
        contribution = self._setup.method.contribute(request.pass_name, self._before, self._after, request.means)
        counters = self._setup.protection.contribution_mechanism.counters
        return self._clipped(contribution, request.clip_norm).without(counters)


def dummy_clients(
    config: RunConfig,
    units: Sequence[Unit],
    members: Sequence[bool] | NDArray[np.bool_],
    first: int,
    setup: ClientSetup,
    turns: Turns | None = None,
) -> list[Dummy]:
    """A client for each dummy, with indices from `first`.

    turns: the rounds in which each takes part; without them, as `setup` allows.
    """
    far, seed = length_beyond_clipping(config), config.federation.seed
    found = []
    for number, (unit, member) in enumerate(zip(units, members, strict=bool(units))):
        allowance = setup.allowance if turns is None else partial(turns.allowance, number)
        towards = trains_towards(unit.name, seed, far)
        own = replace(setup, train=towards, watch=None, allowance=allowance, attendance=None)
        found.append(Dummy(first + number, unit.name, own, member=bool(member)))
    return found


def dummy_examples(dummies: AuditPool, members: NDArray[np.bool_]) -> dict[str, list[Any]]:
    """The member dummy examples of each client, by its name. The gradient of a non-member is zero."""
    found: dict[str, list[Any]] = {}
    for unit, member in zip(dummies.units, members, strict=True):
        if member and dummies.kind != "client":
            found.setdefault(unit.client, []).extend(unit.examples)
    return found


def canary_setups(config: RunConfig, held: AuditPool, setup: ClientSetup) -> dict[str, ClientSetup]:
    """The shared part, by client name, of each client of the pool that trains along a random direction
    (`evaluation.canaries = "direction"`).
    """
    if not held.directions or held.kind != "client":
        return {}
    far, seed = length_beyond_clipping(config), config.federation.seed
    return {unit.name: replace(setup, train=trains_towards(unit.name, seed, far)) for unit in held.units}


@dataclass
class DummyScores:
    """The membership scores of all dummies (`server.Scoring`).

    echoes: each dummy as a member. known: whether the length of a dummy's contribution is known.
    """

    echoes: Sequence[Dummy]
    turns: Turns
    seed: int
    known: bool
    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def after(
        self, server: Server, state: State, plan: RoundPlan, lr: float, means: Mapping[str, Tensors]
    ) -> dict[str, torch.Tensor]:
        """{SCORES: (dummies,) float64} and auxiliary data, after a round that began at `state` and released these means."""
        plan_ = server.protection.plan
        if plan_ is not None and plan_.correlation.band > 1:
            return self._whitened(server, state, plan, lr, means, np.array(plan_.correlation.column))
        evidence = np.zeros(len(self.echoes))
        for request, layout, flat in _releases(server, state, plan, lr, means):
            evidence += self._of_pass(request, state.tensors, layout, flat, server.sampler.expected)
        rate = self.turns.rates(state.round)
        if self.known:
            with np.errstate(divide="ignore"):
                evidence = np.logaddexp(np.log1p(-rate), np.log(rate) + evidence)
        else:
            evidence = rate * evidence
        return {SCORES: _grown(state, evidence)}

    def _whitened(
        self, server: Server, state: State, plan: RoundPlan, lr: float, means: Mapping[str, Tensors], column: Floats
    ) -> dict[str, torch.Tensor]:
        """The same under correlated noise."""
        products, squares = np.zeros(len(self.echoes)), np.zeros(len(self.echoes))
        cohort, size = server.sampler.expected, 0
        for request, layout, flat in _releases(server, state, plan, lr, means):
            cosines, reach = self._along(request, state.tensors, layout, flat)
            products, squares, size = products + cosines * reach, squares + np.square(reach), layout.size
        std = server.protection.mean_noise_std(state.clip_norm, cohort, size)
        known = {name: state.memory.tensor(name) for name in (PAST, LATEST) if name in state.memory}
        before = Past.of(known) if known else Past.before(state.round, len(column), len(products))
        past = before.then(state.round, products, self.turns.rates(state.round))
        grown = whitened_evidence(past, column, np.sqrt(squares), cohort, std)
        return {SCORES: _grown(state, grown), **past.kept()}

    def _of_pass(self, request: Request, before: Tensors, layout: Layout, flat: torch.Tensor, cohort: float) -> Floats:
        """(dummies,) s x - s^2 / 2, or x where s is not known."""
        length = float(flat.norm())
        if not length:
            return np.zeros(len(self.echoes))
        cosines, reach = self._along(request, before, layout, flat / length)
        x = math.sqrt(layout.size) * cosines
        if not self.known:
            return x
        shift = math.sqrt(layout.size) * reach / (cohort * length)
        evidence: Floats = shift * x - np.square(shift) / 2
        return evidence

    def _along(self, request: Request, before: Tensors, layout: Layout, unit: torch.Tensor) -> tuple[Floats, Floats]:
        """(dummies,) cosines of a unit vector with each one's contribution as a member, and the lengths of these."""
        first = layout.flatten(self.echoes[0].pulls(request), torch.float64)
        whole = layout_of(before, request.plan.trainable)
        own = self._direction(0, whole, layout)
        if own is not None and float(first @ own.double()) >= (1 - _ROUNDING) * float(first.norm()):
            # Clients send the change of the trained tensors, coordinate by coordinate.
            cosines = self._cosines(whole, layout, unit)
            return cosines, np.full(len(cosines), float(first.norm()))
        rest = (layout.flatten(echo.pulls(request), torch.float64) for echo in self.echoes[1:])
        found = [(float(one @ unit), float(one.norm())) for one in (first, *rest)]
        along, reach = np.array(found).T
        return along / np.where(reach > 0, reach, 1.0), reach

    def _direction(self, number: int, whole: Layout, sent: Layout) -> torch.Tensor | None:
        """The part of a dummy's direction that is sent, of unit norm; None where the sent tensors have other coordinates."""
        names = [name for name, _ in sent.entries]
        if not set(sent.entries) <= set(whole.entries):
            return None
        part = sent.flatten(direction(self.echoes[number].name, self.seed, whole).select(names))
        return part / (float(part.norm()) or 1.0)

    def _cosines(self, whole: Layout, sent: Layout, unit: torch.Tensor) -> Floats:
        """(dummies,) cosines of a unit vector with their directions, which are cached unless they are too many numbers."""
        place, numbers = whole.digest + sent.digest, len(self.echoes) * sent.size
        rows = self._kept.get(place)
        if rows is None and numbers <= _KEPT:
            if sum(one.numel() for one in self._kept.values()) + numbers > _KEPT:
                self._kept.clear()
            rows = self._kept[place] = torch.stack(list(self._rows(whole, sent)))
        found = [float(row @ unit.float()) for row in (self._rows(whole, sent) if rows is None else rows)]
        return np.array(found)

    def _rows(self, whole: Layout, sent: Layout) -> Iterator[torch.Tensor]:
        for number in range(len(self.echoes)):
            row = self._direction(number, whole, sent)
            if row is not None:
                yield row


@dataclass(frozen=True)
class Past:
    """The last rounds, one for each coefficient of C, the latest first. products, turns: (rounds, dummies) p and [turn]."""

    products: Floats
    turns: Floats
    latest: int

    @classmethod
    def before(cls, round_: int, band: int, dummies: int) -> Past:
        """An empty history: no round before this one released anything."""
        return cls(np.zeros((band, dummies)), np.zeros((band, dummies)), round_ - 1)

    @classmethod
    def of(cls, kept: dict[str, torch.Tensor]) -> Past:
        products, turns = kept[PAST].double().numpy()
        return cls(products, turns, int(kept[LATEST]))

    def kept(self) -> dict[str, torch.Tensor]:
        """The tensors for a state's memory."""
        rows = torch.from_numpy(np.stack([self.products, self.turns]))
        return {PAST: rows, LATEST: torch.tensor(float(self.latest), dtype=torch.float64)}

    def then(self, round_: int, products: Floats, turns: Floats) -> Past:
        """The history with this round's release as the latest; rounds in between were lost."""
        lost = np.zeros((max(0, round_ - self.latest - 1), len(products)))

        def moved(new: Floats, old: Floats) -> Floats:
            rows: Floats = np.vstack([new[None], lost, old])[: len(old)]
            return rows

        return Past(moved(products, self.products), moved(turns, self.turns), round_)


def whitened_evidence(past: Past, column: Floats, lengths: Floats, cohort: float, std: float) -> Floats:
    """(dummies,) the amount that the latest round adds to each score, from the releases with the correlation undone.

    Rounds release X + C^-1 Z (`privacy.correlation`), as means over R. Row t of C (X + C^-1 Z) = C X + Z is the sum over j of
    c_j times the release of round t - j: all information about a dummy is in these rows, whose noise is independent. Let e be
    the contribution of a dummy in its turns, p_t its inner product with the mean of round t, and

        y_t = sum over j of c_j p_(t-j)        a_t = sum over j of c_j [it had its turn in round t - j].

    Then y_t is about N(a_t |e|^2 / R, (|e| sigma)^2) for a member and N(0, (|e| sigma)^2) for a non-member, sigma being the
    standard deviation of Z on a coordinate of a mean, and the log-likelihood ratio of a round is

        a_t (y_t - a_t |e|^2 / (2 R)) / (R sigma^2).

    Its sum over all rounds is the most powerful score where e is the same in every turn and the other clients contribute
    nothing along e. With |e| the clip norm and sigma = z |e| / R it has the law of a Gaussian mechanism of
    mu^2 = (a_0^2 + a_1^2 + ...) / z^2, as in the guarantee. A lost round released nothing: its row is missing, and a dummy
    had no turn in it.

    column: c. lengths: of e. cohort: R. std: sigma.
    """
    y, a = column @ past.products, column @ past.turns
    grown: Floats = a * (y - a * np.square(lengths) / (2 * cohort)) / (cohort * std**2)
    return grown


def _releases(
    server: Server, state: State, plan: RoundPlan, lr: float, means: Mapping[str, Tensors]
) -> Iterator[tuple[Request, Layout, torch.Tensor]]:
    """The request of each pass of a round, and its mean without counters: its layout and its numbers."""
    earlier: dict[str, Tensors] = {}
    for pass_name, mean in means.items():
        request = server.request(state, plan, pass_name, lr, earlier)
        earlier[pass_name] = mean
        released = mean.without(server.protection.contribution_mechanism.counters)
        layout = Layout.of(released)
        yield request, layout, layout.flatten(released, torch.float64)


def _grown(state: State, evidence: Floats) -> torch.Tensor:
    before = state.memory.tensor(SCORES) if SCORES in state.memory else torch.zeros(len(evidence), dtype=torch.float64)
    return before + torch.from_numpy(evidence)
