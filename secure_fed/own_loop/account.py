"""The privacy account of a user's own training loop: its budget, its steps and noise, its charges, its guarantee in words.

A `Budget` becomes `Terms`: the steps of the loop, and the noise multiplier z of their plan. The `Allowance` is the sensitivity
to which z is applied. The `Purse` reserves the plan in a ledger and charges each step before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

from privacy import accounting
from privacy.errors import BudgetExhausted, LedgerError
from privacy.participation import Poisson
from privacy.plan import Plan, Target, for_gradients
from privacy.statement import NOT_COVERED, READER, Statement
from secure_fed.config import PrivacyConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning.data import fingerprint
from secure_fed.runs.budget import RunBudget, Subject, opened, require_room


@dataclass(frozen=True)
class Budget:
    """The privacy that a loop may spend, at the example unit.

    epsilon, delta: the target of all steps together; delta well below one over the number of examples. epochs or steps: how
    long the loop trains; an epoch has ceil(examples / batch size) steps. clip_norm: the L2 norm that an example's gradient is
    scaled down to.
    """

    epsilon: float
    delta: float
    epochs: int | None = None
    steps: int | None = None
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("clip_norm", self.clip_norm)):
            if not _number(value) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value!r}; it must be a finite number above 0").about(
                    name, value, "above 0"
                )
        if not _number(self.delta):
            raise ConfigError(f"delta is {self.delta!r}; it must be a number").about("delta", self.delta, "a number")
        _require_counts(self, "epochs", "steps")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_counts(of: Budget | Terms, *names: str) -> None:
    """ConfigError unless one of epochs and steps is set, and each of these fields is not set or a whole number from 1 on."""
    if (of.epochs is None) == (of.steps is None):
        both = (of.epochs, of.steps)
        raise ConfigError(f"epochs and steps are {both}; give one of them").about("epochs", both, "one of two")
    for name in names:
        count = getattr(of, name)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"{name} is {count!r}; it must be a whole number from 1 on").about(name, count, "from 1")


@dataclass(frozen=True)
class Terms:
    """The steps of a loop over `examples` examples, each of which a step draws with probability min(1, batch_size / examples).

    epochs or steps: one of them; an epoch has ceil(examples / batch_size) steps.
    """

    examples: int
    batch_size: int
    delta: float
    epochs: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        _require_counts(self, "examples", "batch_size", "epochs", "steps")
        if not 0 < self.delta * self.examples < 1:
            least = f"{1 / self.examples:g}"
            raise ConfigError(f"delta is {self.delta:g}; choose it above 0 and well below 1/examples = {least}").about(
                "delta", self.delta, f"below {least}"
            )

    @classmethod
    def of(cls, budget: Budget, examples: int, batch_size: int) -> Terms:
        return cls(examples, batch_size, budget.delta, budget.epochs, budget.steps)

    @property
    def sampler(self) -> Poisson:
        return Poisson(self.examples, min(1.0, self.batch_size / self.examples))

    @property
    def epoch(self) -> int:
        """The steps of one epoch."""
        return -(-self.examples // self.batch_size)

    @property
    def count(self) -> int:
        """The steps of the whole loop."""
        return self.steps if self.steps is not None else self.epoch * (self.epochs or 0)

    def plan(self, epsilon: float | None, noise_multiplier: float | None = None) -> Plan:
        """The noise and cost of all steps, planned as the private training of one client that is named ""."""
        return for_gradients(Target(epsilon, noise_multiplier, self.delta), [""], [self.sampler], [self.count], 1)


_SLACK = 0.01
_ROUNDED = 64  # machine epsilons: some ten are usual for the gradients of a deep transformer in different batches
_UNLIKELY = 1e-6  # of delta


@dataclass(frozen=True)
class Allowance:
    """How far the other examples of a batch may move an example's gradient, and what that adds to a step's sensitivity.

    A step adds clipped gradients. One example more in its batch adds its own, of norm C at most, and moves the others as far
    as they depend on the batch: not at all in exact arithmetic, since losses that couple examples are refused, but in float32
    the last bits do. A rehearsal accepts an example whose clipped gradient in a batch is within t C of its clipped gradient
    alone, so that two batches are within 2 t C of each other. With m examples in a batch, adding or removing one moves the sum
    by at most

        C (1 + s),    s = 2 m t,

    and the noise is z C (1 + s). t and m are functions of settings alone, never of gradients:

        t = max(.005 / m, 64 u)       u: the machine epsilon of the model's type; so s is .01 up to m of about 650 in float32
        m                             the largest draw, but for a probability that adds at most delta / 10^6 to delta

    clip_norm: C. most: m. tolerance: t, in clip norms.
    """

    clip_norm: float
    most: int
    tolerance: float

    @classmethod
    def of(cls, terms: Terms, epsilon: float, clip_norm: float, rounding: float = 2.0**-23) -> Allowance:
        """epsilon: at least that of all steps. rounding: u, by default that of float32."""
        most = _most(terms, epsilon)
        return cls(clip_norm, most, max(_SLACK / 2 / most, _ROUNDED * rounding))

    @property
    def slack(self) -> float:
        """s."""
        return 2 * self.most * self.tolerance

    @property
    def sensitivity(self) -> float:
        """C (1 + s)."""
        return self.clip_norm * (1 + self.slack)


def _most(terms: Terms, epsilon: float) -> int:
    """The least m for which Bernstein's inequality bounds the probability of a larger draw by p, or all examples.

    T steps whose sensitivity holds but with probability p each are (epsilon, delta + (1 + e^epsilon) T p)-private if they are
    (epsilon, delta)-private whenever it holds. p is such that the second term is at most delta / 10^6.
    """
    expected = terms.sampler.expected
    margin = math.log(2 * terms.count / (terms.delta * _UNLIKELY)) + epsilon  # -ln p or more
    beyond = margin / 3 + math.sqrt((margin / 3) ** 2 + 2 * margin * expected)
    return math.ceil(min(float(terms.examples), expected + beyond))


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
        raise type(error)(
            f"{error}. In a loop, epsilon, delta, epochs and steps are fields of Budget, and ledger, data_set and unit_name "
            "are arguments of wrap()"
        ) from error


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
