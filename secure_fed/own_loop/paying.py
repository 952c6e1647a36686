"""The privacy account of a user's own training loop, and the statement of its guarantee."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

from privacy import accounting
from privacy.errors import BudgetExhausted, LedgerError
from privacy.plan import Plan
from privacy.statement import NOT_COVERED, READER, Statement
from secure_fed.config import PrivacyConfig
from secure_fed.errors import DataError
from secure_fed.learning.data import fingerprint
from secure_fed.own_loop.allowance import Allowance
from secure_fed.own_loop.terms import Budget, Terms
from secure_fed.runs.budget import RunBudget, Subject, opened, require_room


class Purse:
    """The account of one loop. The first step reserves the whole plan, so a loop that fails its rehearsal pays nothing.

    The constructor raises BudgetExhausted if the ledger has no room for the plan. The first step may raise it too, if another
    loop has taken the room in between.
    """

    def __init__(self, budget: Budget, terms: Terms, examples: Any, ledger: str, data_set: str, unit_name: str) -> None:
        self._privacy = PrivacyConfig(
            unit="example",
            epsilon=budget.epsilon,
            delta=budget.delta,
            clip_norm=budget.clip_norm,
            ledger=ledger,
            data_set=data_set,
            unit_name=unit_name,
        )
        members = _members(examples, told=bool(unit_name)) if ledger else fingerprint.of_sizes([terms.examples])
        self._subject = Subject(members, members, unit_name or "example", "example")
        self._account: RunBudget | None = None
        with _in_words_of_a_loop():
            self.plan: Plan = require_room(self._privacy, terms.plan(budget.epsilon), None, self._subject)

    @property
    def charged(self) -> int:
        return self._account.account.releases() if self._account else 0

    @property
    def left(self) -> int:
        return self.plan.releases - self.charged

    def charge(self, step: int) -> None:
        """Charge one step, on disk when this returns. BudgetExhausted if the plan, or at the first step the ledger, is full."""
        self._account = self._account or self._reserved()
        self._account.account.charge(1, "", {"step": step})

    def _reserved(self) -> RunBudget:
        """Reserve the plan. The notes, and the ledger if none was named, lie in a folder that is removed with this object."""
        folder = Path(mkdtemp(prefix="secure-fed-"))
        finalize(self, rmtree, folder, ignore_errors=True)
        (run := folder / "own-loop").mkdir()
        with _in_words_of_a_loop(), opened(self._privacy, self.plan, run, self._subject, charged_here=True) as account:
            return account


@contextmanager
def _in_words_of_a_loop() -> Iterator[None]:
    """Errors of budgets name a run's settings; this adds where a loop has them."""
    try:
        yield
    except (BudgetExhausted, LedgerError) as error:
        raise type(error)(f"{error}. In a loop, {_SETTINGS}") from error


_SETTINGS = (
    "epsilon, delta, epochs and steps are fields of Budget, and ledger, data_set and unit_name are arguments of wrap()"
)


def _members(examples: Any, *, told: bool) -> str:
    """A digest of the examples, by which a ledger recognises the unit whose privacy it counts."""
    try:
        return fingerprint.of_objects([examples], each=True)
    except TypeError as error:
        if told:
            return fingerprint.of_sizes([len(examples)])
        raise DataError(
            f"the ledger has to identify its unit, and the examples cannot be told apart by their content ({error}): give "
            "unit_name, a name that all loops and runs on these examples give"
        ) from error


def stated(allowance: Allowance, terms: Terms, plan: Plan, *, private: bool) -> Statement:
    """The guarantee of all planned steps."""
    rate = f"{terms.sampler.rate:.4g}"
    unsampled = accounting.unamplified(plan.noise_multiplier)  # for a reader who sees the batches
    accountant = "exact: one Gaussian mechanism for all steps" if plan.release.plain else "privacy loss distributions"
    return Statement(
        unit="one example",
        adjacency="one example added or removed",
        epsilon=plan.epsilon(),
        epsilon_participants=accounting.epsilon(unsampled, plan.releases, plan.delta),
        delta=plan.delta,
        mechanism=f"Gaussian with noise multiplier {plan.noise_multiplier:g} for a sensitivity of {allowance.sensitivity:.6g}: "
        f"every example's gradient is clipped to norm {allowance.clip_norm:g} over all trained parameters together, and the "
        f"rest is for up to {allowance.most} other examples of a step, whose clipped gradients may each depend on it by "
        f"{2 * allowance.tolerance:.2g} of that norm",
        sampling=f"each of {plan.releases} steps draws each of {terms.examples} examples by a secret coin of rate {rate}",
        accountant=f"{accountant} (dp_accounting)",
        noise="to the sum of every step, by this process",
        trust="this process, and the training loop in it",
        released=f"{plan.releases} noised gradients, and every model made of them",
        holds_against=READER,
        not_covered=(*NOT_COVERED[:3], *_OF_LOOPS),
        private=private,
    )


_OF_LOOPS = (
    "what the loop itself reads from the examples, prints or bases decisions on: losses, batches, when to stop",
    "the set of labels, and the number of examples, which are public",
    "parameters outside the wrapped model, such as those of a second module, which the loop would train without noise",
    "facts about several examples together, such as all of one person",
    "random numbers that the data set or the loss draws from a known seed",
    "a loss or model that couples examples and that the rehearsal of each epoch does not notice, as one that couples only "
    "examples that were not tried, or few batches",
    "the outcome of the rehearsals, which is such an error where it depends on examples",
)
