"""Closing a federation at a node, and giving back a reservation for which the node made no private step.

1. No agent runs for the node, and none can start (the folder's lock), so no request is answered meanwhile.
2. The node's two records of its steps are empty: the charges in its ledger, and the rounds in `attendance`. Each is on disk
   before the step that it records. A record that a kill left without a step counts as a step, and so does a missing record.
3. closed.json is on disk. From here on a request of this federation is refused, however late or often it arrives.
4. The ledger gets a row that closes the run (`privacy.ledger.Ledger.close`), which it refuses for a run with any charge.

A kill between two of them leaves the reservation in place, or a closed federation; the same command finishes its work. Where
closed.json is lost with an older copy of the folder, the ledger's row still refuses every reservation and charge of that run.
"""

from __future__ import annotations

from dataclasses import dataclass

from privacy.filters import Cost
from secure_fed.deployment.agent import held
from secure_fed.deployment.home import Home
from secure_fed.deployment.home_files import HomeError
from secure_fed.deployment.memberships import Membership, memberships
from secure_fed.deployment.own_ledger import OwnLedger, words
from secure_fed.errors import UsageError
from secure_fed.runs.budget import name_in_ledger


class NotGivenBackError(UsageError):
    """A reservation stays, since the node made a private step for it, or may have."""


@dataclass(frozen=True)
class Released:
    """A federation that is closed. cost: of the reservation that was given back, None if it had none."""

    membership: Membership
    cost: Cost | None

    def __str__(self) -> str:
        named = f"{self.membership.name or 'the federation'} ({self.membership.digest}) is closed at this node"
        if self.cost is None:
            return f"{named}, and nothing is reserved for it"
        return f"{named}, and {words(self.cost)} are given back"


def release(home: Home, which: str) -> Released:
    """Close the federation with this name or digest, and give its reservation back.

    NotGivenBackError, and nothing is changed, if the node may have made a private step for it.
    """
    with held(home.folder):
        membership = _chosen(home, which)
        run = name_in_ledger(membership.folder)
        ledger = OwnLedger.of(home).opened() if run else None
        cost = ledger.reserved(run) if ledger else None
        if ledger and cost and (why := membership.step(ledger, run)):
            raise NotGivenBackError(
                f"{words(cost)} of {membership.name or 'the federation'} ({membership.digest}) stay spent, since {why}; "
                "nothing was changed, and to take no further part, remove its coordinator from coordinators in node.toml"
            )
        membership.close()
        if ledger and cost:
            ledger.close(run)
        return Released(membership, cost)


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
