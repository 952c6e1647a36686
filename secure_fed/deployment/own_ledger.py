"""A node's place in its owner's ledger: one budget for its data, over all federations.

- A charter determines only the cost. The ledger's file, its data set, and the file with its newest head are the owner's.
- A federation that the node accepts reserves nothing. Its whole plan is reserved in one transaction before the node's first
  answer to a round, and so before any private step; a plan that does not fit by then is refused.
- The ledger is about the same people, whatever their rows. So federations before and after a change of the data add up.
- All federations together cost at most the limits of the ledger, fixed when it was created, before the first answer of all; and
  at most the policy's present limits, which the owner may lower at any time. The ledger's limits hold for any number of
  processes; the policy's are compared just before, by the one agent that has the node's folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from privacy.book import SAME_UNITS
from privacy.errors import BudgetExhausted, LedgerError
from privacy.filters import Budget, Cost
from privacy.ledger import Ledger
from secure_fed.config import PrivacyConfig, RunConfig
from secure_fed.deployment.home import FEDERATIONS, LEDGER, Home
from secure_fed.runs.budget import BUDGET, RunBudget, Subject, heads_at, name_in_ledger, opened, require_room
from secure_fed.runs.directory import PRIVATE

if TYPE_CHECKING:
    from privacy.plan import Plan  # it loads an accountant
    from secure_fed.learning.problem import Problem  # it loads torch


@dataclass(frozen=True)
class Room:
    """The cost of a federation, and the budget left before it. reserved: this cost is reserved already."""

    cost: Cost
    left: Cost
    reserved: bool

    def __str__(self) -> str:
        if self.reserved:
            return f"{words(self.cost)} are reserved for it"
        return f"it would cost {words(self.cost)}, of {words(self.left)} left; its first round reserves them"


@dataclass(frozen=True)
class OwnLedger:
    """The owner's ledger, which no server can reset, and the present limits of the owner's policy."""

    path: Path
    epsilon: float
    delta: float

    @classmethod
    def of(cls, home: Home) -> OwnLedger:
        return cls(home.folder / LEDGER, home.policy.most_epsilon, home.policy.most_delta)

    def require_room(self, config: RunConfig, plan: Plan, problem: Problem, folder: Path) -> Room:
        """The room for the federation whose state is in `folder`. BudgetExhausted if it does not fit now. Writes nothing."""
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
    ) -> tuple[Room, PrivacyConfig, Subject]:
        """The room in the ledger, and the settings and the subject with which the federation reserves there."""
        privacy = replace(
            config.privacy,
            ledger=str(self.path),
            data_set=ledger.data_set,
            unit_name="",
            ledger_heads="",
            on_exhausted="refuse",
        )
        subject = replace(Subject.of(config, problem), members=SAME_UNITS)
        room = self._require_within(ledger, plan, name_in_ledger(folder))
        require_room(privacy, plan, folder, subject)
        return room, privacy, subject

    def _require_within(self, ledger: Ledger | None, plan: Plan, run: str) -> Room:
        """Refuse a federation that would bring the total above a limit. run: its name if it has reserved."""
        held = ledger.reserved(run) if ledger and run else None
        cost = held or plan.cost(orders=ledger.orders if ledger else ())
        spent = ledger.spent() if ledger else Cost(0.0, 0.0)
        fixed = ledger.budget if ledger else Budget(self.epsilon, self.delta)
        policy = replace(fixed, epsilon=self.epsilon, delta=self.delta)

        def above(limits: Budget) -> list[str]:
            names = ledger.exceeded(run, cost, limits) if ledger else limits.exceeded([cost])
            return [_limit(name, limits) for name in names]

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
        return Room(cost, left, reserved=held is not None)


def words(cost: Cost) -> str:
    """A cost in words."""
    return f"epsilon {cost.epsilon:.4g} and delta {cost.delta:.3g}"


def _limit(name: str, limits: Budget) -> str:
    """A limit in words; an RDP filter has one limit, for epsilon at a given delta."""
    if name == "delta":
        return f"delta {limits.delta}"
    return f"epsilon {limits.epsilon}" + (f" at delta {limits.delta}" if name == "RDP" else "")
