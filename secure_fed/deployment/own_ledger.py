"""A node's place in its owner's ledger: one budget for its data, over all federations.

- A charter determines only the cost. The ledger's file, its data set, and the file with its newest head are the owner's.
- The ledger is about the same people, whatever their rows. So federations before and after a change of the data add up.
- All federations together cost at most the limits of the ledger, fixed when it was created, and at most the policy's present
  limits, which the owner may lower at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from privacy.errors import BudgetExhausted, LedgerError
from privacy.ledger import Ledger
from privacy.units import SAME_UNITS
from secure_fed.config import PrivacyConfig, RunConfig
from secure_fed.deployment.home import FEDERATIONS
from secure_fed.learning.problem import Problem
from secure_fed.runs.budget import BUDGET, RunBudget, name_in_ledger, opened, require_room
from secure_fed.runs.budget_terms import Subject
from secure_fed.runs.directory import PRIVATE
from secure_fed.runs.ledger_heads import heads_at

if TYPE_CHECKING:
    from privacy.run_plan import Plan  # it loads an accountant


@dataclass(frozen=True)
class OwnLedger:
    """The owner's ledger, which no server can reset, and the present limits of the owner's policy (None: no limit)."""

    path: Path
    epsilon: float | None = None
    delta: float | None = None

    @contextmanager
    def reserved(self, config: RunConfig, plan: Plan, problem: Problem, folder: Path) -> Iterator[RunBudget]:
        """The reserved budget of the federation whose state is in `folder`. BudgetExhausted if it does not fit."""
        self.require_room(config, plan, problem, folder)
        with opened(self._settings(config), plan, folder, _subject(config, problem)) as budget:
            yield budget

    def require_room(self, config: RunConfig, plan: Plan, problem: Problem, folder: Path) -> None:
        """BudgetExhausted if the federation whose state is in `folder` does not fit; it reserves nothing."""
        self._require_within(self._opened(), plan, name_in_ledger(folder))
        require_room(self._settings(config), plan, folder, _subject(config, problem))

    def _settings(self, config: RunConfig) -> PrivacyConfig:
        """The charter's privacy settings with the owner's ledger."""
        data_set = self._opened().data_set
        return replace(
            config.privacy,
            ledger=str(self.path),
            data_set=data_set,
            unit_name="",
            ledger_heads="",
            on_exhausted="refuse",
        )

    def _opened(self) -> Ledger:
        """The ledger, made for the node's first federation. LedgerError if one that a federation reserved in is missing."""
        if not self.path.exists():
            self._require_unused()
            Ledger.create(self.path, data_set="this node", epsilon=self.epsilon, delta=self.delta)
            self.path.chmod(0o600)
        return Ledger.open(self.path, heads=heads_at(""))

    def _require_unused(self) -> None:
        for record in self.path.parent.glob(f"{FEDERATIONS}/*/{PRIVATE}/{BUDGET}"):
            raise LedgerError(
                f"{self.path} is missing, and {record} has reserved in it: restore {self.path.name} from a backup, or make a "
                "new node, with most_epsilon lowered by what its data have spent"
            )

    def _require_within(self, ledger: Ledger, plan: Plan, run: str) -> None:
        """Refuse a federation that would bring the total above the policy's limits. run: its name if it has reserved."""
        limits = replace(ledger.budget, epsilon=self.epsilon, delta=self.delta)
        cost = (ledger.reserved(run) if run else None) or plan.cost(orders=ledger.orders)
        if exceeded := ledger.exceeded(run, cost, limits):
            spent = ledger.spent()
            above = " and ".join(map(self._limit, exceeded))
            raise BudgetExhausted(
                f"this federation costs epsilon {cost.epsilon:.4g} and delta {cost.delta:.3g}, {self.path} has reserved "
                f"epsilon {spent.epsilon:.4g} and delta {spent.delta:.3g} in all, and the total may not exceed {above} of the "
                "policy in node.toml: raise this limit there, or take no part"
            )

    def _limit(self, name: str) -> str:
        """A limit of the policy in words; an RDP filter has one limit, for epsilon at a given delta."""
        if name == "delta":
            return f"most_delta = {self.delta}"
        return f"most_epsilon = {self.epsilon}" + (f" at most_delta = {self.delta}" if name == "RDP" else "")


def _subject(config: RunConfig, problem: Problem) -> Subject:
    """The node's data as the subject of a reservation: the same people, whatever their rows."""
    return replace(Subject.of(config, problem), members=SAME_UNITS)
