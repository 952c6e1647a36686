"""The account of one run: each release is charged to a ledger, within its plan, before it is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from privacy.errors import BudgetExhausted, PlanError
from privacy.ledger import Cost, Head, Ledger


class Account:
    """Charges the releases of one run to its ledger, and refuses releases that its reservation does not cover.

    When `charge` returns, the charge is on disk and `after` has kept the ledger's new head; when it raises, nothing may be
    released (a charge may have been made all the same, and stays). The count is read from the ledger each time, so a resumed
    run continues from the killed run's count.

    The ledger checks a charge against the limit in the transaction that writes it, so even two processes that act as the same
    run cannot exceed it. The sum over different runs is checked in the same way, when they reserve.
    """

    def __init__(
        self,
        ledger: Ledger,
        run: str,
        limits: Callable[[str], int],
        cost: Callable[[int], Cost] | None,
        after: Callable[[Head], None],
    ) -> None:
        """limits(who): the number of releases that the run's reservation covers. cost(count): the cost to reserve for a larger
        number; None if the run cannot exceed its plan. The run must have reserved before.
        """
        self._ledger = ledger
        self._run = run
        self._limits = limits
        self._cost = cost
        self._after = after
        self._lock = threading.Lock()

    def releases(self, who: str = "") -> int:
        """The number of releases charged so far for `who`; "" is the whole federation."""
        return self._ledger.charged(self._run).get(who, 0)

    def next_round(self) -> int:
        """The round after the last one that was charged to the federation, by any process; 0 before any."""
        return self._ledger.next_round(self._run)

    def left(self, who: str = "") -> int:
        """Releases that the plan still allows `who`, an extension not counted."""
        return max(0, self._limits(who) - self.releases(who))

    def charge(
        self, releases: int = 1, who: str = "", note: Mapping[str, Any] | None = None, new_round: int | None = None
    ) -> int:
        """Charge that many releases, about to be made, and return the number charged to `who` so far.

        BudgetExhausted if neither the plan nor the ledger has room for them.

        new_round: the round of these releases; BudgetExhausted if this round or a later one was charged to `who` before.
        """
        if isinstance(releases, bool) or not isinstance(releases, int) or releases < 1:
            raise PlanError(f"{releases!r} releases cannot be charged: charge a whole number from 1 on")
        with self._lock:
            wanted = self.releases(who) + releases
            if wanted > self._limits(who):
                self._extend(wanted, who)
            limit = max(wanted, self._limits(who))
            self._after(self._ledger.charge(self._run, who, releases, note or {}, limit=limit, new_round=new_round))
            return wanted

    def _extend(self, wanted: int, who: str) -> None:
        """Extend the reservation to `wanted` releases."""
        if self._cost is None:
            remedy = ": raise privacy.participations in a new run, or set privacy.on_exhausted = 'stop'" if who else ""
            raise BudgetExhausted(
                f"release {wanted} of run {self._run!r}{f' by client {who!r}' if who else ''} is beyond the "
                f"{self._limits(who)} planned{remedy}"
            )
        self._after(self._ledger.extend(self._run, self._cost(wanted)))
