"""Binds the later passes of a round to its first, by each client's memory.

A server that lies could run two first passes, one honest and one in which nothing can be learned, and then a second pass over
one client of the former and the other clients of the latter: the sum would be that one client's message. A server need not even
lie: the sums of a first pass over all clients and of a second pass over all but one differ by the message of that one client,
seen through the two bases. So a client contributes to a later pass only if

- the request carries the digest of the first request that this client trained under in this round. The session holds the
  digest of the later request, so clients with other first requests are in other sessions, whose masks do not cancel;
- where masks alone hide its contribution, the later sum is over exactly the clients of the first one.

The second condition is waived where every sum carries noise that the guarantee counts (`privacy.noise` = "distributed"
or "local"), or where the server is trusted with the sums ("central"). A client that does not learn the contributors cannot
check it: where coins draw the cohort and `secure_aggregation.active` is false.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.errors import Aborted, Tampering
from secure_fed.rounds.transport import Request

Clients = frozenset[int]


@dataclass
class Passes:
    """The memory of one client about the latest round that it contributed to.

    exact: whether later sums must be over the clients of the first. All of it lasts as long as the process: a client that is
    restarted during a round would accept the round's first request again.
    """

    exact: bool
    _latest: tuple[int, int] = (-1, -1)  # round, and number of the pass in it
    _first: str = ""
    _summed: Clients | None = None  # the clients of the first sum, once this client has opened its shares for it
    _survivors: Clients = frozenset()  # as listed for the current pass
    _cohort: Clients | None = None  # the contributors to the current pass, where this client contributes and knows them

    @property
    def round(self) -> int:
        return self._latest[0]

    def begin(self) -> None:
        """Begin or resume a run."""
        self._latest, self._first, self._summed, self._cohort = (-1, -1), "", None, None

    def take(self, request: Request, cohort: Clients | None) -> None:
        """Contribute to a pass of a round once, in order, and to later passes only of the round that this client trained in.

        cohort: the contributors to the pass; None where this client does not learn them.
        """
        passes = request.plan.passes
        place = (request.round, passes.index(request.pass_name) if request.pass_name in passes else -1)
        if place <= self._latest:
            raise Tampering(f"round {place[0] + 1} was requested again, after round {self.round + 1}")
        if place[1] > 0:
            self._require_bound(request, cohort)
        elif request.first:
            raise Tampering(
                f"the first request of round {request.round + 1} says that it follows another", protected=_NOTHING
            )
        else:
            self._first, self._summed = request.digest, None
        self._latest, self._cohort = place, cohort

    def fill(self) -> None:
        """Contribute zeros to a sum of others."""
        self._cohort = None

    def check(self, survivors: Clients) -> None:
        """Aborted unless the list of survivors of a later pass has all clients of the first sum."""
        self._survivors = survivors
        if self._checks and self._latest[1] > 0 and (missing := (self._summed or frozenset()) - survivors):
            raise Aborted(
                f"{len(missing)} of the clients in the round's first sum are missing from a later sum, which would reveal "
                "their contributions to the server"
            )

    def opened(self) -> None:
        """This client has opened its shares for the list that was checked: in a first pass, they are the first sum's."""
        if self._checks and self._latest[1] == 0:
            self._summed = self._survivors & (self._cohort or frozenset())

    @property
    def _checks(self) -> bool:
        return self.exact and self._cohort is not None

    def _require_bound(self, request: Request, cohort: Clients | None) -> None:
        if request.round != self.round or request.first != self._first:
            raise Tampering(
                f"pass {request.pass_name!r:.40} of round {request.round + 1} follows another first request than this client "
                "trained under",
                protected=_NOTHING,
            )
        if not self.exact or cohort is None:
            return
        if self._summed is None:
            raise Aborted("this client did not see the round's first sum to its end")
        if cohort != self._summed:
            raise Tampering(
                f"pass {request.pass_name!r:.40} of round {request.round + 1} is over {len(cohort)} clients which are not the "
                f"{len(self._summed)} of the round's first sum",
                protected=_NOTHING,
            )


_NOTHING = "nothing of this client's contribution was sent"
