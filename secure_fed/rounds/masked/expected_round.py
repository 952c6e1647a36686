"""The round that a client expects: it computes every request from the run's configuration and refuses any other.

A client that obeyed any request would leak: through the bound of a sum, through an error that only a training client makes, or
through a tensor that is not part of the round. So it computes the round itself and compares before it trains, and before it
tosses its coin for whether to train.

The starting tensors of later rounds, the means of earlier passes and an adapted clip norm cannot be computed by the client.
They have to be the same for all clients in the sum; otherwise the server could make all clients but one contribute zero, by
starting them where the gradient is zero. So a session's parameters hold a digest of the whole request (`Request.digest`), each
client compares it with its own request, and clients whose sessions have different parameters share no masks. A later pass
carries the digest of the round's first request (`bound`).

Where the server's coins draw the cohort and other clients send zeros in the same sum, a lying server could claim that its
coins drew a single client. With `secure_aggregation.active` the digest therefore also covers the list of contributors
(`ContributorList`). Every client checks that the list agrees with its own request, and neither masks nor signs a sum with fewer
contributors than `Terms.fewest`.

Everybody may know what a phantom contributes, so it hides nobody. Phantoms are not counted as contributors, and where
the cohort is of fixed size no more of them may be invited than the run's configuration has in a sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from protocols.errors import Aborted, Tampering
from protocols.parameters import Parameters
from secure_fed.methods.method import Method, RoundPlan, Shrinking, State
from secure_fed.rounds.acceptable import Acceptable
from secure_fed.rounds.masked.terms import Terms
from secure_fed.rounds.transport import Request, Stage
from secure_fed.tensors.tensors import Layout, Tensors


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

    Also refuse more phantoms in a sum than the run has, and in a public order clients whose turn it is not.
    """
    own = terms.parameters(parameters.round, parameters.clients, parameters.layout, parameters.length, parameters.bound)
    if own != parameters:
        raise Tampering("the session's parameters are not those of the run's configuration", protected=_NOTHING)
    somebody = terms.of_somebody(parameters.clients)
    if terms.order is not None and not set(somebody) <= set(terms.order.of_round(round_)):
        raise Tampering("the server invites clients whose turn it is not in the public order", protected=_NOTHING)
    phantoms = len(parameters.clients) - len(somebody)
    if not terms.varies and phantoms > terms.protection.beside:
        raise Tampering(
            f"{phantoms} of the {len(parameters.clients)} clients that the server invites are phantoms, and the run's "
            f"configuration has {terms.protection.beside} in a sum",
            protected=_NOTHING,
        )


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
    """Aborted if too few clients, phantoms apart, contribute for their sum to hide each of them."""
    fewest, found = terms.fewest(len(parameters.clients)), len(terms.of_somebody(contributing))
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


_NOTHING = "nothing of this client's contribution was sent"
