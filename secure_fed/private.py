"""Training loops of the user's own, under the guarantee of this package.

    from secure_fed.private import Budget, wrap

    private = wrap(model, optimizer, loader, Budget(epsilon=8, delta=1e-5, epochs=3))
    for epoch in range(3):
        for inputs, labels in private.loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    print(private.statement())

Model and optimizer stay the same objects. After `wrap`, each step of the optimizer is a DP-SGD step (`own_loop.steps`) or an
error. The loader is replaced by one that tosses a secret coin for every example. docs/own_loops.md says what a loop may do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from privacy.entropy import Entropy, SystemEntropy
from privacy.statement import Statement
from secure_fed.errors import ConfigError, ModelError, OwnLoopError
from secure_fed.own_loop.account import Allowance, Budget, Purse, Terms, stated
from secure_fed.own_loop.batches import PoissonLoader, require_samplable
from secure_fed.own_loop.steps import PrivateSteps, require_trainable

if TYPE_CHECKING:
    from privacy.plan import Plan

__all__ = ["Budget", "Private", "Spent", "wrap"]


@dataclass(frozen=True)
class Spent:
    """The charge: `steps` of `planned`. epsilon and delta would hold for these steps had their number been fixed beforehand."""

    steps: int
    planned: int
    epsilon: float
    delta: float


class Private:
    """A loop's model, optimizer and loader; `model, optimizer, loader = private` unpacks them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        budget: Budget,
        purse: Purse,
        entropy: Entropy,
    ) -> None:
        self._terms = terms = _terms(budget, loader)
        self._purse, self._entropy = purse, entropy
        self.model, self.optimizer = model, optimizer
        trained = require_trainable(model, optimizer)
        rounding = max(torch.finfo(one.dtype).eps for one in model.parameters())
        self._allowance = Allowance.of(terms, budget.epsilon, budget.clip_norm, rounding)
        self._steps = PrivateSteps(
            model,
            optimizer,
            trained,
            self.plan.mechanism,
            self._allowance,
            terms.sampler.expected,
            entropy.stream("steps"),
            charge=purse.charge,
            left=lambda: purse.left,
        )
        self.loader = PoissonLoader(
            loader, terms, entropy.stream("batches"), self._steps.begin, self._steps.end, lambda: purse.left
        )

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.loader))

    @property
    def plan(self) -> Plan:
        """The noise, the steps and their cost."""
        return self._purse.plan

    def spent(self) -> Spent:
        """The charge so far. The ledger has the whole plan reserved: steps that are not made are not refunded."""
        steps, planned = self._purse.charged, self.plan.releases
        return Spent(steps, planned, self.plan.epsilon(steps) if steps else 0.0, self.plan.delta if steps else 0.0)

    def statement(self) -> Statement:
        """The guarantee of the whole plan. Stopping early does not improve it: results may have chosen the time to stop."""
        return stated(self._allowance, self._terms, self.plan, private=self._entropy.private)

    def close(self) -> None:
        """Remove the hooks from model and optimizer. Later training is not private."""
        self._steps.close()


def wrap(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    budget: Budget,
    *,
    ledger: str | PathLike[str] | None = None,
    data_set: str = "",
    unit_name: str = "",
) -> Private:
    """Make a loop over `loader` private at the example unit: (epsilon, delta) of the budget for all its steps together.

    Neighbouring data sets differ in one example, added or removed. The noise comes from the operating system's entropy, and its
    scale is computed before anything trains. ledger: a file of `secure-fed budget create`, in which the first step reserves the
    whole budget; `wrap` fails if the ledger has less left. data_set: the name of the data set in the ledger. unit_name: the
    name of the unit in the ledger, as privacy.unit_name.

    Raises OwnLoopError, ModelError, DataError, ConfigError or an error of `privacy` if no guarantee can be made; then nothing
    was changed.
    """
    for name, given in (("data_set", data_set), ("unit_name", unit_name)):
        if given and not ledger:
            message = f"{name} is {given!r}, a name in a ledger, but no ledger is given: give its file as ledger"
            raise ConfigError(message).about(name, given, "a ledger beside it")
    return _wrapped(model, optimizer, loader, budget, SystemEntropy(), (fspath(ledger or ""), data_set, unit_name))


def _wrapped(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    budget: Budget,
    entropy: Entropy,
    account: tuple[str, str, str] = ("", "", ""),
) -> Private:
    """`wrap` with any source of noise; tests inject it."""
    wanted = (model, nn.Module), (optimizer, Optimizer), (loader, DataLoader), (budget, Budget)
    if not all(isinstance(one, kind) for one, kind in wanted):
        kinds = ", ".join(type(one).__name__ for one, _ in wanted)
        raise OwnLoopError(
            f"wrap() was given {kinds}; give a torch module, a torch optimizer, a torch DataLoader and a Budget"
        )
    require_samplable(loader)
    if hasattr(model, "autograd_grad_sample_hooks"):
        raise ModelError("the model is wrapped already; call close() on its earlier wrapper first")
    require_trainable(model, optimizer)
    purse = Purse(budget, _terms(budget, loader), loader.dataset, *account)
    return Private(model, optimizer, loader, budget, purse, entropy)


def _terms(budget: Budget, loader: DataLoader[Any]) -> Terms:
    return Terms.of(budget, len(loader.dataset), loader.batch_size or 0)  # type: ignore[arg-type]
