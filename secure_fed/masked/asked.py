"""What a server may ask of a client behind masks: what the run's configuration says, and no more.

A client that obeyed whatever it is sent could be made to tell: by the bound of a sum, by the error that only one who trains
makes, by a tensor that is not the round's. So it works out for itself what a round is, and compares before it trains, and
before it tosses for whether to train.

What it cannot work out, the tensors to start from and the learning rate, has to be the same for all who are in the sum: else
all but one could be made to contribute nothing, by starting them where no gradient is. So a session's parameters hold a digest
of all that is asked (`Request.digest`), each client compares it with what it was asked for, and clients whose sessions have
other parameters have no masks in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from protocols.errors import Tampering
from protocols.parameters import Parameters
from secure_fed.masked.terms import Terms
from secure_fed.methods.method import Method, RoundPlan, Shrinking, State
from secure_fed.tensors import Layout, Tensors
from secure_fed.transport import Request


@dataclass(frozen=True)
class Foreseen:
    """One round, as every party can work it out: its plan, the layout of each pass's sum, and of what comes down."""

    plan: RoundPlan
    layouts: dict[str, Layout]
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
        down = state.tensors.select(name for name in plan.down if name not in self.personal)
        return Foreseen(plan, layouts, Layout.of(down))


def require_terms(parameters: Parameters, terms: Terms) -> None:
    """Refuse a session that differs from the run's terms in anything but its number and what its words mean."""
    own = terms.parameters(parameters.round, parameters.clients, parameters.layout, parameters.length, parameters.bound)
    if own != parameters:
        raise Tampering("the session's parameters are not those of the run's configuration", protected=_NOTHING)


def require_foreseen(request: Request, parameters: Parameters, rounds: Rounds) -> None:
    """Refuse a request, or words for it, that the run's configuration does not call for."""
    foreseen, terms = rounds.foreseen(request), rounds.terms
    first = bool(foreseen.plan.passes) and request.pass_name == foreseen.plan.passes[0]
    layout = foreseen.layouts.get(request.pass_name)
    same = (
        layout is not None
        and request.plan == replace(foreseen.plan, down=request.plan.down)
        and request.layout == layout.digest
        and _asked_of_all(request, parameters)
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


def _asked_of_all(request: Request, parameters: Parameters) -> bool:
    """Whether this is what the session, and so everybody in it, is asked for."""
    return request.digest == parameters.layout.hex()


def _not_called_for(request: Request) -> Tampering:
    return Tampering(
        f"what is asked for in pass {request.pass_name!r:.40} of round {request.round} is not what the run's configuration "
        "calls for",
        protected=_NOTHING,
    )


_NOTHING = "nothing of this client's contribution was sent"
