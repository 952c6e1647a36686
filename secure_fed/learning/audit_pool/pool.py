"""The audit pool of a run: members and held-out units, chosen by coins, so that members and non-members differ in nothing else.

A protected unit (an example; with privacy for persons a person, with client-level privacy a whole client) enters the audit pool
with probability p, and a fair coin makes each unit of the pool a member or not. Members train as usual; non-members are removed
entirely: an example from its client's data, a client from the federation.

Dummies are audited units that are nobody's data: clients beside clients, examples beside examples. A pool of them (`dummies`)
holds out nothing. A member pulls the model along a random direction of its own, as far as the clip norm C allows any unit; a
non-member takes part too, and contributes zeros. So members and non-members differ as the guarantee's neighbouring data sets
do, whoever adds the noise. `number_of_dummies` has their number.

The lot (whether a unit of the data enters the pool) and the coin are a keyed hash of the unit itself (its content, or its name)
under the seed. So
- for a fixed number of units, replacing one unit changes no other unit's lot or coin. p depends on their number: it is
  `evaluation.audit_fraction`, at most 1,800 units, and 0 if that would be fewer than ten units. So adding or removing a unit
  changes p a little, and may move another unit into the pool or out of it. The guarantee therefore takes the number of units as
  public, and the privacy statement says so; given this number, the guarantee for a unit is the same with and without the
  holding out, since whether a unit trains is a function of that unit alone;
- examples that train alike have the same lot, at every client: no held-out example is a copy of a training example. They also
  have the same coin, so they are left out of the audit: only an example that occurs once is a unit of the pool;
- a resumed run, and an audit years later, find the same members.
The coins are not secret: the seed is public, so anybody who knows a unit can compute its coin. This weakens no guarantee, for
the reason above, and no audit, as long as no score of an attack reads the coins: of the code that computes or judges scores,
only `runs/membership.py` and the judge of an audit read `AuditPool.members`. All runs of one seed on the same units share
their coins.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.canaries import CanaryContext, planted
from secure_fed.learning.audit_pool.number_of_dummies import Count
from secure_fed.learning.data.audit_unit import Pointing, Unit, reading
from secure_fed.learning.data.encode import Encoded, without_aside
from secure_fed.learning.data.fingerprint import content
from secure_fed.learning.data.rows import places_of
from secure_fed.learning.problem import Problem

FEWEST = 10  # units in the pool, on average: fewer would cost data and show nothing
_EXPECTED = 1800  # the most on average, so that hardly ever more than 2,000 are in a pool


@dataclass(frozen=True)
class AuditPool:
    """The audit pool of a run.

    kind: the kind of unit: "example", "person" or "client". members: (units,) whether each unit trains. why: the reason, if
    there is no pool. names, train, persons: of all clients, before the holding out. copies: held-out examples that occur more
    than once, which are no units. of: the origin of the units, "data", or "dummies", which are nobody's data; directions:
    whether units pull the model along directions of their own.
    """

    kind: str
    names: Sequence[str]
    train: Sequence[Sequence[Any]]
    persons: Sequence[Sequence[str]] | None = None
    units: tuple[Unit, ...] = ()
    members: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    why: str = ""
    places: tuple[Place, ...] = ()
    copies: tuple[Place, ...] = ()
    of: str = "data"
    directions: bool = False

    def split(self, inside: NDArray[np.bool_]) -> Split:
        """The clients' training examples if exactly the `inside` units of the pool were members; the order stays."""
        out = [*(place for place, is_in in zip(self.places, inside, strict=True) if not is_in), *self.copies]
        if self.kind == "client":
            gone = {place.client for place in out}
            stay = [client for client in range(len(self.names)) if client not in gone]
            persons = None if self.persons is None else [self.persons[client] for client in stay]
            return Split([self.names[client] for client in stay], [self.train[client] for client in stay], persons)
        kept = [np.ones(len(own), dtype=bool) for own in self.train]
        for place in out:
            kept[place.client][place.at] = False

        def left(every: Sequence[Sequence[Any]]) -> list[Any]:
            return [taken(own, np.flatnonzero(keep)) for own, keep in zip(every, kept, strict=True)]

        return Split(list(self.names), left(self.train), None if self.persons is None else left(self.persons))

    @property
    def digest(self) -> str:
        """SHA-256 over the units and their coins: a resumed run must have the same."""
        coins = zip((unit.name for unit in self.units), self.members.tolist(), strict=True)
        return hashlib.sha256(json.dumps(list(coins)).encode()).hexdigest()

    @property
    def out(self) -> int:
        """The number of units that are not trained on, with their copies."""
        return int((~self.members).sum()) + len(self.copies)

    def held_out(self, *, counted: bool) -> str:
        """The training data that the membership figure costs, in a sentence; empty if it costs none.

        counted: whether to state the number of units, which follows from the data.
        """
        out = self.out
        if not out or self.of == "dummies":
            return ""
        every = {"client": len(self.train), "example": sum(map(len, self.train))}.get(self.kind)
        some = f"{out:,}" + ("" if every is None else f" of {every:,}") if counted else "some"
        return (
            f"{some} {self.kind}s, chosen at random, are not trained on, to measure membership inference"
            " (evaluation.audit_fraction; 0 trains on all)"
        )

    def record(self) -> dict[str, Any]:
        """The pool's record for the owner of a run: every unit, its client, and whether it is a member."""
        coins = zip(self.units, self.members.tolist(), strict=True)
        units = [{"unit": unit.name, "client": unit.client, "member": member} for unit, member in coins]
        return {"kind": self.kind, "why": self.why, "units": units}


@dataclass(frozen=True)
class Place:
    """The place of a unit's examples: its client, and their indices among the client's examples."""

    client: int
    at: NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """A division of the examples: the clients that train, and the examples and persons of each."""

    names: list[str]
    train: list[Sequence[Any]]
    persons: list[Sequence[str]] | None


def hold_out(config: RunConfig, problem: Problem) -> tuple[AuditPool, Problem]:
    """The audit pool, and the problem without the units that the coins held out."""
    held = pool(config, problem)
    if config.evaluation.canaries != "none":
        held = _planted(config, held, problem)
    if not (held.units or held.copies):
        return held, problem
    divided = held.split(held.members)
    if not any(map(len, divided.train)):
        whole = f"{len(held.names)} clients" if held.kind == "client" else f"{sum(map(len, held.train))} examples"
        raise ConfigError(
            f"evaluation.audit_fraction is {config.audit_fraction:g}, and federation.seed = "
            f"{config.federation.seed} happens to hold out all {whole} for the audit, so nothing is left to train on: lower "
            "evaluation.audit_fraction, or set another federation.seed"
        ).about("evaluation.audit_fraction", config.audit_fraction, "lower, so that somebody trains")
    facts = {**problem.facts, "clients": divided.names, "audit": {"units": len(held.units), "digest": held.digest}}
    collate = reading(problem.collate) if held.directions else problem.collate
    return held, replace(
        problem, names=divided.names, train=divided.train, persons=divided.persons, facts=facts, collate=collate
    )


def pool(config: RunConfig, problem: Problem) -> AuditPool:
    """The audit pool of a configuration over a problem, with its coins tossed, before any example is held out."""
    kind = kind_of(config)
    held = AuditPool(kind, problem.names, problem.train, problem.persons)
    share = config.audit_fraction
    if share == 0:
        return replace(held, why="evaluation.audit_fraction is 0, so every unit trained")
    if problem.lazy:
        _require_unasked(config)
        return replace(held, why="clients' examples are read when the clients are drawn, so every unit trained")
    count = sum(problem.units) if kind != "client" else len(problem.names)
    share = min(share, _EXPECTED / count)
    if share * count < FEWEST:
        pool_of = (
            f"evaluation.audit_fraction = {config.audit_fraction:g} would hold fewer than {FEWEST} in the audit pool"
        )
        return replace(
            held, why=f"of {count} units ({kind}s), {pool_of}: too few to measure anything, so every unit trained"
        )
    try:
        candidates = _candidates(held)
    except TypeError as error:
        return replace(held, why=f"the examples cannot be told apart by their content: {error}")
    key = hashlib.sha256(f"audit pool of seed {config.federation.seed}".encode()).digest()
    there = Counter(known for _, _, known in candidates)
    units, members, places, copies = list[Unit](), list[bool](), list[Place](), list[Place]()
    for place, name, known in candidates:
        lot, coin = draws(key, known)
        if lot < share and there[known] == 1:
            units.append(Unit(name, held.names[place.client], taken(held.train[place.client], place.at)))
            members.append(coin < 0.5)
            places.append(place)
        elif lot < share and coin >= 0.5:
            copies.append(place)
    coins = np.array(members, dtype=bool)
    return replace(held, units=tuple(units), members=coins, places=tuple(places), copies=tuple(copies))


def everything(problem: Problem) -> AuditPool:
    """The pool of all examples, each of them a unit and a member."""
    held = AuditPool("example", problem.names, problem.train, problem.persons)
    places, names, _ = zip(*_candidates(held), strict=True)
    units = [
        Unit(name, held.names[place.client], taken(held.train[place.client], place.at))
        for place, name in zip(places, names, strict=True)
    ]
    return replace(held, units=tuple(units), members=np.ones(len(units), dtype=bool), places=places)


def dummies(config: RunConfig, count: Count, names: Sequence[str], units: Sequence[int]) -> AuditPool:
    """The dummies of a federation of these clients, with their coins tossed. units: the number of each client's units.

    Beside clients, dummies are separate clients, "dummy-0007". Beside examples or persons, each is an example at a client,
    "client-0003/dummy-0007", spread over the clients in proportion to their units. A coin is a keyed hash of the name under
    the seed. Neither the coin nor the direction depends on anybody's data.
    """
    kind, seed = kind_of(config), config.federation.seed
    word = "dummy"
    while any(name.startswith(f"{word}-") for name in names):
        word = f"{word}_"  # a user's client has this name
    called = [f"{word}-{number:04d}" for number in range(count.dummies)]
    if kind == "client":
        found = [Unit(name, name, ()) for name in called]
    else:
        hosts = _hosts(count.dummies, units)
        placed = [(names[host], f"{names[host]}/{name}") for host, name in zip(hosts, called, strict=True)]
        found = [Unit(name, client, (Pointing(None, name, seed),)) for client, name in placed]
    key = hashlib.sha256(f"dummies of seed {seed}".encode()).digest()
    coins = np.array([draws(key, unit.name.encode())[1] < 0.5 for unit in found], dtype=bool)
    return AuditPool(
        kind, tuple(names), (), units=tuple(found), members=coins, why=count.why, of="dummies", directions=True
    )


def _hosts(count: int, units: Sequence[int]) -> list[int]:
    """(count,) indices of clients, spread evenly over all their units."""
    if not count:
        return []
    upto = np.cumsum(units)
    at = (np.arange(count) + 0.5) / count * (upto[-1] if len(upto) else 0)
    return [int(host) for host in np.searchsorted(upto, at, side="right")]


def _candidates(held: AuditPool) -> list[tuple[Place, str, bytes]]:
    """Every unit of the data: its place, its name, and the bytes whose hash gives its lot."""
    if held.kind == "client":
        return [
            (Place(client, np.arange(len(held.train[client]))), name, name.encode())
            for client, name in enumerate(held.names)
        ]
    found = []
    for client, name in enumerate(held.names):
        own = held.train[client]
        if held.kind == "person" and held.persons is not None:
            members = places_of(held.persons[client])
            found += [
                (Place(client, np.array(at)), f"{name}/{number}", json.dumps([name, str(person)]).encode())
                for number, (person, at) in enumerate(members.items())
            ]
        else:
            found += [
                (Place(client, np.array([i])), f"{name}/{i}", content(without_aside(own[i]))) for i in range(len(own))
            ]
    return found


def _planted(config: RunConfig, held: AuditPool, problem: Problem) -> AuditPool:
    """The pool with canaries in it, members or not."""
    if not held.units:
        raise ConfigError(
            f"evaluation.canaries = {config.evaluation.canaries!r} has no units to plant them in: {held.why}; raise "
            "evaluation.audit_fraction"
        ).about("evaluation.canaries", config.evaluation.canaries, "an audit pool with units")
    context = CanaryContext.of(config, problem, held.kind)
    units = planted(config.evaluation.canaries, held.units, context)
    train: list[Any] = list(held.train)
    for client in {place.client for place in held.places}:
        train[client] = [train[client][i] for i in range(len(train[client]))]
    for place, unit in zip(held.places, units, strict=True):
        for i, example in zip(place.at.tolist(), unit.examples, strict=True):
            train[place.client][i] = example
    return replace(held, train=train, units=units, directions=config.evaluation.canaries == "direction")


def _require_unasked(config: RunConfig) -> None:
    """Refuse settings that need units of all clients if examples are read only when their client is drawn."""
    settings = config.evaluation
    for name, value, unset in (
        ("audit_fraction", settings.audit_fraction, None),
        ("canaries", settings.canaries, "none"),
    ):
        if value != unset:
            raise ConfigError(
                f"evaluation.{name} is {value!r}, which holds out units of all clients, and a lazy train reads a client's "
                "examples when that client is drawn: give train as a list, or leave the setting out"
            ).about(f"evaluation.{name}", value, "left out with a lazy train")


def kind_of(config: RunConfig) -> str:
    """The kind of unit in the pool: `evaluation.audit_unit`, or with `auto` the unit that privacy protects."""
    chosen, protected = config.evaluation.audit_unit, config.privacy.unit
    return chosen if chosen != "auto" else {"none": "example"}.get(protected, protected)


def draws(key: bytes, content: bytes) -> tuple[float, float]:
    """Two numbers in [0, 1), uniform and independent over keys."""
    said = hashlib.blake2b(content, key=key, digest_size=16).digest()
    return int.from_bytes(said[:8], "big") / 2**64, int.from_bytes(said[8:], "big") / 2**64


def taken(own: Sequence[Any], at: NDArray[np.int64]) -> Any:
    return own.take(at) if isinstance(own, Encoded) else [own[int(i)] for i in at]
