"""What a server may ask of a client behind masks: what the run's configuration says, and no more.

A client that obeyed whatever it is sent could be made to tell: by the bound of a sum, by the error that only one who trains
makes, by a tensor that is not the round's. So it works out for itself what a round is, and compares before it trains, and
before it tosses for whether to train.

What it cannot work out, the tensors to start from and the learning rate, has to be the same for all who are in the sum: else
all but one could be made to contribute nothing, by starting them where no gradient is. So a session's parameters hold a digest
of all that is asked (`Request.digest`), each client compares it with what it was asked for, and clients whose sessions have
other parameters have no masks in common. A later pass carries the digest of the round's first request (`bound`).

Where the server's coins draw the cohort and other clients send zeros in the same sum, a server that lies could say that its
coins drew one client alone. With `secure_aggregation.active` the digest is therefore of the list of contributors too (`Asked`).
Every client compares its own place on the list with what it was asked for, and neither masks nor signs a sum with fewer
contributors than `Terms.fewest`.

What a phantom contributes, everybody may know: it hides nobody. So phantoms are not counted among the contributors, and where
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
from secure_fed.rounds.masked.terms import Terms
from secure_fed.rounds.transport import Request, Stage
from secure_fed.tensors.tensors import Layout, Tensors


@dataclass(frozen=True)
class Foreseen:
    """One round, as every party can work it out: its plan, the layouts of each pass's sum and mean, and of what comes down."""

    plan: RoundPlan
    layouts: dict[str, Layout]
    means: dict[str, Layout]
    down: Layout


@dataclass
class Rounds:
    """Works out rounds for all clients of this process, once each."""

    method: Method
    initial: Tensors
    terms: Terms
    personal: Sequence[str]
    _last: tuple[int, Layout, Foreseen] | None = field(default=None, repr=False)

    def foreseen(self, request: Request) -> Foreseen:
        """The request's round. Where a method's tensors shrink, their shapes are the request's; refuses such as may not be."""
        shapes = Layout.of(request.tensors) if isinstance(self.method, Shrinking) else Layout(())
        if self._last is None or self._last[:2] != (request.round, shapes):
            self._last = request.round, shapes, self._worked_out(self._state(request))
        return self._last[2]

    def _state(self, request: Request) -> State:
        if not isinstance(self.method, Shrinking):
            return State(self.initial, round=request.round)
        tensors = self.initial | request.tensors
        if not self.method.admits(request.round, self.initial, tensors):
            raise _not_called_for(request)
        return State(tensors, round=request.round)

    def _worked_out(self, state: State) -> Foreseen:
        plan = self.method.plan(state)
        protection = self.terms.protection
        layouts = {name: protection.layout(self.method, state, name, self.personal) for name in plan.passes}
        counters = protection.contribution_mechanism.counters
        means = {
            name: Layout(tuple(entry for entry in layout.entries if entry[0] not in counters))
            for name, layout in layouts.items()
        }
        down = state.tensors.select(name for name in plan.down if name not in self.personal)
        return Foreseen(plan, layouts, means, Layout.of(down))


def require_terms(parameters: Parameters, terms: Terms) -> None:
    """Refuse a session that differs from the run's terms in anything but its number and what its words mean."""
    own = terms.parameters(parameters.round, parameters.clients, parameters.layout, parameters.length, parameters.bound)
    if own != parameters:
        raise Tampering("the session's parameters are not those of the run's configuration", protected=_NOTHING)
    phantoms = len(parameters.clients) - len(terms.of_somebody(parameters.clients))
    if not terms.varies and phantoms > terms.protection.beside:
        raise Tampering(
            f"{phantoms} of the {len(parameters.clients)} clients that the server invites are phantoms, and the run's "
            f"configuration has {terms.protection.beside} in a sum",
            protected=_NOTHING,
        )


def contributors(stage: Stage, me: int, terms: Terms) -> frozenset[int] | None:
    """Who contributes to the sum, None where clients do not learn that. Refuses a list that is wrong about this client."""
    clients, asked = stage.parameters.clients, stage.asked
    if not terms.declares:
        if asked is not None:
            raise Tampering("a list of contributors came where the run's configuration has none", protected=_NOTHING)
        return None if terms.varies else frozenset(clients)
    if asked is None or asked.layout != stage.parameters.layout:
        raise Tampering("the list of contributors is not the one that the session was begun with", protected=_NOTHING)
    listed = frozenset(asked.contributors)
    if not listed <= set(clients) or (me in listed) != (stage.request is not None):
        raise Tampering("the list of contributors does not say what this client was asked for", protected=_NOTHING)
    require_enough(listed, stage.parameters, terms)
    return listed


def require_enough(contributing: Collection[int], parameters: Parameters, terms: Terms) -> None:
    """Aborted if so few clients, phantoms apart, contribute that their sum would not hide one of them."""
    fewest, found = terms.fewest(len(parameters.clients)), len(terms.of_somebody(contributing))
    if found < fewest:
        raise Aborted(f"{found} clients contribute to the sum and the others send zeros: {fewest} at least have to")


def require_foreseen(request: Request, stage: Stage, rounds: Rounds) -> None:
    """Refuse a request, or words for it, that the run's configuration does not call for."""
    foreseen, terms, parameters = rounds.foreseen(request), rounds.terms, stage.parameters
    passes = foreseen.plan.passes
    first = bool(passes) and request.pass_name == passes[0]
    layout = foreseen.layouts.get(request.pass_name)
    same = (
        layout is not None
        and request.plan == replace(foreseen.plan, down=request.plan.down)
        and request.layout == layout.digest
        and _asked_of_all(request, stage)
        and {name: Layout.of(mean) for name, mean in request.means.items()}
        == {name: foreseen.means[name] for name in passes[: passes.index(request.pass_name)]}
        and Layout.of(request.tensors) == (foreseen.down if first else Layout(()))
        and all(part.dtype == torch.float32 for part in request.tensors.parts().values())
        and 0 <= request.lr < math.inf
        and request.clip_norm > 0
    )
    if layout is None or not same:
        raise _not_called_for(request)
    carrier = terms.carrier(layout.size, request.clip_norm)
    if (parameters.length, parameters.bound) != (carrier.length, carrier.largest):
        raise Tampering("the session's words are not those of the run's configuration", protected=_NOTHING)


def _asked_of_all(request: Request, stage: Stage) -> bool:
    """Whether this is what the session, and so every contributor in it, is asked for."""
    if stage.asked is not None:  # compared with the session's own by `contributors`
        return request.digest == stage.asked.request
    return request.digest == stage.parameters.layout.hex()


def _not_called_for(request: Request) -> Tampering:
    return Tampering(
        f"what is asked for in pass {request.pass_name!r:.40} of round {request.round} is not what the run's configuration "
        "calls for",
        protected=_NOTHING,
    )


_NOTHING = "nothing of this client's contribution was sent"
