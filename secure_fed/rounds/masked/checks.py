"""What clients and server check in a masked sum, where the other side may lie: three defences, one after the other.

**The round that a client expects** (`ExpectedRounds`). A client computes every request from the run's configuration and refuses
any other. A client that obeyed any request would leak: through the bound of a sum, through an error that only a training client
makes, or through a tensor that is not part of the round. So it computes the round itself and compares before it trains, and
before it tosses its coin for whether to train.

The starting tensors of later rounds, the means of earlier passes and an adapted clip norm cannot be computed by the client.
They have to be the same for all clients in the sum; otherwise the server could make all clients but one contribute zero, by
starting them where the gradient is zero. So a session's parameters hold a digest of the whole request (`Request.digest`), each
client compares it with its own request, and clients whose sessions have different parameters share no masks.

Where the server's coins draw the cohort and other clients send zeros in the same sum, a lying server could claim that its
coins drew a single client. With `secure_aggregation.active` the digest therefore also covers the list of contributors
(`ContributorList`). Every client checks that the list agrees with its own request, and neither masks nor signs a sum with fewer
contributors than `Terms.fewest`.

Everybody may know what a dummy contributes, so it hides nobody. Dummies are not counted as contributors, and where
the cohort is of fixed size no more of them may be invited than the run's configuration has in a sum.

**The later passes of a round are bound to its first** (`Passes`), by each client's memory.

**Sums that no honest clients can have made are refused** (`require_plausible`): a bound on the damage of a lying client. Masks
keep single contributions from the server, so it cannot bound one: in a sum of n, a client can send up to n times the allowed
contribution, or a weight that cancels all other weights. The server can check the sum. Over n honest contributors every
coordinate is within n times the bound, the weights add up to between 0 and n times the largest, the mean loss is within its
bound, and the number of contributions is at most n. With shares of noise only the length of the noised sum is checked. A sum
beyond these limits is refused before it is used. Nobody can identify the client that spoiled it.

Where the server adds the noise of a guarantee, it checks the noised sum, by the number of all possible contributors. A check
without noise would reveal to a lying client on which side of a limit the other clients' sum is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from protocols.errors import Aborted, Tampering
from protocols.parameters import Parameters
from secure_fed.methods.method import Method, RoundPlan, Shrinking, State
from secure_fed.rounds.masked.encoding_plan import LOSS, Contribution, Encoding, Noised, Rounded
from secure_fed.rounds.masked.terms import Terms
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.rounds.transport import Request, Stage
from secure_fed.tensors.tensors import Layout, Tensors

_NOTHING = "nothing of this client's contribution was sent"
_FARTHEST = math.sqrt(80)  # honest noise is longer with a probability of at most exp(-40), see `_of_noised`
Clients = frozenset[int]


@dataclass(frozen=True)
class ExpectedRound:
    """One round as every party can compute it: its plan, and the layouts of its sums, means and requests."""

    plan: RoundPlan
    layouts: dict[str, Layout]
    means: dict[str, Layout]
    down: Layout


@dataclass
class ExpectedRounds:
    """The expected rounds of a run, computed once for all clients of this process."""

    method: Method
    initial: Tensors
    terms: Terms
    personal: Sequence[str]
    acceptable: Acceptable | None = None
    _last: tuple[int, Layout, ExpectedRound] | None = field(default=None, repr=False)
    _accepted: tuple[Parameters, int] | None = field(default=None, repr=False)

    def require_terms(self, stage: Stage) -> None:
        """`require_terms`, checked once for the very object that all clients of this process receive."""
        found = stage.parameters, stage.round
        if self._accepted is None or found[0] is not self._accepted[0] or found[1] != self._accepted[1]:
            require_terms(stage.parameters, self.terms, stage.round)
            self._accepted = found

    def expected(self, request: Request) -> ExpectedRound:
        """The request's round. A method whose tensors shrink takes possible shapes from the request."""
        shapes = Layout.of(request.tensors) if isinstance(self.method, Shrinking) else Layout(())
        if self._last is None or self._last[:2] != (request.round, shapes):
            self._last = request.round, shapes, self._computed(self._state(request))
        return self._last[2]

    def _state(self, request: Request) -> State:
        if not isinstance(self.method, Shrinking):
            return State(self.initial, round=request.round)
        tensors = self.initial | request.tensors
        if not self.method.admits(request.round, self.initial, tensors):
            raise _not_called_for(request)
        return State(tensors, round=request.round)

    def _computed(self, state: State) -> ExpectedRound:
        plan = self.method.plan(state)
        protection = self.terms.protection
        layouts = {name: protection.layout(self.method, state, name, self.personal) for name in plan.passes}
        counters = protection.contribution_mechanism.counters
        means = {
            name: Layout(tuple(entry for entry in layout.entries if entry[0] not in counters))
            for name, layout in layouts.items()
        }
        down = state.tensors.select(name for name in plan.down if name not in self.personal)
        return ExpectedRound(plan, layouts, means, Layout.of(down))


def require_terms(parameters: Parameters, terms: Terms, round_: int) -> None:
    """Refuse a session whose parameters differ from the run's terms in anything but its number, its clients, its layout and its
    words' encoding.

    Also refuse clients that the run does not have, and in a public order those whose turn it is not.
    """
    own = terms.parameters(parameters.round, parameters.clients, parameters.layout, parameters.length, parameters.bound)
    if own != parameters:
        raise Tampering("the session's parameters are not those of the run's configuration", protected=_NOTHING)
    if terms.clients is not None and max(parameters.clients) >= terms.clients:
        raise Tampering("the server invites a client that the run does not have", protected=_NOTHING)
    if terms.order is not None and not set(parameters.clients) <= set(terms.order.of_round(round_)):
        raise Tampering("the server invites clients whose turn it is not in the public order", protected=_NOTHING)


def contributors(stage: Stage, me: int, terms: Terms) -> frozenset[int] | None:
    """The contributors to the sum, None if clients do not learn them. Refuses a list that is wrong about this client."""
    clients, sent = stage.parameters.clients, stage.listed
    if not terms.declares:
        if sent is not None:
            raise Tampering(
                "the server sent a list of contributors, and the run's configuration has none", protected=_NOTHING
            )
        return None if terms.varies else frozenset(clients)
    if sent is None or sent.layout != stage.parameters.layout:
        raise Tampering("the list of contributors differs from the list at the session's start", protected=_NOTHING)
    listed = frozenset(sent.contributors)
    if not listed <= set(clients) or (me in listed) != (stage.request is not None):
        raise Tampering("the list of contributors contradicts the request to this client", protected=_NOTHING)
    require_enough(listed, stage.parameters, terms)
    return listed


def require_enough(contributing: Collection[int], parameters: Parameters, terms: Terms) -> None:
    """Aborted if too few clients contribute for their sum to hide each of them."""
    fewest, found = terms.fewest(len(parameters.clients)), len(contributing)
    if found < fewest:
        raise Aborted(
            f"{found} clients contribute to the sum and the others send zeros: at least {fewest} must contribute"
        )


def require_expected(request: Request, stage: Stage, rounds: ExpectedRounds) -> None:
    """Refuse a request, or an encoding of it, that does not follow from the run's configuration."""
    expected, terms, parameters = rounds.expected(request), rounds.terms, stage.parameters
    passes = expected.plan.passes
    first = bool(passes) and request.pass_name == passes[0]
    layout = expected.layouts.get(request.pass_name)
    same = (
        layout is not None
        and request.plan == replace(expected.plan, down=request.plan.down)
        and request.layout == layout.digest
        and request.round == stage.round
        and _same_for_all(request, stage)
        and {name: Layout.of(mean) for name, mean in request.means.items()}
        == {name: expected.means[name] for name in passes[: passes.index(request.pass_name)]}
        and Layout.of(request.tensors) == (expected.down if first else Layout(()))
        and all(part.dtype == torch.float32 for part in request.tensors.parts().values())
        and (rounds.acceptable is None or not rounds.acceptable.fault(request))
        and 0 <= request.lr < math.inf
        and request.clip_norm > 0
    )
    if layout is None or not same:
        raise _not_called_for(request)
    encoding = terms.encoding(layout.size, request.clip_norm)
    if (parameters.length, parameters.bound) != (encoding.length, encoding.largest):
        raise Tampering("the session's words are not those of the run's configuration", protected=_NOTHING)


def _same_for_all(request: Request, stage: Stage) -> bool:
    """Whether this is the request of the session, and so of every contributor in it."""
    if stage.listed is not None:  # `contributors` compares it with the session's own
        return request.digest == stage.listed.request
    return request.digest == stage.parameters.layout.hex()


def _not_called_for(request: Request) -> Tampering:
    return Tampering(
        f"the request in pass {request.pass_name!r:.40} of round {request.round + 1} is not the one that the run's "
        "configuration requires",
        protected=_NOTHING,
    )


@dataclass
class Passes:
    """The memory of one client about the latest round that it contributed to, which binds later passes of a round to its first.

    A server that lies could run two first passes, one honest and one in which nothing can be learned, and then a second pass
    over one client of the former and the other clients of the latter: the sum would be that one client's message. A server need
    not even lie: the sums of a first pass over all clients and of a second pass over all but one differ by the message of that
    one client, seen through the two bases. So a client contributes to a later pass only if

    - the request carries the digest of the first request that this client trained under in this round. The session holds the
      digest of the later request, so clients with other first requests are in other sessions, whose masks do not cancel;
    - where masks alone hide its contribution, the later sum is over exactly the clients of the first one.

    The second condition is waived where every sum carries noise that the guarantee counts (`privacy.noise` = "distributed"
    or "local"), or where the server is trusted with the sums ("central"). A client that does not learn the contributors cannot
    check it: where coins draw the cohort and `secure_aggregation.active` is false.

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


def require_plausible(decoded: Contribution, encoding: Encoding, contributors: int) -> None:
    """Tampering if the decoded sum cannot come from `contributors` honest contributors."""
    if isinstance(encoding, Rounded):
        faults = _of_words(decoded, encoding, contributors)
    else:
        faults = _of_noised(decoded, encoding, contributors)
    if what := next(faults, ""):
        raise _spoiled(what, contributors)


def require_plausible_release(released: Tensors, clip_norm: float, std: float, contributors: int) -> None:
    """Tampering if a sum with noise of standard deviation `std` cannot come from `contributors` honest contributors.

    The length of honest noise is beyond this limit with a probability of at most exp(-40).
    """
    size = sum(part.numel() for part in released.parts().values())
    norm = released.norm()
    if not norm <= contributors * clip_norm + std * (math.sqrt(size) + _FARTHEST):
        raise _spoiled(f"the noised sum is {norm:.6g} long", contributors)


def _spoiled(what: str, contributors: int) -> Tampering:
    return Tampering(
        f"{what}, which {contributors} honest contributors cannot make: a client lied about its input, and nobody can tell "
        "which one",
        stage="unmask",
        protected="nothing was released of this sum",
    )


def _of_words(decoded: Contribution, encoding: Rounded, contributors: int) -> Iterator[str]:
    off = contributors * encoding.codec.error  # rounding, at most
    values = decoded.values / encoding.most
    largest, weight = float(np.abs(values).max(initial=0.0)), decoded.weight / encoding.most
    if largest > contributors * encoding.plan.bound + off:
        yield f"a coordinate of the sum is {largest:.6g}"
    slack = off / encoding.plan.bound
    if not -slack <= weight <= contributors + slack:
        yield f"the contributors' weights add up to {decoded.weight:.6g}"
    if abs(decoded.loss) > LOSS * (1 + 4 * encoding.codec.error / encoding.plan.bound):  # false for NaN
        yield f"the mean loss is {decoded.loss:.6g}"
    if encoding.most == 1 and abs(weight - round(weight)) > slack:
        yield f"weights of 0 or 1 add up to {decoded.weight:.6g}"
    if decoded.contributed is None:
        return
    if not weight - slack <= decoded.contributed <= contributors or (
        encoding.most == 1 and round(weight) != decoded.contributed
    ):
        yield f"{decoded.contributed} contributions are counted, with weights of {decoded.weight:.6g}"


def _of_noised(decoded: Contribution, encoding: Noised, contributors: int) -> Iterator[str]:
    """The noise of n shares is subgaussian, so its length is beyond sqrt(d) + sqrt(2 t) deviations with probability exp(-t) at
    most (Hsu, Kakade and Zhang, 2012): t = 40."""
    norm, grid = float(np.linalg.norm(decoded.values)), encoding.mechanism.grid(encoding.plan.size)
    noise = encoding.mechanism.std(encoding.plan.clip_norm, encoding.plan.size, contributors)
    longest = contributors * grid.bound / grid.unit * encoding.plan.clip_norm + noise * (
        math.sqrt(encoding.plan.size) + _FARTHEST
    )
    if norm > longest:
        yield f"the noised sum is {norm:.6g} long"
