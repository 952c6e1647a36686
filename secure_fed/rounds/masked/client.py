"""The client's side of a masked sum: it sends its contribution as masked words, and nothing beside them.

Weight and loss are words of the sum. A client that tosses its own coin for whether to train keeps the outcome to itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from protocols.client import Message, Played, Players, Waiting, listed
from protocols.errors import Aborted, RangeError, Tampering
from protocols.keys import Identity
from secure_fed.errors import TrainingError
from secure_fed.learning.training.local import Job, Trained
from secure_fed.rounds.client import Client
from secure_fed.rounds.masked.checks import ExpectedRounds, Passes, contributors, require_enough, require_expected
from secure_fed.rounds.masked.encoding_plan import Contribution, Encoding, Words
from secure_fed.rounds.sums import Clock
from secure_fed.rounds.transport import ContributorList, Request, Stage, Staged
from secure_fed.tensors.tensors import Layout


@dataclass(frozen=True)
class Begun:
    """An answer of a masked client, made here or in another process, or the error.

    seconds: the time spent here, training apart.
    """

    answer: Message | Waiting
    seconds: float
    error: Exception | None = None

    def result(self) -> tuple[Message, float]:
        if self.error is not None:
            raise self.error
        if not isinstance(self.answer, Waiting):
            return self.answer, self.seconds
        message, seconds = self.answer.result()
        return message, self.seconds + seconds


class MaskedClient:
    """A client of the federation behind masks.

    coin: the probability of training in a round, for a client that tosses its own coin. fails_nonfinite: a contribution that is
    not finite, or out of the encoding's range, ends the run; otherwise zeros are sent in its place. players: the processes that
    run its side of the protocol.
    """

    def __init__(
        self,
        client: Client,
        rounds: ExpectedRounds,
        clock: Clock,
        coin: float | None,
        identity: Identity | None,
        players: Players,
        *,
        fails_nonfinite: bool,
    ) -> None:
        self.client, self._rounds, self._terms, self._clock = client, rounds, rounds.terms, clock
        self._entropy = rounds.terms.protection.entropy
        self._coin, self._fails_nonfinite = coin, fails_nonfinite
        self._identity, self._players = identity, players
        self._masking: Played | None = None
        self._ahead: tuple[Stage, Begun] | None = None
        self._left: int | None = None
        self._tossed: tuple[int, bool] | None = None
        self._right: Stage | None = None
        self._passes = Passes(exact=self._terms.protection.placement.masks_alone)
        self._listed: ContributorList | None = None

    def begin(self, releases: int | None = None) -> None:
        """Begin or resume a run in which `releases` noised sums are still to come."""
        self._left, self._tossed = releases, None
        self._passes.begin()

    def handle(self, stage: Stage) -> Staged | None:
        """Answer one stage of the protocol; None if too few clients are left for this one to continue."""
        begun = self._ahead[1] if self._ahead is not None and self._ahead[0] is stage else self._begin(stage)
        self._ahead = None
        try:
            message, seconds = begun.result()
        except Aborted:
            self._masking = None
            return None
        if stage.name == "unmask":
            self._passes.opened()  # only now, since the protocol may refuse the list, and then there is no sum
        self._clock.seconds += seconds
        return Staged(self.client.index, message)

    def ahead(self, stage: Stage) -> None:
        """Begin the answer to this stage, for players that work on several at a time; `handle` comes next."""
        self._ahead = stage, self._begin(stage)

    def job(self, stage: Stage) -> Job | None:
        """As `Client.job`, in the stage that sends vectors; None for a request that is refused."""
        if stage.name != "mask" or stage.request is None or self._masking is None:
            return None
        try:
            self._require_expected(stage.request, stage)
        except Tampering:
            return None
        if not self._trains(stage.round):
            return None
        return self.client.job(self._within(stage.request, self._encoding(stage.request)))

    def train_ahead(self, stage: Stage, trained: Trained) -> None:
        """As `Client.train_ahead`."""
        if stage.request is not None:
            self.client.train_ahead(self._within(stage.request, self._encoding(stage.request)), trained)

    def _begin(self, stage: Stage) -> Begun:
        started = time.perf_counter()
        try:
            answer, training = self._answer(stage)
        except Exception as error:
            return Begun(b"", 0.0, error)
        return Begun(answer, time.perf_counter() - started - training)

    def _answer(self, stage: Stage) -> tuple[Message | Waiting, float]:
        """The message, and the seconds spent on training."""
        if stage.name == "advertise":
            self._rounds.require_terms(stage)
            policy = self._terms.policy(len(stage.parameters.clients))
            self._masking = self._players.client(stage.parameters, self.client.index, policy, self._identity)
            return self._masking.advertise(), 0.0
        masking = self._masking
        if masking is None:
            raise TrainingError(
                f"client {self.client.name} got a request for {stage.name!r} of a sum that it is not in"
            )
        if stage.parameters != masking.parameters:
            raise Tampering("the session's parameters are not those that it began with", protected="")
        if stage.name == "mask":
            words, elsewhere = self._words(stage)
            return masking.mask(stage.message, words), elsewhere
        step = {"share": masking.share, "consistency": masking.confirm, "unmask": masking.unmask}[stage.name]
        if stage.name == ("consistency" if stage.parameters.active else "unmask"):
            # refuse a list of survivors whose sum would reveal a contribution
            survivors = listed(stage.message, stage.parameters).present
            if self._listed is not None:
                require_enough(survivors.intersection(self._listed.contributors), stage.parameters, self._terms)
            self._passes.check(survivors)
        return step(stage.message), 0.0

    def _words(self, stage: Stage) -> tuple[Words, float]:
        request = stage.request
        self._count()
        cohort = contributors(stage, self.client.index, self._terms)
        self._listed = stage.listed
        if request is None:  # invited to make up the number
            # Zeros are sent only where coins draw the cohort: a server that makes all clients but one send zeros reads the
            # contribution of that one client.
            if not self._terms.varies:
                raise Tampering(
                    "the server requested zeros from this client in a sum to which every invited client contributes"
                )
            self._passes.fill()
            return np.zeros(stage.parameters.length, np.uint32 if stage.parameters.bits == 32 else np.uint64), 0.0
        self._require_expected(request, stage)
        self._passes.take(request, cohort)
        stream = self._entropy.stream("share", stage.round, self.client.index)
        encoding = self._encoding(request)
        started = time.perf_counter()
        contribution = None
        if self._trains(stage.round):
            contribution = self._contribution(self._within(request, encoding))
        trained = time.perf_counter() - started
        try:
            return encoding.encode(contribution, stream), trained
        except RangeError as error:
            if self._fails_nonfinite:
                raise TrainingError(
                    f"client {self.client.name}: {error}; raise secure_aggregation.range, or lower training.lr"
                ) from error
            return encoding.encode(None, stream), trained

    def _require_expected(self, request: Request, stage: Stage) -> None:
        """Refuse a request that is not the run's. An accepted request is not checked again."""
        if self._right is not stage:
            require_expected(request, stage, self._rounds)
            self._right = stage

    def _encoding(self, request: Request) -> Encoding:
        layout = self._rounds.expected(request).layouts[request.pass_name]
        return self._terms.encoding(layout.size, request.clip_norm)

    def _count(self) -> None:
        """Refuse more noised sums than the run reserved, unmasked or not."""
        if self._left is not None:
            if self._left == 0:
                raise Tampering("this is one noised sum more than the run has reserved")
            self._left -= 1

    def _within(self, request: Request, encoding: Encoding) -> Request:
        """The request, whose clip norm a server cannot raise above the run's where the client adds a share of the noise."""
        longest = min(request.clip_norm, encoding.admitted())
        if self._terms.protection.shares is not None:
            longest = min(longest, self._terms.protection.clip_norm)
        return replace(request, clip_norm=longest)

    def _contribution(self, request: Request) -> Contribution | None:
        """The contribution, trained if this is the round's first pass; None if it is not finite."""
        reply = self.client.handle(request)
        if not reply.contribution.is_finite():
            if self._fails_nonfinite:
                raise TrainingError(
                    f"client {self.client.name} made an update that is not finite; lower training.lr, "
                    "or set federation.nonfinite = 'skip' to go on without it"
                )
            return None
        values = Layout.of(reply.contribution).flatten(reply.contribution, torch.float64).cpu().numpy()
        return Contribution(values, reply.weight, reply.loss)

    def _trains(self, round_: int) -> bool:
        """Whether this client trains: its secret coin for this round, which it tosses once."""
        if self._coin is None:
            return True
        if self._tossed is None or self._tossed[0] != round_:
            toss = self._entropy.stream("coin", round_, self.client.index).uniform(1)[0]
            self._tossed = round_, bool(toss < self._coin)
        return self._tossed[1]
