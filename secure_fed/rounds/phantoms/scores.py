"""Membership scores of phantoms: how far a run's releases move along their directions. They use no private data.

In every round, for every pass with mean M over D coordinates, let e be the contribution of a phantom if it is a member: a
function of its public direction, of the state before the round, and of earlier means. Then

    x = sqrt(D) <e, M> / (|e| |M|)

is about N(0, 1) for a phantom that is no member or is not drawn (exactly a coordinate of a uniform point on the sphere, where e
is its direction itself), and about N(s, 1) with s = sqrt(D) |e| / (R |M|) for a drawn member, where a mean is a sum divided by
R. A phantom takes part with a probability p that everybody knows: 0 or 1 where the public seed draws cohorts, else the rate of
the secret coins. So the score of a phantom grows in every round by

    log(1 - p + p exp(sum over passes of s x - s^2 / 2)),

the most powerful score where this holds (Neyman and Pearson). Where noise is in the steps of training (examples, groups) the
distance that a phantom moves a mean is not known, and its score grows by p times the sum of its x. Where the server's noise is
correlated over rounds, releases of several rounds together contain more information than each alone: see `whitened_scores`.

Scores are a function of releases (noised states and means), of directions, and of public numbers: post-processing of values
that the guarantee covers. They use no membership coin, no realised draw of secret coins, and no message of a client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from secure_fed.learning.training.canary_directions import direction, layout_of
from secure_fed.methods.method import RoundPlan, State
from secure_fed.rounds.phantoms import whitened_scores
from secure_fed.rounds.phantoms.clients import Phantom
from secure_fed.rounds.phantoms.whitened_scores import LATEST, PAST, Past
from secure_fed.rounds.server import Server
from secure_fed.rounds.transport import Request
from secure_fed.rounds.turns import Floats, Turns
from secure_fed.tensors.tensors import Layout, Tensors

SCORES = "phantoms"  # in a state's memory, which carries the scores from round to round, and through a kill


@dataclass
class PhantomScores:
    """The membership scores of all phantoms (`server.Scoring`).

    echoes: each phantom as a member. known: whether the length of a phantom's contribution is known.
    """

    echoes: Sequence[Phantom]
    turns: Turns
    seed: int
    known: bool
    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def after(
        self, server: Server, state: State, plan: RoundPlan, lr: float, means: Mapping[str, Tensors]
    ) -> dict[str, torch.Tensor]:
        """{SCORES: (phantoms,) float64} and auxiliary data, after a round that began at `state` and released these means."""
        plan_ = server.protection.plan
        if plan_ is not None and plan_.correlation.band > 1:
            return self._whitened(server, state, plan, lr, means, np.array(plan_.correlation.column))
        evidence, earlier = np.zeros(len(self.echoes)), dict[str, Tensors]()
        for pass_name, mean in means.items():
            request = server.request(state, plan, pass_name, lr, earlier)
            earlier[pass_name] = mean
            released = mean.without(server.protection.contribution_mechanism.counters)
            evidence += self._of_pass(request, state.tensors, released, server.sampler.expected)
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
        cohort, size, earlier = server.sampler.expected, 0, dict[str, Tensors]()
        for pass_name, mean in means.items():
            request = server.request(state, plan, pass_name, lr, earlier)
            earlier[pass_name] = mean
            released = mean.without(server.protection.contribution_mechanism.counters)
            layout = Layout.of(released)
            flat = layout.flatten(released, torch.float64)
            cosines, reach = self._along(request, state.tensors, layout, flat)
            products, squares, size = products + cosines * reach, squares + np.square(reach), layout.size
        std = server.protection.mean_noise_std(state.clip_norm, cohort, size)
        known = {name: state.memory.tensor(name) for name in (PAST, LATEST) if name in state.memory}
        before = Past.of(known) if known else Past.before(state.round, len(column), len(products))
        past = before.then(state.round, products, self.turns.rates(state.round))
        grown = whitened_scores.evidence(past, column, np.sqrt(squares), cohort, std)
        return {SCORES: _grown(state, grown), **past.kept()}

    def _of_pass(self, request: Request, before: Tensors, mean: Tensors, cohort: float) -> Floats:
        """(phantoms,) s x - s^2 / 2, or x where s is not known."""
        layout = Layout.of(mean)
        flat = layout.flatten(mean, torch.float64)
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
        """(phantoms,) cosines of a unit vector with each one's contribution as a member, and the lengths of these."""
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
        """The part of a phantom's direction that is sent, of unit norm; None where the sent tensors have other coordinates."""
        names = [name for name, _ in sent.entries]
        if not set(sent.entries) <= set(whole.entries):
            return None
        part = sent.flatten(direction(self.echoes[number].name, self.seed, whole).select(names))
        return part / (float(part.norm()) or 1.0)

    def _cosines(self, whole: Layout, sent: Layout, unit: torch.Tensor) -> Floats:
        """(phantoms,) cosines of a unit vector with their directions, which are cached unless they are too many numbers."""
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


def _grown(state: State, evidence: Floats) -> torch.Tensor:
    before = state.memory.tensor(SCORES) if SCORES in state.memory else torch.zeros(len(evidence), dtype=torch.float64)
    return before + torch.from_numpy(evidence)


_KEPT = 1 << 26  # numbers, 256 MB
_ROUNDING = 1e-4
