"""A client in a masked sum: its contribution leaves as masked words, and nothing leaves beside them.

Weight and loss are words of the sum. Whether a client that tosses for itself trained at all, nobody learns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from privacy.entropy import Entropy
from protocols.client import Client as Masking
from protocols.errors import Aborted, RangeError, Tampering
from protocols.keys import Identity
from protocols.opening import listed
from protocols.record import InMemory
from secure_fed.errors import TrainingError
from secure_fed.rounds.client import Client
from secure_fed.rounds.masked.bound import Passes, masks_alone
from secure_fed.rounds.masked.encoding import Carrier, Noised, Said, Words
from secure_fed.rounds.masked.expected_round import (
    Rounds,
    contributors,
    require_enough,
    require_foreseen,
    require_terms,
)
from secure_fed.rounds.phantom_clients import Phantom
from secure_fed.rounds.transport import Asked, Reply, Request, Stage, Staged
from secure_fed.tensors.tensors import Layout


@dataclass
class Clock:
    """Seconds that the clients of this process have spent on the protocol, training apart."""

    seconds: float = 0.0


class Member:
    """A client of the federation behind masks.

    coin: with what probability it trains in a round, where it tosses for that itself. fails_nonfinite: whether a contribution
    that is not finite, or has a coordinate that cannot be carried, fails the run; else zeros go in its place.
    """

    def __init__(
        self,
        client: Client,
        rounds: Rounds,
        entropy: Entropy,
        clock: Clock,
        *,
        coin: float | None = None,
        fails_nonfinite: bool = False,
        identity: Identity | None = None,
    ) -> None:
        self.client = client
        self._rounds = rounds
        self._terms = rounds.terms
        self._entropy = entropy
        self._clock = clock
        self._coin = coin
        self._fails_nonfinite = fails_nonfinite
        self._identity = identity
        self._sessions = InMemory()
        self._masking: Masking | None = None
        self._left: int | None = None
        self._passes = Passes(exact=masks_alone(self._terms.protection))
        self._asked: Asked | None = None

    def begin(self, releases: int | None = None) -> None:
        """A run begins, or goes on, with so many releases to come."""
        self._left = releases
        self._passes.begin()

    def handle(self, stage: Stage) -> Staged | None:
        """Answer one stage; None if too few are left for this client to go on."""
        started = time.perf_counter()
        try:
            message, elsewhere = self._answer(stage)
        except Aborted:
            self._masking = None
            return None
        self._clock.seconds += time.perf_counter() - started - elsewhere
        return Staged(self.client.index, message)

    def _answer(self, stage: Stage) -> tuple[bytes | bytearray, float]:
        """The message, and the seconds that went into something else than the protocol."""
        if stage.name == "advertise":
            require_terms(stage.parameters, self._terms)
            policy = self._terms.policy(len(stage.parameters.clients))
            self._masking = Masking(
                stage.parameters, self.client.index, policy, identity=self._identity, sessions=self._sessions
            )
            return self._masking.advertise(), 0.0
        masking = self._masking
        if masking is None:
            raise TrainingError(f"client {self.client.name} was asked for {stage.name!r} of a sum that it is not in")
        if stage.parameters != masking.parameters:
            raise Tampering("the session's parameters are not those that it began with", protected="")
        if stage.name == "mask":
            words, elsewhere = self._words(stage)
            return masking.mask(stage.message, words), elsewhere
        steps = {
            "share": masking.share,
            "consistency": masking.confirm,
            "unmask": masking.unmask,
        }
        if stage.name == ("consistency" if stage.parameters.active else "unmask"):
            self._check_survivors(stage)
        answer = steps[stage.name](stage.message)
        if stage.name == "unmask":
            self._passes.opened()  # only now: a list that the protocol refuses is nobody's sum
        return answer, 0.0

    def _check_survivors(self, stage: Stage) -> None:
        """Refuse a list of survivors over whom there may be no sum."""
        survivors = frozenset(listed(stage.message, stage.parameters).clients)
        if self._asked is not None:
            require_enough(survivors.intersection(self._asked.contributors), stage.parameters, self._terms)
        self._passes.check(survivors)

    def _words(self, stage: Stage) -> tuple[Words, float]:
        request = stage.request
        self._count()
        cohort = contributors(stage, self.client.index, self._terms)
        self._asked = stage.asked
        if request is None:  # invited to make up the number
            self._require_filling()
            self._passes.fill()
            return np.zeros(stage.parameters.length, _word(stage.parameters.bits)), 0.0
        require_foreseen(request, stage, self._rounds)
        self._passes.take(request, cohort)
        stream = self._entropy.stream("share", stage.round, self.client.index)
        layout = self._rounds.foreseen(request).layouts[request.pass_name]
        carrier = self._carrier(layout.size, request.clip_norm)
        started = time.perf_counter()
        said = self._said(replace(request, clip_norm=self._longest(request, carrier))) if self._trains() else None
        trained = time.perf_counter() - started
        try:
            return carrier.words(said, stream), trained
        except RangeError as error:
            if self._fails_nonfinite:
                raise TrainingError(
                    f"client {self.client.name}: {error}; raise secure_aggregation.range, or lower training.lr"
                ) from error
            return carrier.words(None, stream), trained

    def _carrier(self, size: int, clip_norm: float) -> Carrier:
        """The run's; a client that is nobody brings no noise."""
        carrier = self._terms.carrier(size, clip_norm)
        if isinstance(carrier, Noised) and isinstance(self.client, Phantom):
            return replace(carrier, silent=True)
        return carrier

    def _require_filling(self) -> None:
        """Where no coins draw the cohort, nobody is asked for zeros: a server that asked all but one would have that one's."""
        if not self._terms.varies:
            raise Tampering("this client was asked for nothing in a sum, where everybody who is invited contributes")

    def _count(self) -> None:
        """Where clients bring the noise, contribute to no more sums than the run planned, whether or not they are unmasked."""
        if self._left is not None:
            if self._left == 0:
                raise Tampering("this is one noised sum more than the run has reserved")
            self._left -= 1

    def _longest(self, request: Request, carrier: Carrier) -> float:
        """No server lengthens what is noised here."""
        longest = min(request.clip_norm, carrier.admitted())
        return longest if self._terms.protection.shares is None else min(longest, self._terms.protection.clip_norm)

    def _said(self, request: Request) -> Said | None:
        """The contribution, trained for now if this is the round's first pass; None where it is not finite."""
        reply: Reply = self.client.handle(request)
        if not reply.contribution.is_finite():
            if self._fails_nonfinite:
                raise TrainingError(
                    f"client {self.client.name} made an update that is not finite; lower training.lr, "
                    "or set federation.nonfinite = 'skip' to go on without it"
                )
            return None
        values = Layout.of(reply.contribution).flatten(reply.contribution, torch.float64).cpu().numpy()
        return Said(values, reply.weight, reply.loss)

    def _trains(self) -> bool:
        """Its toss, for this sum alone."""
        if self._coin is None:
            return True
        return bool(self._entropy.stream("coin", self._passes.round, self.client.index).uniform(1)[0] < self._coin)


def members(
    clients: Sequence[Client], rounds: Rounds, clock: Clock, coin: float | None, *, fails_nonfinite: bool
) -> list[Member]:
    """All clients of a simulated federation behind masks."""
    terms = rounds.terms
    identities = terms.registry.identities if terms.registry else (None,) * len(clients)
    return [
        Member(
            client,
            rounds,
            terms.protection.entropy,
            clock,
            coin=coin,
            fails_nonfinite=fails_nonfinite,
            identity=identity,
        )
        for client, identity in zip(clients, identities, strict=True)
    ]


def _word(bits: int) -> type[np.unsignedinteger]:
    return np.uint32 if bits == 32 else np.uint64
