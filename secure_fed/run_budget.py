"""A run's place in a ledger: found or made when it starts, found again when it goes on.

    budget.json       the run's name in the ledger, the ledger's path, and the ledger's end when the run last wrote to it
    budget.sqlite     the ledger, where `privacy.ledger` names none: its limit is the run's own epsilon

A run holds its whole plan before its first round, or does not start. Each charge is followed by a new `budget.json`, so that a
ledger which has been cut or rewritten since is seen when the run goes on.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from privacy.account import Account
from privacy.errors import BudgetExhausted, LedgerError, PrivacyError
from privacy.ledger import Budget, Cost, Head, Ledger
from secure_fed.budget_terms import Subject, require_same_kind, terms_of
from secure_fed.config.sections import PrivacyConfig
from secure_fed.durable import atomic_write
from secure_fed.errors import RunDirectoryError
from secure_fed.run_dir import read_object
from secure_fed.run_store import CHECKPOINT, RELEASED

if TYPE_CHECKING:
    from secure_fed.privacy_plan import Plan

BUDGET, OWN_LEDGER = "budget.json", "budget.sqlite"


@dataclass(frozen=True)
class RunBudget:
    """The account of one run, and the ledger that it is in."""

    run: str
    ledger: Ledger
    account: Account
    plan: Plan

    def allowance(self, who: str, wanted: int, round_: int) -> int:
        """Charge what of `wanted` releases is left for this client, and say how many that is."""
        granted = min(wanted, self.account.left(who))
        if granted:
            self.account.charge(granted, who, {"round": round_})
        return granted

    def charge(self, round_: int, pass_name: str) -> None:
        """Charge one release of the federation."""
        self.account.charge(1, "", {"round": round_, "pass": pass_name})

    @property
    def charged(self) -> dict[str, int]:
        """The releases charged so far, by client, or under "" for the federation."""
        return self.ledger.charged(self.run)


@dataclass
class Purse:
    """What the parties of a federation pay from: the budget of the run that is going on."""

    budget: RunBudget | None = None

    def charge(self, round_: int, pass_name: str) -> None:
        self._open().charge(round_, pass_name)

    def allowance(self, who: str, wanted: int, round_: int) -> int:
        return self._open().allowance(who, wanted, round_)

    def close(self) -> None:
        """When a run ends, nothing is paid any more."""
        self.budget = None

    def _open(self) -> RunBudget:
        if self.budget is None:
            raise PrivacyError("nothing may be released outside a run: its budget is opened by Federation.run")
        return self.budget


def charges_nothing(round_: int, pass_name: str) -> None:
    """Of a federation that releases nothing as a whole: without privacy, or where every client accounts for itself."""


def require_room(privacy: PrivacyConfig, plan: Plan, run_dir: Path | None, subject: Subject) -> Plan:
    """The plan, shortened where `on_exhausted` says so; refused, with nothing written, if the ledger does not hold it.

    A run that has reserved already has its place.
    """
    path, noted = Path(privacy.ledger), _noted(run_dir) if run_dir else None
    if not privacy.ledger:
        return plan
    if not path.parent.is_dir():
        raise LedgerError(
            f"privacy.ledger is to be in {path.parent}, which is no folder: make it, or name another place"
        )
    if not path.exists():
        budget = _new_budget(privacy, path)
        return _fitted(plan, privacy, lambda cost: budget.holds([cost]), f"the new ledger {path} is to allow", budget)
    ledger = Ledger.open(path)
    for name, asked, held in (
        ("epsilon", privacy.budget_epsilon, ledger.epsilon),
        ("delta", privacy.budget_delta, ledger.delta),
    ):
        if asked is not None and asked != held:
            raise LedgerError(
                f"privacy.budget_{name} is {asked:g}, and {path} was made with {held}: leave the setting out"
            )
    if noted and ledger.reserved(noted["run"]) is not None:
        return plan
    ledger.require_data(subject.data, privacy.data_set or None)
    require_same_kind(ledger, privacy, plan, subject)
    spent = f"the ledger {path} of {ledger.data_set!r} has spent epsilon {ledger.spent().epsilon:.4g} of"
    return _fitted(plan, privacy, lambda cost: ledger.admits("a new run", cost), spent, ledger.budget, ledger.orders)


def _fitted(
    plan: Plan,
    privacy: PrivacyConfig,
    admits: Callable[[Cost], bool],
    said: str,
    budget: Budget,
    orders: Sequence[float] = (),
) -> Plan:
    """The plan, or as much of it as is admitted where stopping early was chosen."""
    if admits(plan.cost(orders=orders)):
        return plan
    fits, exceeds = 0, 0 if plan.limits or privacy.on_exhausted != "stop" else plan.releases
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        fits, exceeds = (middle, exceeds) if admits(plan.cost(middle, orders)) else (fits, middle)
    if fits >= plan.passes:
        return replace(plan, releases=fits - fits % plan.passes)
    cost = plan.cost()
    raise BudgetExhausted(
        f"the plan costs epsilon {cost.epsilon:.4g} at delta {cost.delta:.3g}, and {said} {budget.epsilon} at delta "
        f"{budget.delta}: lower privacy.epsilon or federation.rounds, or raise privacy.noise_multiplier"
    )


@contextmanager
def opened(privacy: PrivacyConfig, plan: Plan, run_dir: Path | None, subject: Subject) -> Iterator[RunBudget]:
    """The budget of the run in `run_dir`, reserved; without a run directory, of a run whose ledger is gone with it."""
    if run_dir is None:
        with TemporaryDirectory(prefix="secure-fed-") as folder:
            yield _reserved(privacy, plan, Path(folder), subject)
    else:
        yield _reserved(privacy, plan, run_dir, subject)


def _reserved(privacy: PrivacyConfig, plan: Plan, folder: Path, subject: Subject) -> RunBudget:
    noted = _noted(folder)
    ledger = _ledger(privacy, folder, noted)
    run = noted["run"] if noted is not None else f"{folder.name}-{uuid.uuid4().hex[:8]}"

    def keep(head: Head) -> None:
        note = {"run": run, "ledger": str(ledger.path), "head": head.to_dict()}
        atomic_write(folder / BUDGET, json.dumps(note, indent=2) + "\n")

    require_same_kind(ledger, privacy, plan, subject)
    if ledger.reserved(run) is None:
        keep(ledger.head)
        named = privacy.data_set if privacy.ledger and privacy.data_set else None
        cost = plan.cost(orders=ledger.orders)
        terms = terms_of(privacy, plan, subject)
        keep(ledger.reserve(run, cost, data_digest=subject.data, terms=terms, data_set=named))

    if not plan.limits:
        plan = replace(plan, releases=_reserved_releases(ledger, run))

    def longer(count: int) -> Cost:
        cost = plan.cost(count, ledger.orders)
        if privacy.epsilon is not None and cost.epsilon > privacy.epsilon:
            raise BudgetExhausted(
                f"release {count} would bring epsilon to {cost.epsilon:.4g}, above privacy.epsilon = {privacy.epsilon:g}: "
                f"{plan.releases} were planned, and what an interrupted round charged counts"
            )
        return cost

    account = Account(ledger, run, plan.limit, None if plan.limits else longer, keep)
    return RunBudget(run, ledger, account, plan)


def _ledger(privacy: PrivacyConfig, folder: Path, noted: Mapping[str, Any] | None) -> Ledger:
    path = Path(privacy.ledger) if privacy.ledger else folder / OWN_LEDGER
    head = None if noted is None else Head.from_dict(noted["head"])
    if path.exists() or head is not None:
        return Ledger.open(path, head=head)
    if not privacy.ledger:  # the run's own
        limit = (privacy.epsilon, privacy.delta) if privacy.epsilon is not None else (None, None)
        return Ledger.create(path, data_set=folder.name or "run", epsilon=limit[0], delta=limit[1])
    budget = _new_budget(privacy, path)
    return Ledger.create(path, data_set=privacy.data_set or path.stem, epsilon=budget.epsilon, delta=budget.delta)


def _new_budget(privacy: PrivacyConfig, path: Path) -> Budget:
    if privacy.budget_epsilon is None:
        raise LedgerError(
            f"there is no ledger {path}: make it with `secure-fed budget create`, or set privacy.budget_epsilon and "
            "privacy.budget_delta"
        )
    return Budget.fixed(privacy.budget_epsilon, privacy.budget_delta, "basic")


def _reserved_releases(ledger: Ledger, run: str) -> int:
    """How many releases the run reserved: fewer than its settings plan where the ledger had room for fewer."""
    reservations = [row for row in ledger.rows() if row.kind == "reserve" and row.run == run]
    return int(reservations[-1].body["terms"]["releases"])


def _noted(folder: Path) -> dict[str, Any] | None:
    """What the run wrote down of its ledger, if it came to that; without it a run that has released cannot go on."""
    if not (folder / BUDGET).exists():
        if (folder / CHECKPOINT).exists() or (folder / RELEASED).exists():
            raise RunDirectoryError(
                f"{folder} has released, but {BUDGET}, which says from what budget, is missing: restore it"
            )
        return None
    noted = read_object(folder, BUDGET)
    own = Path(str(noted.get("ledger", "")))
    if own.name == OWN_LEDGER and own.parent != folder.absolute():
        raise RunDirectoryError(
            f"{folder} was moved or copied from {own.parent}, and what is gone on with in two places is released twice: "
            "move it back"
        )
    if not (isinstance(noted.get("run"), str) and isinstance(noted.get("head"), dict)):
        raise RunDirectoryError(
            f"{folder / BUDGET} is damaged: it does not say what the run is called in its ledger; restore it"
        )
    return noted
