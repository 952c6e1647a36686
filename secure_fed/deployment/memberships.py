"""The federations of a node, their place in its owner's ledger, and their end.

Each federation that a node accepted, or that waits for its owner, has a folder:

    charter.json    the signed charter, as the node got it; its time of change is that of the coordinator's last request
    agreed.json     the owner accepts the federation (`secure-fed node accept`)
    accepted.json   the federation's name, its coordinator and its cost, noted when the node accepted it
    closed.json     the node answers no request of this federation any more
    model/          the final model, and the figure of this node's rows

The owner's ledger is one budget for the data of this node, over all federations (`NodeLedger`). An owner closes a federation
with `secure-fed node release` (`release`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privacy.book import SAME_UNITS
from privacy.errors import BudgetExhausted, LedgerError
from privacy.filters import Budget, Cost
from privacy.ledger import Ledger
from secure_fed.config import PrivacyConfig, RunConfig
from secure_fed.deployment.charter import Charter, CharterError, fingerprint
from secure_fed.deployment.home import CHARTER, FEDERATIONS, LEDGER, Home, HomeError
from secure_fed.deployment.relay import held
from secure_fed.errors import UsageError, plainly
from secure_fed.runs.budget import BUDGET, RunBudget, Subject, heads_at, name_in_ledger, opened, require_room
from secure_fed.runs.directory import ATTENDANCE, CHECKPOINT, OWN_RESULT, PRIVATE
from secure_fed.runs.durable import atomic_write

if TYPE_CHECKING:
    from privacy.plan import Plan  # it loads an accountant
    from secure_fed.learning.problem import Problem

AGREED, ACCEPTED, CLOSED = "agreed.json", "accepted.json", "closed.json"
MODEL = "model"  # the folder of the final model
_MOST_UNUSED = 20  # federations that had no round yet: a coordinator may found any number, of 16 MB each
_TURN = 8  # bytes of one turn in the record of rounds
_SHORT = 12  # digits of a charter's digest, enough to tell federations apart


class NotAgreedError(UsageError):
    """The node's owner has not accepted the federation, or not yet."""


class NotGivenBackError(UsageError):
    """A reservation stays, since the node made a private step for it, or may have."""


@dataclass(frozen=True)
class Membership:
    """A federation of this node. noted: what accepted.json says; empty where an earlier version accepted it."""

    folder: Path
    noted: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Membership:
        noted: Any = {}
        if (path := folder / ACCEPTED).exists():
            with plainly(HomeError, f"{path} is damaged", "remove it: it only informs the owner"):
                noted = json.loads(path.read_text(encoding="utf-8"))
        return cls(folder, noted if isinstance(noted, dict) else {})

    @property
    def digest(self) -> str:
        return self.folder.name[:_SHORT]

    @cached_property
    def charter(self) -> Charter | None:
        """None where an earlier version accepted the federation, or where the file is damaged."""
        with suppress(OSError, CharterError):
            return Charter.verified((self.folder / CHARTER).read_bytes())
        return None

    @property
    def name(self) -> str:
        return str(self.noted.get("name", self.charter.name if self.charter else ""))

    @property
    def closed(self) -> bool:
        return closed(self.folder)

    @property
    def agreed(self) -> bool:
        """Whether the owner, or a node that leaves it to its policy, has accepted it."""
        noted = any((self.folder / name).exists() for name in (AGREED, ACCEPTED))
        return noted or bool(name_in_ledger(self.folder))

    @property
    def waiting(self) -> bool:
        """Whether the owner has still to accept it."""
        return (self.folder / CHARTER).exists() and not self.agreed and not self.closed

    @property
    def rounds(self) -> int:
        """The number of rounds in which this node took part."""
        with suppress(OSError):
            return (self.folder / ATTENDANCE).stat().st_size // _TURN
        return 0

    @property
    def last_contact(self) -> str | None:
        """The time of the coordinator's last request of this federation."""
        with suppress(OSError):
            return _now((self.folder / CHARTER).stat().st_mtime)
        return None

    @property
    def figure(self) -> Any:
        """What the final model tells of which of this node's rows trained; None if it was not measured."""
        with suppress(OSError, ValueError, AttributeError):
            figures = json.loads((self.folder / MODEL / PRIVATE / OWN_RESULT).read_text(encoding="utf-8"))
            return figures.get("membership_of_rows")
        return None

    def close(self) -> None:
        """Close the federation here, on disk when this returns."""
        if not self.closed:
            atomic_write(self.folder / CLOSED, json.dumps({"time": _now()}) + "\n", private=True)

    def step(self, ledger: Ledger, run: str) -> str:
        """Why this node may have made a private step; "" if it certainly made none. run: its name in the ledger."""
        if charged := sum(ledger.charged(run).values()):
            return f"this node has charged {charged} releases of it"
        try:
            if (self.folder / ATTENDANCE).stat().st_size:
                return "this node took part in a round of it, or was about to"
        except FileNotFoundError:
            return (
                f"{self.folder / ATTENDANCE}, the record of its rounds, is missing, so that a step may have been made"
            )
        return ""

    def facts(self, ledger: Ledger | None) -> dict[str, Any]:
        """For the owner: the federation, its cost, and how much of it is reserved and charged in the ledger."""
        run = name_in_ledger(self.folder)
        cost = ledger.reserved(run) if ledger and run else None
        return {
            "digest": self.digest,
            "name": self.name,
            "coordinator": self.noted.get("coordinator"),
            "accepted": self.noted.get("time"),
            "cost": self.noted.get("cost"),
            "reserved": None if cost is None else {"epsilon": cost.epsilon, "delta": cost.delta},
            "charged": sum(ledger.charged(run).values()) if ledger and run else 0,
            "rounds": self.rounds,
            "of_rounds": self.charter.config.federation.rounds if self.charter else None,
            "last_contact": self.last_contact,
            "model": str(self.folder / MODEL) if (self.folder / MODEL / CHECKPOINT).exists() else None,
            "membership_of_rows": self.figure,
            "charter": [*self.charter.described()] if self.charter else [],
            "waiting": self.waiting,
            "closed": self.closed,
            "given_back": bool(ledger and run and ledger.closed(run)),
        }


def memberships(home: Home) -> list[Membership]:
    """All federations of the node, in the order of their folders' names."""
    folders = sorted((home.folder / FEDERATIONS).glob("*"))
    return [
        Membership.of(one)
        for one in folders
        if any((one / name).exists() for name in (CHARTER, ACCEPTED)) or name_in_ledger(one)
    ]


def require_few(home: Home, charter: Charter) -> None:
    """NotAgreedError for a new federation at a node that keeps many in which it took part in no round."""
    kept = memberships(home)
    unused = [one for one in kept if not (one.rounds or one.closed)]
    if len(unused) >= _MOST_UNUSED and home.federation(charter.digest) not in [one.folder for one in kept]:
        raise NotAgreedError(
            f"this node has {len(unused)} federations without a round already: its owner closes one with `secure-fed node "
            "release`"
        )


def require_agreed(home: Home, charter: Charter, content: bytes) -> None:
    """NotAgreedError unless the owner has accepted the federation. The charter is kept meanwhile, for the owner to read.

    content: the signed file. Only a charter that names this node is kept.
    """
    membership = Membership.of(home.federation(charter.digest))
    if membership.agreed:
        return
    charter.number(home.identity.public)
    keep(membership.folder, content)
    raise NotAgreedError(f"this node's owner has not accepted the federation {charter.name!r} yet")


def agree(home: Home, which: str) -> Membership:
    """Accept the federation with this name or digest for the node's owner. The coordinator's next offer is then accepted."""
    membership = _chosen(home, which)
    if membership.closed:
        raise NotAgreedError(
            f"the federation {which!r:.80} is closed at this node for good: it has to be founded again"
        )
    if membership.charter is None:
        raise NotAgreedError(f"{membership.folder / CHARTER} cannot be read: remove it, and wait for the next offer")
    if not membership.agreed:
        atomic_write(membership.folder / AGREED, json.dumps({"time": _now()}) + "\n", private=True)
    return membership


def keep(folder: Path, content: bytes) -> None:
    """Keep a signed charter in the folder of its federation."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / CHARTER).exists():
        atomic_write(folder / CHARTER, content, private=True)


def note_contact(home: Home, charter: Charter) -> None:
    """Note that the coordinator has just sent a request of this federation. A failure stops nothing."""
    with suppress(OSError):
        os.utime(home.federation(charter.digest) / CHARTER)


def note_accepted(folder: Path, charter: Charter, cost: Cost | None) -> None:
    """Note the federation that the node accepts. cost: None without a guarantee."""
    if not (folder / ACCEPTED).exists():
        spent = None if cost is None else {"epsilon": cost.epsilon, "delta": cost.delta}
        noted = {"name": charter.name, "coordinator": fingerprint(charter.coordinator), "cost": spent, "time": _now()}
        atomic_write(folder / ACCEPTED, json.dumps(noted, indent=1) + "\n", private=True)


def closed(folder: Path) -> bool:
    """Whether the owner has closed the federation of this folder."""
    return (folder / CLOSED).exists()


def _now(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


@dataclass(frozen=True)
class FederationCost:
    """The cost of a federation, and the budget left before it. reserved: this cost is reserved already."""

    total: Cost  # of its whole plan
    left: Cost
    reserved: bool

    def __str__(self) -> str:
        if self.reserved:
            return f"{words(self.total)} are reserved for it"
        return f"it would cost {words(self.total)}, of {words(self.left)} left; its first round reserves them"


@dataclass(frozen=True)
class NodeLedger:
    """The owner's ledger, which no server can reset, and the present limits of the owner's policy.

    - A charter determines only the cost. The ledger's file, its data set, and the file with its newest head are the owner's.
    - A federation that the node accepts reserves nothing. Its whole plan is reserved in one transaction before the node's first
      answer to a round, and so before any private step; a plan that does not fit by then is refused.
    - The ledger is about the same people, whatever their rows. So federations before and after a change of the data add up.
    - All federations together cost at most the limits of the ledger, fixed when it was created, before the first answer of all;
      and at most the policy's present limits, which the owner may lower at any time. The ledger's limits hold for any number of
      processes; the policy's are compared just before, by the one agent that has the node's folder.
    """

    path: Path
    epsilon: float
    delta: float

    @classmethod
    def of(cls, home: Home) -> NodeLedger:
        return cls(home.folder / LEDGER, home.policy.most_epsilon, home.policy.most_delta)

    def require_room(self, config: RunConfig, plan: Plan, problem: Problem, folder: Path) -> FederationCost:
        """The cost of the federation whose state is in `folder`. BudgetExhausted if it does not fit now. Writes nothing."""
        if self.path.exists():
            return self._checked(self.opened(), config, plan, problem, folder)[0]
        self._require_unused()
        return self._require_within(None, plan, "")

    @contextmanager
    def reserved(self, config: RunConfig, plan: Plan, problem: Problem, folder: Path) -> Iterator[RunBudget]:
        """The reserved budget of the federation whose state is in `folder`. BudgetExhausted if it does not fit.

        The ledger is made for the node's first reservation.
        """
        if not self.path.exists():
            self._require_unused()
            Ledger.create(self.path, data_set="this node", epsilon=self.epsilon, delta=self.delta)
            self.path.chmod(0o600)
        _, privacy, subject = self._checked(self.opened(), config, plan, problem, folder)
        with opened(privacy, plan, folder, subject) as budget:
            yield budget

    def opened(self) -> Ledger:
        """The ledger. LedgerError if it is missing, damaged, or an older copy."""
        return Ledger.open(self.path, heads=heads_at(""))

    def limits(self, ledger: Ledger | None) -> tuple[float, float]:
        """The most epsilon and delta of all federations: the policy's or the ledger's own, whichever is lower."""
        own = (None, None) if ledger is None else (ledger.epsilon, ledger.delta)
        epsilon, delta = (math.inf if fixed is None else fixed for fixed in own)
        return min(self.epsilon, epsilon), min(self.delta, delta)

    def _require_unused(self) -> None:
        for record in self.path.parent.glob(f"{FEDERATIONS}/*/{PRIVATE}/{BUDGET}"):
            raise LedgerError(
                f"{self.path} is missing, and {record} has reserved in it: restore {self.path.name} from a backup, or make a "
                "new node, with most_epsilon lowered by what its data have spent"
            )

    def _checked(
        self, ledger: Ledger, config: RunConfig, plan: Plan, problem: Problem, folder: Path
    ) -> tuple[FederationCost, PrivacyConfig, Subject]:
        """The cost, and the settings and the subject with which the federation reserves there."""
        privacy = replace(
            config.privacy,
            ledger=str(self.path),
            data_set=ledger.data_set,
            unit_name="",
            ledger_heads="",
            on_exhausted="refuse",
        )
        subject = replace(Subject.of(config, problem), members=SAME_UNITS)
        cost = self._require_within(ledger, plan, name_in_ledger(folder))
        require_room(privacy, plan, folder, subject)
        return cost, privacy, subject

    def _require_within(self, ledger: Ledger | None, plan: Plan, run: str) -> FederationCost:
        """Refuse a federation that would bring the total above a limit. run: its name if it has reserved."""
        before = ledger.reserved(run) if ledger and run else None
        cost = before or plan.cost(orders=ledger.orders if ledger else ())
        spent = ledger.spent() if ledger else Cost(0.0, 0.0)
        fixed = ledger.budget if ledger else Budget(self.epsilon, self.delta)
        policy = replace(fixed, epsilon=self.epsilon, delta=self.delta)

        def above(limits: Budget) -> list[str]:
            names = ledger.exceeded(run, cost, limits) if ledger else limits.exceeded([cost])
            # An RDP filter has one limit, for epsilon at a given delta.
            said = {"delta": f"delta {limits.delta}", "RDP": f"epsilon {limits.epsilon} at delta {limits.delta}"}
            return [said.get(name, f"epsilon {limits.epsilon}") for name in names]

        beyond_ledger = above(fixed) if ledger else []
        if beyond := beyond_ledger or above(policy):
            remedy = (
                f"limit of {self.path.name}, which a higher one in node.toml does not raise: take no part, or give back with "
                "`secure-fed node release` what another federation has reserved and not used"
                if beyond_ledger
                else "limit of the policy in node.toml: raise it there, or take no part"
            )
            raise BudgetExhausted(
                f"this federation costs {words(cost)}, {words(spent)} are reserved in {self.path}, and all together may not "
                f"exceed {' and '.join(beyond)}, the {remedy}"
            )
        epsilon, delta = self.limits(ledger)
        left = Cost(max(0.0, epsilon - spent.epsilon), max(0.0, delta - spent.delta))
        return FederationCost(cost, left, reserved=before is not None)


def words(cost: Cost) -> str:
    """A cost in words."""
    return f"epsilon {cost.epsilon:.4g} and delta {cost.delta:.3g}"


def release(home: Home, which: str) -> str:
    """Close the federation with this name or digest, and give back a reservation for which the node made no private step.

    Returns what was done, in a sentence.
    NotGivenBackError, and nothing is changed, if the node may have made one. In this order:

    1. No agent runs for the node, and none can start (the folder's lock), so no request is answered meanwhile.
    2. The node's two records of its steps are empty: the charges in its ledger, and the rounds in `attendance`. Each is on disk
       before the step that it records. A record that a kill left without a step counts as a step, and so does a missing record.
    3. closed.json is on disk. From here on a request of this federation is refused, however late or often it arrives.
    4. The ledger gets a row that closes the run (`privacy.ledger.Ledger.close`), which it refuses for a run with any charge.

    A kill between two of them leaves the reservation in place, or a closed federation; the same command finishes its work.
    Where closed.json is lost with an older copy of the folder, the ledger's row still refuses every reservation and charge of
    that run.
    """
    with held(home.folder):
        membership = _chosen(home, which)
        run = name_in_ledger(membership.folder)
        ledger = NodeLedger.of(home).opened() if run else None
        cost = ledger.reserved(run) if ledger else None
        named = f"{membership.name or 'the federation'} ({membership.digest})"
        if ledger and cost and (why := membership.step(ledger, run)):
            raise NotGivenBackError(
                f"{words(cost)} of {named} stay spent, since {why}; nothing was changed, and to take no further part, remove "
                "its coordinator from coordinators in node.toml"
            )
        membership.close()
        if ledger and cost:
            ledger.close(run)
        back = "nothing is reserved for it" if cost is None else f"{words(cost)} are given back"
        return f"{named} is closed at this node, and {back}"


def _chosen(home: Home, which: str) -> Membership:
    every = memberships(home)
    digits = which.lower()
    found = [one for one in every if which and which == one.name]
    found = found or [one for one in every if len(digits) >= 4 and one.folder.name.startswith(digits[:32])]
    if not found:
        raise HomeError(
            f"{home.folder} has no federation {which!r:.80}: give a name, or at least 4 digits of a digest, that "
            "`secure-fed node status` prints"
        )
    if len(found) > 1:
        digests = ", ".join(one.digest for one in found)
        raise HomeError(
            f"{len(found)} federations of {home.folder} are called {which!r:.80}: give one's digest, {digests}"
        )
    return found[0]
