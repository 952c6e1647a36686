"""A whole session of many clients in one process: the real protocol over random vectors, its cost, and noticed lies.

    report = simulate(Simulation(clients=100, dim=10_000, dropout=0.1))
    report.exact, report.stages[2].client_seconds

All clients take turns on this machine, and work that is the same for all of them on one message (the roster, the signatures) is
done by the first client of a stage and cached for the others. So `client_seconds` is the average time of a client in this
process, and `client_seconds_most` the time of a client on its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from protocols.errors import ParameterError
from protocols.keys import Identity, registry_digest
from protocols.lies import attack_of
from protocols.parameters import Parameters, Policy, stages
from protocols.scene import HONEST, SERVER, Attack, Progress, Scene, Tally, play
from protocols.thresholds import Choice, choose

FORESEEN = 10  # a session is chosen so that at least one client in ten may be missing
_MOST_CLIENTS, _MOST_DIM = 100_000, 100_000_000  # the limits of one process
_ROOM = 8  # bits: vectors fill at most 2^-8 of a sum's range, so that garbage is recognised
_ROLES = 3  # clients that an attack needs to stay
_RANDOM = secrets.SystemRandom()


@dataclass(frozen=True)
class Simulation:
    """The settings of a simulation. ParameterError, in one sentence, if it is impossible.

    round(dropout clients) of the clients drop out, spread over the stages, and one more may be lost to `tamper`. Neighbours and
    threshold are chosen so that the rest can finish (see `choice`), or used as given if they are safe against the share
    `corrupt` of the clients. `survivors` of the choice is the least number whose sum is released.
    """

    clients: int
    dim: int
    dropout: float = 0.0
    neighbours: int | None = None
    threshold: int | None = None
    active: bool = False
    bits: int = 32
    corrupt: float = 0.1
    tamper: str = ""

    def __post_init__(self) -> None:
        for name, most, least in (("clients", _MOST_CLIENTS, 2), ("dim", _MOST_DIM, 1)):
            if not least <= getattr(self, name) <= most:
                raise ParameterError(f"{name} is {getattr(self, name)}: choose from {least} to {most}")
        if not 0 <= self.dropout < 1:
            raise ParameterError(f"dropout is {self.dropout}: give a share of the clients from 0 to below 1")
        if self.bits not in (32, 64):
            raise ParameterError(f"bits is {self.bits}: a word has 32 or 64")
        attack = self.attack
        if attack.active and not self.active:
            raise ParameterError(f"tamper is {attack.kind}: only an active session can notice it: set active")
        if attack is not HONEST and self.clients - self.dropped < _ROLES + 2:
            raise ParameterError(
                f"{self.clients - self.dropped} clients stay, and tamper needs at least {_ROLES + 2}: "
                "raise clients or lower dropout"
            )
        if attack.ring and self.parameters(()).complete:
            raise ParameterError(
                f"tamper is {attack.kind}: it needs an incomplete graph: lower neighbours, or raise clients to 200"
            )
        _ = self.choice  # ParameterError if no choice is safe

    @property
    def attack(self) -> Attack:
        return attack_of(self.tamper) if self.tamper else HONEST

    @property
    def dropped(self) -> int:
        return round(self.dropout * self.clients)

    @cached_property
    def choice(self) -> Choice:
        """The graph and the threshold for the expected dropouts, or for a tenth of all clients where that is more."""
        missing = max(self.dropped + bool(self.tamper), self.clients // FORESEEN)
        return choose(
            self.clients,
            corrupt=self.corrupt,
            # `choose` rounds it down to whole clients: `missing`
            dropout=min((missing + 0.5) / self.clients, 0.999999),
            active=self.active,
            neighbours=self.neighbours,
            threshold=self.threshold,
        )

    def parameters(self, identities: tuple[tuple[int, bytes], ...]) -> Parameters:
        """The session's parameters. identities: the public ones; may be empty if the session will not be played."""
        choice, invited = self.choice, tuple(range(self.clients))
        digest = registry_digest(dict(identities), invited) if identities else bytes([self.active]) * 32
        return Parameters(
            run="simulation",
            round=1,
            layout=bytes(32),
            length=self.dim,
            bits=self.bits,
            clients=invited,
            neighbours=choice.neighbours,
            threshold=choice.threshold,
            survivors=choice.survivors,
            active=self.active,
            partners=choice.partners,
            bound=max(1, 2 ** (self.bits - 1 - _ROOM) // self.clients),
            registry=digest,
        )


@dataclass(frozen=True)
class Stage:
    """The cost of a stage: bytes and seconds of one client, on average, or the maximum (`_most`)."""

    name: str
    bytes_up: float
    bytes_down: float
    client_seconds: float
    client_seconds_most: float
    server_seconds: float
    answered: int


@dataclass(frozen=True)
class Verdict:
    """Whether a lie was caught: by which party, at which stage, with which message.

    Where no party that had to notice did, `by` and `stage` are None, and `what` describes the events instead.
    """

    kind: str
    caught: bool
    by: str | None
    stage: str | None
    what: str


@dataclass(frozen=True)
class Report:
    """The outcome. `exact`: whether the sum equals the survivors' plain sum bit for bit; None if there was no sum."""

    simulation: Simulation
    dropped: int
    survivors: int
    exact: bool | None
    aborted: str | None
    stages: tuple[Stage, ...]
    bytes_total: int
    tamper: Verdict | None

    @property
    def well(self) -> bool:
        """Whether the outcome is right: the sum is exact, or the parties that should notice the lie have noticed it."""
        return bool(self.exact) if self.tamper is None else self.tamper.caught

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        asked, choice = self.simulation, self.simulation.choice
        return {
            "clients": asked.clients,
            "dim": asked.dim,
            "bits": asked.bits,
            "active": asked.active,
            "neighbours": choice.neighbours,
            "threshold": choice.threshold,
            "survivors_least": choice.survivors,
            "failure": choice.failure,
            "abort_probability": choice.abort,
            "dropped": self.dropped,
            "survivors": self.survivors,
            "exact": self.exact,
            "aborted": self.aborted,
            "bytes_total": self.bytes_total,
            "stages": [vars(stage) for stage in self.stages],
            "tamper": None if self.tamper is None else vars(self.tamper),
        }


def simulate(simulation: Simulation, *, progress: Progress | None = None) -> Report:
    """Play one session. Calls `progress(stage, done, clients)` after each client's turn."""
    scene = _scene(simulation, progress)
    play(scene, simulation.attack)
    total = None if scene.aborted else scene.server.total()
    exact = None if total is None else np.array_equal(total, scene.plain) and scene.summed == {*scene.server.survivors}
    return Report(
        simulation=simulation,
        dropped=simulation.dropped,
        survivors=len(scene.server.survivors),
        exact=exact,
        aborted=scene.aborted or None,
        stages=tuple(_stage(tally) for tally in scene.tallies),
        bytes_total=sum(sum(tally.up) + sum(tally.down) for tally in scene.tallies),
        tamper=verdict(scene, simulation.attack, exact) if simulation.tamper else None,
    )


def _scene(simulation: Simulation, progress: Progress | None) -> Scene:
    invited = range(simulation.clients)
    identities = {client: Identity.new() for client in invited} if simulation.active else {}
    public = {client: identity.public for client, identity in identities.items()}
    parameters, choice = simulation.parameters(tuple(public.items())), simulation.choice
    policy = Policy(
        threshold=choice.threshold,
        survivors=choice.survivors,
        corrupt=choice.corrupt,
        window=choice.window,
        partners=choice.partners,
        colluding=choice.colluding,
        active=simulation.active,
        identities=public,
        clients=simulation.clients,
        neighbours=choice.neighbours,
    )
    leaving = departures(parameters, simulation.dropped)
    gone = set().union(*leaving.values())
    staying = [client for client in invited if client not in gone]
    peer, victim, liar = sorted(_RANDOM.sample(staying, _ROLES)) if simulation.tamper else (-1, -1, -1)
    return Scene(parameters, policy, identities, leaving, peer, victim, liar, progress)


def departures(parameters: Parameters, count: int) -> Mapping[str, list[int]]:
    """The clients that drop out before each stage: equally many before each, drawn by the operating system's randomness."""
    where = list(stages(parameters))
    _RANDOM.shuffle(where)  # which stages get one more
    leaving: dict[str, list[int]] = {stage: [] for stage in where}
    for turn, client in enumerate(_RANDOM.sample(parameters.clients, count)):
        leaving[where[turn % len(where)]].append(client)
    return leaving


def _stage(tally: Tally) -> Stage:
    return Stage(
        name=tally.name,
        bytes_up=_mean(tally.up),
        bytes_down=_mean(tally.down),
        client_seconds=_mean(tally.client_seconds),
        client_seconds_most=max(tally.client_seconds, default=0.0),
        server_seconds=tally.server_seconds,
        answered=tally.answered,
    )


def _mean(numbers: list[int] | list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def verdict(scene: Scene, attack: Attack, exact: bool | None) -> Verdict:
    """Caught: every party noticed every lie that it had to notice, in the right stage and with the right error.

    Where an attack must not cost the others their sum, they must also have the exact sum.
    """
    noticed = [
        one for one in scene.refusals if isinstance(one.error, attack.error) and (one.who, one.stage) in scene.expected
    ]
    seen = {who: sum((one.who, one.stage) == who for one in noticed) for who in scene.expected}
    words = attack.outcome(scene) if attack.outcome is not None else ""
    caught = all(seen[who] >= times for who, times in scene.expected.items()) and bool(noticed or words)
    if scene.believed or (attack.exact and not exact):
        caught = False
    if words:
        return Verdict(attack.kind, caught, "the server", scene.stage_of(attack.stage), words)
    if noticed:
        first, others = noticed[0], len({one.who for one in noticed}) - 1
        more = f" and {others} other{'s' if others > 1 else ''}" if others and first.who != SERVER else ""
        missed = "" if caught else "; but not every party that had to notice did, or the others lost their sum"
        return Verdict(attack.kind, caught, _named(first.who) + more, first.stage, first.error.what + missed)
    if not scene.refusals:
        return Verdict(attack.kind, False, None, None, "nobody noticed")
    first = scene.refusals[0]
    what = (
        f"no party that had to notice did; the first error, in stage {first.stage}, was raised by {_named(first.who)}: "
        f"{first.error.what}"
    )
    return Verdict(attack.kind, False, None, None, what)


def _named(who: int) -> str:
    return "the server" if who == SERVER else f"client {who}"
