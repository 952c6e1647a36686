"""The number of neighbours and the threshold of a session, from the shares of clients that may be corrupt and may drop out.

`choose` compares graphs by exact hypergeometric probabilities and union bounds, and returns a `Choice`.

Let n clients be invited, C = ceil(corrupt n) of them be corrupt, D = floor(dropout n) drop out, and S = n - D be the least
number of survivors whose sum is released. Any share above 0 thus means at least one corrupt client. Of two clients C are
floor(corrupt n), since a sum of two hides nothing from one of them.

Complete graph. All other clients hold each client's shares, c = C of them corrupt: nothing is random, and `failure` is 0. Each
client keeps S - 1 holders, so with t <= S - 1 `abort` is 0.

H(N, K, m) counts the marked items among m drawn without replacement from N items with K marked.

Ring in random order, k neighbours, in passive sessions.

    failure   n P[H(S - 1, C, k) > c] + n P[H(S, C, k / 2) > window]
              Some client has more than c corrupt neighbours, or some k / 2 consecutive places have more than `window`. One term
              for each client and each place (union bound). S - 1 and not n - 1: all missing clients may be honest and missing
              before the ring is drawn, and fewer honest clients leave a larger share of corrupt ones.
    abort     n P[H(n - 1, D, k) > k - t] + n P[H(n, n - D, k / 2) <= window]
              D clients chosen at random are missing at the end. Some client has fewer than t holders left, or the ring is not
              certain to stay connected. If some were missing before the ring is drawn, the probability would be smaller.

Clients that choose k holders each and mask with the first m = k / 2 of them, in active sessions (`graph.ChosenGraph`). Of the
first m choices of each survivor, u = c' + a must survive.

    failure   n P[H(n - 1, C, k) > c] + n P[H(n - 1, C, m) > c'] + P[cut]
              Some client has more than c corrupt holders, or more than c' corrupt among its first m choices, or the honest
              survivors can be cut in two somewhere. P[cut] is at most the sum over s = a + 1, a + 2, ... of the number of pairs
              of disjoint sets of s and r = max(a + 1, S - C - s) honest clients, times the probability for each pair that
              nobody in one set has chosen anybody in the other. The server may pick the survivors after it has seen all
              choices.
    abort     n P[H(n - 1, D, k) > k - t] + n P[H(n - 1, D, m) > m - u]
              D clients chosen at random are missing, from any stage on. Some client has fewer than t holders left, or fewer
              than u of its first m choices.

Both bounds are for one session. In a passive session c and `window` are the least values that keep their terms of `failure` at
or below half of 2^-security each. In an active session c and c' are the least that keep theirs at or below a quarter each, and
a is the least that keeps P[cut] at or below half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from protocols.errors import ParameterError

ABORT = 1e-6  # the accepted probability that a round with the foreseen dropouts aborts
FEWEST = 3  # clients: in a sum of two, each client can subtract its own contribution
RING_FROM = 100  # clients: with fewer, a complete graph is cheap, and nothing is random


@dataclass(frozen=True)
class Choice:
    """A graph and a threshold for `clients` invited clients, with the properties that they guarantee."""

    clients: int
    neighbours: int  # clients - 1: a complete graph
    threshold: int
    survivors: int  # the least number of clients whose sum is released
    corrupt: int  # most among the holders of one client's shares
    window: int  # most in k / 2 consecutive places of the ring; 0 on other graphs
    failure: float  # upper bound on the probability of more corrupt clients there, or of a cut (module docstring)
    abort: float  # upper bound on the probability that a round with the foreseen dropouts aborts
    partners: int = 0  # where clients choose: the number of each one's first k / 2 choices that must survive
    colluding: int = 0  # most among all invited clients


def choose(
    clients: int,
    *,
    corrupt: float,
    dropout: float,
    active: bool,
    neighbours: int | None = None,
    threshold: int | None = None,
    security: int = 40,
) -> Choice:
    """A graph with the least even number of neighbours that has `failure` <= 2^-security and `abort` <= 1e-6, or a complete
    graph: for fewer than 100 clients, and where another graph would save less than half of the neighbours.

    `corrupt` and `dropout` are shares of the clients, taken as the decimals they are written as. On a graph that is not
    complete the threshold is the least safe one, at least 2, since a higher one only aborts more often. On a complete graph it
    is halfway between the least safe threshold and the highest that the foreseen survivors can reach: half the margin is for
    more corrupt clients than foreseen, half for more dropouts after the vectors were sent.

    `neighbours` and `threshold`, where given, are used as they are: ParameterError if they are not safe; if they are, the
    resulting `abort` is reported, however large. ParameterError also where no graph is safe, with the share to lower.
    """
    if clients < 2:
        raise ParameterError(f"{clients} clients cannot form a sum: invite at least two")
    for name, share in (("corrupt", corrupt), ("dropout", dropout)):
        if not 0 <= share < 1:
            raise ParameterError(f"{name} is {share}: give a share of the clients from 0 to below 1")
    if not 1 <= security <= 256:
        raise ParameterError(f"security is {security}: give a number of bits from 1 to 256, 40 being usual")
    missing = clients - surviving(clients, dropout)
    case = _Case(clients, colluding(clients, corrupt), missing, active, security)
    case.check()
    if neighbours is not None and neighbours < 1:
        raise ParameterError(f"neighbours is {neighbours}: choose an even number from 2 on, or clients - 1 for all")
    if neighbours is not None and neighbours < clients - 1:
        return _given(case, neighbours, threshold)
    if neighbours is None:
        worth_drawing = min((clients - 1) // 2, case.survivors - 2) if clients >= RING_FROM else 0
        for k in range(2, worth_drawing + 1, 2):
            if (found := _graph(case, k, threshold)) is not None and found.abort <= ABORT:
                return found
    return _complete(case, threshold)


def surviving(clients: int, dropout: float) -> int:
    """The number of clients left after the share `dropout` has dropped out."""
    return clients - _count(dropout, clients)


def colluding(clients: int, corrupt: float) -> int:
    """The number of clients that are assumed to collude with the server: among three or more at least one, unless the share is
    0.
    """
    return math.ceil(_exactly(corrupt) * clients) if clients > 2 else _count(corrupt, clients)


def counted_shares(clients: int, corrupt: float, dropout: float) -> int:
    """The number of honest clients' noise shares that a sum of `clients` clients has at least."""
    return max(0, surviving(clients, dropout) - colluding(clients, corrupt))


def losses(clients: int, *, corrupt: float, active: bool) -> int:
    """The most of so many clients that a sum on a complete graph can lose, as `dropout` allows; below 0: there is no sum."""
    return clients - _Case(clients, colluding(clients, corrupt), 0, active, 40).least_survivors


def _count(share: float, clients: int) -> int:
    """floor(share clients)"""
    return math.floor(_exactly(share) * clients)


def _exactly(share: float) -> Fraction:
    """0.29 is 29 / 100, and not the binary fraction just below it."""
    return Fraction(str(share))


@dataclass(frozen=True)
class _Case:
    """n, C, D and the requested security."""

    clients: int
    corrupt: int
    missing: int
    active: bool
    security: int

    @property
    def survivors(self) -> int:
        return self.clients - self.missing

    def least_threshold(self, holders: int, corrupt: int) -> int:
        """Active: 2 t > h + c; passive: t > c."""
        return (holders + corrupt) // 2 + 1 if self.active else corrupt + 1

    @property
    def least_survivors(self) -> int:
        """Two of them are honest, and each one has as many other holders as the least threshold."""
        return max(self.corrupt + 2, self.least_threshold(self.clients - 1, self.corrupt) + 1)

    def check(self) -> None:
        """ParameterError if not even a complete graph is safe and can finish. A random ring only needs more."""
        if self.survivors < self.corrupt + 2:
            raise ParameterError(
                f"{self.survivors} of {self.clients} clients would be left and {self.corrupt} of them may be corrupt, so fewer "
                "than two would be honest: lower corrupt or dropout"
            )
        others = self.clients - 1
        least = self.least_threshold(others, self.corrupt)
        if self.survivors >= self.least_survivors:
            return
        remedies = []
        if (missing := others - least) >= 0:
            remedies.append(f"lower dropout to at most {_share(missing, self.clients)}")
        corrupt = 2 * self.survivors - 3 - others  # the largest with (others + corrupt) // 2 + 1 <= survivors - 1
        if corrupt >= 0:
            remedies.append(f"lower corrupt to at most {_share(corrupt, self.clients)}")
        raise ParameterError(  # in an active session: a passive one was just found able to finish
            f"with {self.corrupt} of {self.clients} clients corrupt, an active session needs a threshold of {least}, and "
            f"with {self.missing} missing only {self.survivors - 1} share holders are left: "
            f"{', or '.join(remedies) or 'lower both corrupt and dropout'}"
        )


def _complete(case: _Case, threshold: int | None) -> Choice:
    least, most = case.least_threshold(case.clients - 1, case.corrupt), case.survivors - 1
    chosen = (least + most + 1) // 2 if threshold is None else threshold
    if not least <= chosen <= most:
        raise ParameterError(
            f"threshold is {chosen}, and on a complete graph of {case.clients} clients with {case.corrupt} corrupt and "
            f"{case.missing} missing it must be from {least} to {most}"
        )
    return Choice(
        case.clients, case.clients - 1, chosen, case.survivors, case.corrupt, 0, 0.0, 0.0, colluding=case.corrupt
    )


def _given(case: _Case, k: int, threshold: int | None) -> Choice:
    if k % 2:
        raise ParameterError(
            f"neighbours is {k}, fewer than all: choose an even number, or {case.clients - 1} for a complete graph"
        )
    found = _graph(case, k, threshold)
    if found is not None:
        return found
    corrupt, _ = _most_corrupt(case, k)
    least = case.least_threshold(k, corrupt)
    if threshold is not None and least <= k and not least <= threshold <= k:
        raise ParameterError(
            f"threshold is {threshold}, and up to {corrupt} of {k} holders may be corrupt: choose from {least} to {k}"
        )
    cut = (
        "too few of the first half may be honest" if case.active else f"{k // 2} consecutive ring places may be corrupt"
    )
    raise ParameterError(f"neighbours is {k}, and up to {corrupt} of them may be corrupt, or {cut}: raise neighbours")


def _graph(case: _Case, k: int, threshold: int | None) -> Choice | None:
    """The choice of a graph with k neighbours; None if it is not safe with this threshold."""
    corrupt, surrounded = _most_corrupt(case, k)
    least = case.least_threshold(k, corrupt)
    chosen = max(least, 2) if threshold is None else threshold  # at a threshold of 1 every share is the secret
    if not least <= chosen <= k:
        return None
    n, half = case.clients, k // 2
    window, partners = 0, 0
    short = n * float(at_least(n - 1, case.missing, k)[k - chosen + 1])
    if case.active:
        if (found := _partners(case, half)) is None:
            return None
        partners, cut = found
        torn = n * float(at_least(n - 1, case.missing, half)[half - partners + 1])
    else:
        window, cut = _exceeded(case, case.survivors, half)
        if window >= half:
            return None
        torn = n * float(at_least(n, case.missing, half)[half - window])
    failure, abort = surrounded + cut, min(1.0, short + torn)
    return Choice(n, k, chosen, case.survivors, corrupt, window, failure, abort, partners, case.corrupt)


def _most_corrupt(case: _Case, k: int) -> tuple[int, float]:
    """c and its term of `failure`."""
    others = (case.clients if case.active else case.survivors) - 1
    return _exceeded(case, others, min(k, others), parts=4 if case.active else 2)


def _exceeded(case: _Case, population: int, drawn: int, parts: int = 2) -> tuple[int, float]:
    """The least number that n draws exceed with a probability of at most 2^-security / parts, and that probability."""
    tails = case.clients * at_least(population, case.corrupt, drawn)
    most = int(np.argmax(tails <= 2.0**-case.security / parts)) - 1
    return most, float(tails[most + 1])


@lru_cache(maxsize=4096)
def _partners(case: _Case, masked: int) -> tuple[int, float] | None:
    """u and its terms of `failure`; None if even all of the first m choices are not enough."""
    corrupt, surrounded = _exceeded(case, case.clients - 1, masked, parts=4)
    for honest in range(1, masked - corrupt + 1):
        cut = cut_bound(case.clients, case.corrupt, case.survivors, masked, honest)
        if cut <= 2.0 ** -(case.security + 1):
            return corrupt + honest, surrounded + cut
    return None


def _share(count: int, clients: int) -> str:
    """The largest three-digit share of the clients that is no more than `count` of them."""
    return f"{math.floor(1000 * count / clients) / 1000:g}"


def at_least(population: int, marked: int, drawn: int) -> NDArray[np.float64]:
    """(drawn + 2,) P[H >= x] for x = 0 .. drawn + 1, to about ten digits.

    H counts the marked items among `drawn` items that are drawn without replacement from `population` items.
    """
    low, high = max(0, drawn - (population - marked)), min(marked, drawn)
    x = np.arange(low, high + 1)
    logs = _log_factorials(population)
    rest = population - marked
    terms = logs[marked] - logs[x] - logs[marked - x] + logs[rest] - logs[drawn - x] - logs[rest - drawn + x]
    terms -= logs[population] - logs[drawn] - logs[population - drawn]
    tails = np.zeros(drawn + 2)
    tails[low : high + 1] = np.minimum(np.cumsum(np.exp(terms)[::-1])[::-1], 1.0)  # small terms are added first
    tails[:low] = 1.0
    return tails


def cut_bound(clients: int, corrupt: int, survivors: int, masked: int, honest: int) -> float:
    """An upper bound on the probability that the honest survivors can be cut in two (P[cut] above).

    All but `corrupt` of the clients are honest, and `survivors` of them all survive. Each client masks with `masked` others, at
    least `honest` of which are honest survivors.
    """
    everybody, others = clients - corrupt, clients - 1
    s = np.arange(honest + 1, everybody - honest)
    r = np.maximum(honest + 1, survivors - corrupt - s)
    s, r = s[s + r <= everybody], r[s + r <= everybody]
    logs = _log_factorials(clients)
    pairs = logs[everybody] - logs[s] - logs[r] - logs[everybody - s - r]
    with np.errstate(invalid="ignore"):
        terms = pairs + s * _log_avoiding(logs, others, r, masked) + r * _log_avoiding(logs, others, s, masked)
    return min(1.0, float(np.exp(np.minimum(terms, 0.0)).sum()))


def _log_avoiding(logs: NDArray[np.float64], others: int, some: NDArray[np.int64], drawn: int) -> NDArray[np.float64]:
    """log P[none of `drawn` of the `others` is in a set of size `some`]; minus infinity where that is impossible."""
    room = others - some - drawn
    ways = logs[others - some] - logs[np.maximum(room, 0)] - logs[others] + logs[others - drawn]
    return np.where(room >= 0, ways, -np.inf)


@lru_cache(maxsize=4)
def _log_factorials(most: int) -> NDArray[np.float64]:
    """(most + 1,)"""
    return np.array([math.lgamma(number + 1) for number in range(most + 1)])
