"""Charges of a run's releases, as clients and server make them.

Noise on a sum, also in shares of its clients, is charged by the server: once for each pass, or in a public order for all passes
of a round at its first. Noise that a client adds to its own steps or contribution is charged to that client, by the number of
releases that it requests. Either way the charge is on disk before any part of the release is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from privacy.errors import PrivacyError


class TurnPassed(PrivacyError):  # noqa: N818 - the way a round ended
    """The round cannot be made: it was begun before and interrupted, and no client in it has another turn; or, on many
    machines, too few of its members can be reached.
    """


class Budget(Protocol):
    """A run's budget: every call that returns has made its charge durable."""

    @property
    def made(self) -> int | None:
        """The releases charged to the federation so far; None before this process has charged any."""

    def charge(self, round_: int, pass_name: str) -> None:
        """Charge one release of the whole federation. BudgetExhausted if none is left; TurnPassed in a round of a public order
        that a run charged before it was interrupted.
        """

    def allowance(self, who: str, wanted: int, round_: int) -> int:
        """Charge up to `wanted` releases to this client, as many as it has left, and return that number."""


@dataclass
class Charges:
    """Charges to the budget of the run in progress. Clients and server outlive a run; its budget is open as long as it runs."""

    budget: Budget | None = None

    def charge(self, round_: int, pass_name: str) -> None:
        self._open().charge(round_, pass_name)

    def allowance(self, who: str, wanted: int, round_: int) -> int:
        return self._open().allowance(who, wanted, round_)

    @property
    def made(self) -> int | None:
        """The releases charged to the federation so far, if this run's process has charged any."""
        return self.budget.made if self.budget else None

    def close(self) -> None:
        self.budget = None

    def _open(self) -> Budget:
        if self.budget is None:
            raise PrivacyError("nothing may be released outside a run: Federation.run opens the budget")
        return self.budget


def charges_nothing(round_: int, pass_name: str) -> None:
    """`Budget.charge` where the federation releases nothing: without privacy, or where every client accounts for itself."""
