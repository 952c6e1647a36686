"""A run's place in a ledger: found when it starts, and found again when it resumes.

    private/budget.json     the run's name in the ledger, the ledger's path, and its head when the run last wrote to it
    private/budget.sqlite   the ledger, where `privacy.ledger` names none: its limit is the run's own epsilon

A ledger contains digests of the data and the times of its charges, which reveal how long rounds took.

A ledger that runs share is created only by `secure-fed budget create`: a missing one is an error, never a fresh budget.

A run reserves its whole plan before its first round, or does not start. Each charge is followed by a new `budget.json`, so that
a resumed run detects a ledger that was cut or rewritten since. For a run that starts anew, the second place of ledgers' newest
heads does this (`heads_at`): one file per user, outside every ledger.

    require_room   before anything is written: the plan, shortened or refused if it does not fit the ledger
    opened         the reservation, and the account that the run charges
    give_back      closes a run that has made no release

Needs no torch.
"""

from __future__ import annotations

import json
import os
import shlex
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from privacy.book import Unit
from privacy.errors import BudgetExhausted, LedgerError, TurnPassed
from privacy.filters import Cost
from privacy.ledger import Account, Ledger
from privacy.ledger_file import Head, Heads
from privacy.statement import rounded_up
from secure_fed.config import PrivacyConfig, RunConfig
from secure_fed.errors import RunDirectoryError, UsageError
from secure_fed.runs.directory import CHECKPOINT, PRIVATE, RELEASED, made_private, private_part, read_object
from secure_fed.runs.durable import atomic_write

if TYPE_CHECKING:
    from privacy.plan import Plan
    from secure_fed.learning.problem import Problem

BUDGET, OWN_LEDGER = "budget.json", "budget.sqlite"
_CHARGED_HERE = "charged_here"  # a term of a reservation


class NotClosedError(UsageError):
    """A reservation stays, since its run has made a release, or may have."""


@dataclass(frozen=True)
class Subject:
    """The subject of a run's costs: digests of the data and of which rows belong to which unit, and the unit's name and kind.

    The digests are unkeyed, and only for the ledger, which stores them under its key.
    """

    data: str
    members: str
    name: str
    kind: str

    @classmethod
    def of(cls, config: RunConfig, problem: Problem) -> Subject:
        return cls(problem.data_digest, problem.unit_digest, unit_name(config), config.privacy.unit)

    def unit(self, plan: Plan) -> Unit:
        """The ledger's unit: its neighbours follow from the plan's sampling and the place of its noise."""
        return Unit(self.name, self.kind, self.members, plan.release.adjacency)


def unit_name(config: RunConfig) -> str:
    """The name of the protected unit in a ledger: the user's, else from the column that identifies units."""
    privacy = config.privacy
    columns = {"client": config.data.client, "person": privacy.person_column}
    return privacy.unit_name or columns.get(privacy.unit) or privacy.unit


@dataclass
class RunBudget:
    """The account of one run, and its ledger.

    turn: in a public order, the current round of this process and the number of its passes so far. made: the releases charged
    to the federation, those of interrupted rounds included; None before this process has charged any.
    """

    run: str
    ledger: Ledger
    account: Account
    plan: Plan
    turn: tuple[int, int] = (-1, 0)
    made: int | None = None

    @property
    def begun(self) -> int:
        """In a public order, the round after the last that any process has charged; rounds lost before that are not charged."""
        return self.account.next_round()

    def covers(self, round_: int) -> bool:
        """Whether the plan of a public order covers this round: its cost is that of its first rounds, lost ones included."""
        return self.plan.passes * (round_ + 1) <= self.plan.releases

    def allowance(self, who: str, wanted: int, round_: int) -> int:
        """Charge up to `wanted` releases to this client, as many as it has left, and return that number."""
        granted = min(wanted, self.account.left(who))
        if granted:
            self.account.charge(granted, who, {"round": round_})
        return granted

    def charge(self, round_: int, pass_name: str) -> None:
        """Charge one release of the federation; in a public order, all passes of a round with its first."""
        if self.plan.exposures:
            self._take_turn(round_, pass_name)
        else:
            self.made = self.account.charge(1, "", {"round": round_, "pass": pass_name})

    def attend(self, round_: int) -> None:
        """Charge a round that a member on a machine of its own is about to take part in, where the federation is charged.

        BudgetExhausted for a round more than were reserved: a member's reservation is never extended.
        """
        passes = self.plan.passes
        if self.account.left() < passes:
            raise BudgetExhausted(f"round {round_ + 1} is beyond the {self.plan.releases // passes} that were reserved")
        self.account.charge(passes, "", {"round": round_})

    def _take_turn(self, round_: int, pass_name: str) -> None:
        """Charge a round whole, once in the life of the ledger and after all earlier ones; its later passes find it charged.

        TurnPassed if another process has charged it. The ledger checks the round in the transaction that writes, so of two
        processes that act as this run at most one makes it, whatever was lost before: two sums of a round, over different
        clients or with the same correlated noise, would reveal the difference.
        """
        round_of_turn, made = self.turn
        passes = self.plan.passes
        if round_of_turn != round_:
            if self.begun > round_:
                raise TurnPassed(
                    f"round {round_ + 1} was interrupted, and its clients' turn in the public order is over"
                )
            if not self.covers(round_):
                raise BudgetExhausted(f"round {round_ + 1} is beyond the {self.plan.releases // passes} planned")
            self.made = self.account.charge(passes, "", {"pass": pass_name}, new_round=round_)
            made = 0
        elif made == passes:
            raise TurnPassed(f"round {round_ + 1} has made its {passes} releases")
        self.turn = round_, made + 1

    @property
    def charged(self) -> dict[str, int]:
        """The releases charged so far, by client, or under "" for the federation."""
        return self.ledger.charged(self.run)


def require_room(privacy: PrivacyConfig, plan: Plan, run_dir: Path | None, subject: Subject) -> Plan:
    """The plan, shortened where `on_exhausted` allows it; refused, with nothing written, if it does not fit the ledger.

    A run that has already reserved keeps its reservation. One that was closed since is refused.
    """
    noted = _noted(run_dir) if run_dir else None
    if not privacy.ledger:
        return plan
    ledger = _shared(privacy, noted)
    if noted and ledger.closed(noted.run):
        raise RunDirectoryError(
            f"{run_dir} cannot be resumed: its run {noted.run!r} was closed in {ledger.path}, and its reservation was given "
            "back: start a new run in another directory"
        )
    ledger.require(subject.data, privacy.data_set or None, subject.unit(plan))
    if noted and ledger.reserved(noted.run) is not None:
        return plan
    return _fitted(plan, privacy, ledger)


def _fitted(plan: Plan, privacy: PrivacyConfig, ledger: Ledger) -> Plan:
    """The plan, or as much of it as the ledger admits where stopping early was chosen."""

    def admits(releases: int | None = None) -> bool:
        return ledger.admits("a new run", plan.cost(releases, ledger.orders))

    if admits():
        return plan
    fits, exceeds = 0, 0 if plan.limits or privacy.on_exhausted != "stop" else plan.releases
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        fits, exceeds = (middle, exceeds) if admits(middle) else (fits, middle)
    if fits >= plan.passes:
        return replace(plan, releases=fits - fits % plan.passes)
    cost, spent = plan.cost(orders=ledger.orders), ledger.spent()
    exceeded = ledger.exceeded("a new run", cost)
    # The runs of an RDP ledger share one delta; elsewhere their deltas add up.
    delta = ledger.delta if ledger.orders else f"{spent.delta:.3g} of {ledger.delta}"
    raise BudgetExhausted(
        f"the plan costs epsilon {cost.epsilon:.4g} at delta {cost.delta:.3g}, and the ledger {ledger.path} of "
        f"{ledger.data_set!r} has spent epsilon {spent.epsilon:.4g} of {ledger.epsilon} at delta {delta}: too "
        f"little {' and '.join(exceeded)} is left; {ledger.remedy('a new run', cost)}"
    )


def cost_in_words(privacy: PrivacyConfig, plan: Plan, run_dir: Path | None) -> str:
    """The cost of a run, and the state of the ledger that pays it."""
    noted = _noted(run_dir) if run_dir else None
    if not privacy.ledger:
        return f"{_amount(plan.cost())}, from a budget of this run alone"
    ledger = _shared(privacy, noted)
    held, spent = ledger.reserved(noted.run) if noted else None, ledger.spent()
    limit = "without a limit" if ledger.epsilon is None else f"of {ledger.epsilon:g}"
    place = f"the ledger {ledger.path} of {ledger.data_set!r}, where epsilon {spent.epsilon:.4g} {limit} is spent"
    if held is not None:
        return f"{_amount(held)}, which this run has reserved in {place}"
    return f"{_amount(plan.cost())}, to be reserved in {place} so far"


def _amount(cost: Cost) -> str:
    return f"epsilon {rounded_up(cost.epsilon, 4)} at delta {rounded_up(cost.delta, 3)}"


@contextmanager
def opened(
    privacy: PrivacyConfig, plan: Plan, run_dir: Path | None, subject: Subject, *, charged_here: bool = False
) -> Iterator[RunBudget]:
    """The reserved budget of the run in `run_dir`; without a run directory, the ledger ends with the run.

    charged_here: whether every release is charged to this budget before it is made (`give_back`).
    """
    with TemporaryDirectory(prefix="secure-fed-") if run_dir is None else nullcontext(run_dir) as folder:
        yield _reserved(privacy, plan, Path(folder), subject, charged_here)


def _reserved(privacy: PrivacyConfig, plan: Plan, folder: Path, subject: Subject, charged_here: bool) -> RunBudget:
    noted = _noted(folder)
    made_private(folder)
    ledger = _ledger(privacy, folder, noted)
    if ledger.path.parent == private_part(folder):
        ledger.path.chmod(0o600)
    run = noted.run if noted is not None else f"{folder.name}-{uuid.uuid4().hex[:8]}"

    def keep(head: Head) -> None:
        note = {"run": run, "ledger": str(ledger.path), "head": head.to_dict()}
        atomic_write(private_part(folder) / BUDGET, json.dumps(note, indent=2) + "\n", private=True)

    if ledger.reserved(run) is None:
        keep(ledger.head)
        terms = {
            "noise_multiplier": plan.noise_multiplier,
            "sampling_rate": plan.sampling_rate,
            "releases": plan.releases,
            "event": repr(plan.release.event),
            _CHARGED_HERE: charged_here,
        }
        head = ledger.reserve(
            run,
            plan.cost(orders=ledger.orders),
            data_digest=subject.data,
            unit=subject.unit(plan),
            terms=terms,
            data_set=privacy.data_set or None,
        )
        keep(head)

    if not plan.limits:  # fewer than the settings plan if the ledger had room for fewer
        reservations = [row for row in ledger.rows() if row.kind == "reserve" and row.run == run]
        plan = replace(plan, releases=int(reservations[-1].body["terms"]["releases"]))

    def longer(count: int) -> Cost:
        cost = plan.cost(count, ledger.orders)
        if privacy.epsilon is not None and cost.epsilon > privacy.epsilon:
            raise BudgetExhausted(
                f"release {count} would bring epsilon to {cost.epsilon:.4g}, above privacy.epsilon = {privacy.epsilon:g}: "
                f"{plan.releases} were planned, and what an interrupted round charged counts"
            )
        return cost

    account = Account(ledger, run, plan.limit, None if plan.limits or plan.exposures else longer, keep)
    return RunBudget(run, ledger, account, plan)


def give_back(ledger: Ledger, run: str) -> Cost | None:
    """Close a run that has made no release, and give its reservation back. Returns its cost; None if it was closed before.

    NotClosedError, and nothing is written, unless the ledger shows that the run made no release: it has no charge, and its
    reservation says that each of its releases is charged in this ledger before it is made. That is so for runs on one machine,
    also while they go on: the next charge is refused then, and with it the release. It is not so for nodes, whose owners have
    `secure-fed node release`, for coordinators of nodes that charge their own releases, and for runs of earlier versions, which
    did not say which they are.
    """
    reservations = [row for row in ledger.rows() if row.kind == "reserve" and row.run == run]
    if not reservations:
        raise NotClosedError(
            f"{ledger.path} has no run {run!r:.80}: give a name that `secure-fed budget show` prints"
        ).about("RUN", run, "a run of this ledger")
    cost = ledger.reserved(run)
    if cost is None:
        return None
    if charged := sum(ledger.charged(run).values()):
        raise NotClosedError(
            f"run {run!r} has charged {charged} releases in {ledger.path}, so its whole reservation stays spent: only a run "
            "without any charge is closed"
        ).about("RUN", run, "a run without any charge")
    if not reservations[-1].body["terms"].get(_CHARGED_HERE):
        raise NotClosedError(
            f"run {run!r} has no charge in {ledger.path}, and may have made releases all the same: it is a node's (`secure-fed "
            "node release` closes it), its nodes charge their own releases, or an earlier version reserved it"
        ).about("RUN", run, "a run whose every release is charged in this ledger")
    ledger.close(run)
    return cost


def _ledger(privacy: PrivacyConfig, folder: Path, noted: Noted | None) -> Ledger:
    if privacy.ledger:
        return _shared(privacy, noted)
    path = private_part(folder) / OWN_LEDGER
    if path.exists() or noted is not None:
        return Ledger.open(path, head=noted and noted.head)
    epsilon, delta = (privacy.epsilon, privacy.delta) if privacy.epsilon is not None else (None, None)
    return Ledger.create(path, data_set=folder.name or "run", epsilon=epsilon, delta=delta)


def _shared(privacy: PrivacyConfig, noted: Noted | None) -> Ledger:
    """The ledger that the settings name; every head of it noted by this run or by the user must be in it."""
    path = Path(privacy.ledger)
    if noted is None:
        require_made(privacy.ledger)
    return Ledger.open(path, head=noted and noted.head, heads=heads_at(privacy.ledger_heads))


def heads_at(chosen: str | Path) -> Heads:
    """The chosen file; if none was chosen, secure-fed/ledgers.sqlite in the user's folder for state.

    That folder is $XDG_STATE_HOME, or ~/.local/state; a relative path there is ignored, as its specification has it.
    """
    if str(chosen):
        return Heads(_expanded(Path(chosen)))
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    folder = state if state.is_absolute() else _expanded(Path("~/.local/state"))
    return Heads(folder / "secure-fed" / "ledgers.sqlite")


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise LedgerError(
            f"{path} names no place on this machine ({error}): set privacy.ledger_heads to a file that keeps the newest heads "
            "of ledgers"
        ) from error


def require_made(ledger: str) -> None:
    """Refuse a ledger that does not exist; if that cannot be determined, opening it reports the reason."""
    with suppress(OSError):
        if not Path(ledger).exists():
            made = shlex.join(["secure-fed", "budget", "create", ledger])
            raise LedgerError(
                f"there is no ledger {ledger}: make it with `{made} --data-set NAME --epsilon E --delta D`, or correct "
                "privacy.ledger"
            )


def name_in_ledger(run_dir: Path) -> str:
    """The name of the run in its ledger; "" before it has reserved."""
    noted = _noted(run_dir)
    return noted.run if noted else ""


class Noted(NamedTuple):
    """What `budget.json` says: the run's name in its ledger, and the ledger's head when the run last wrote to it."""

    run: str
    head: Head


def _noted(folder: Path) -> Noted | None:
    """The run's note of its ledger, None before there is one; a run that has released cannot resume without it."""
    own_part = private_part(folder)
    if not (own_part / BUDGET).exists():
        if (folder / CHECKPOINT).exists() or (own_part / RELEASED).exists():
            raise RunDirectoryError(
                f"{folder} has released, but {PRIVATE}/{BUDGET}, which names its budget, is missing: restore it"
            )
        return None
    noted = read_object(own_part, BUDGET)
    own = Path(str(noted.get("ledger", "")))
    if own.name == OWN_LEDGER and own.parent != own_part.absolute():
        raise RunDirectoryError(
            f"{folder} was moved or copied from {own.parent.parent}, and a run that resumes in two places releases twice: "
            "move it back"
        )
    with suppress(LedgerError):
        match noted:
            case {"run": str(run), "head": head}:
                return Noted(run, Head.from_dict(head))
    raise RunDirectoryError(f"{own_part / BUDGET} is damaged: it lacks the run's name or row in its ledger; restore it")
