"""The bounds that a client checks on every request before it trains, whatever protects the answer.

A lying server chooses the tensors that a client starts from: `attacks/lying` shows what it then learns from the answer. A
client cannot compute the state of a later round, so it cannot refuse every lie. It refuses requests that no honest server
sends:

- a learning rate other than the schedule's, or a clip norm above the configuration's, unless it adapts;
- tensors that differ from the round's plan, are not finite, or have a largest magnitude above `federation.largest_value`;
- in the first round, a state other than the initial one, which every party computes.

So a server must wait for the second round to send crafted tensors. Where a cohort's members have different states,
`masked.checks` refuses further.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from secure_fed.config import RunConfig, TrainingConfig
from secure_fed.errors import RequestError
from secure_fed.learning.training.local import scheduled_lr
from secure_fed.methods.method import Method, Shrinking, State
from secure_fed.rounds.transport import Request
from secure_fed.tensors.tensors import Tensors

_ROUNDING = 1e-4  # of the initial state, relative to a tensor's largest value, where machines differ in their rounding
_SAME = 1e-9  # of a learning rate or a clip norm


@dataclass
class Acceptable:
    """The bounds of one run. largest: `federation.largest_value`. clip_norm: the largest; None if it adapts. personal: names
    of tensors that are not sent. It remembers the last content that was acceptable, with its round and pass.
    """

    method: Method
    initial: Tensors
    personal: tuple[str, ...]
    training: TrainingConfig
    rounds: int
    largest: float
    clip_norm: float | None = None
    _passed: tuple[int, str, tuple[Tensors, ...]] = field(default=(-1, "", ()), compare=False, repr=False)

    @classmethod
    def of(
        cls, config: RunConfig, method: Method, initial: Tensors, personal: tuple[str, ...], *, adapts: bool = False
    ) -> Acceptable:
        """adapts: whether the user's own mechanism adapts the clip norm, as `privacy.clip_quantile` does."""
        federation, privacy = config.federation, config.privacy
        fixed = math.inf if privacy.unit == "none" else privacy.clip
        clip = None if adapts or privacy.clip_quantile is not None else fixed
        return cls(method, initial, personal, config.training, federation.rounds, federation.largest_value, clip)

    def require(self, request: Request, client: str) -> None:
        """RequestError, with the client's name, if an honest server would not send this request."""
        if fault := self.fault(request):
            raise RequestError(
                f"client {client} refuses round {request.round + 1}: {fault}; nothing was trained or sent"
            )

    def fault(self, request: Request) -> str:
        """The reason why this request is refused; empty if it is acceptable."""
        due = scheduled_lr(self.training, request.round, self.rounds)
        if not math.isclose(request.lr, due, rel_tol=_SAME, abs_tol=0.0):
            return f"the learning rate is {request.lr:g}, and training.lr and its schedule say {due:g}"
        if not request.clip_norm > 0:
            return f"the clip norm is {request.clip_norm:g}, and it has to be above 0"
        if self.clip_norm is not None and request.clip_norm > self.clip_norm * (1 + _SAME):
            return f"the clip norm is {request.clip_norm:g}, above the run's {self.clip_norm:g}"
        return self._of_content(request)

    def _of_content(self, request: Request) -> str:
        """Clients of one process receive the very same tensors, which are checked once."""
        content = (request.tensors, *request.means.values())
        round_, pass_name, passed = self._passed
        same = (request.round, request.pass_name, len(content)) == (round_, pass_name, len(passed))
        if same and all(one is other for one, other in zip(content, passed, strict=True)):
            return ""
        fault = self._of_names(request) or self._of_values(request) or self._of_start(request)
        if not fault:
            self._passed = request.round, request.pass_name, content
        return fault

    def _of_names(self, request: Request) -> str:
        """The first pass of a round must have exactly the tensors of the round's plan.

        A request with an unknown pass name is refused by `Client`, as one out of turn.
        """
        plan = self.method.plan(State(self.initial, round=request.round))
        if request.pass_name not in plan.passes:
            return ""
        first = request.pass_name == plan.passes[0]
        due = {name for name in plan.down if first and name not in self.personal}
        shrunk = request.round and isinstance(self.method, Shrinking)
        if set(request.tensors) != due and not shrunk:
            odd = sorted(due.symmetric_difference(request.tensors))[0]
            return f"tensor {odd!r:.80} is {'missing' if odd in due else 'not one that this round sends'}"
        return ""

    def _of_values(self, request: Request) -> str:
        parts = {name: part for name, part in request.tensors.parts().items() if part.numel()}
        most = torch.stack(torch._foreach_max(torch._foreach_abs(list(parts.values())))) if parts else torch.zeros(1)
        largest = float(most.max())  # NaN if any value is NaN
        if not (math.isfinite(largest) and all(tensors.is_finite() for tensors in request.means.values())):
            return "the tensors sent have values that are not finite"
        if largest <= self.largest:
            return ""
        name = list(parts)[int(most.argmax())]
        return f"{name} has a value of {largest:.4g}, above federation.largest_value = {self.largest:g}"

    def _of_start(self, request: Request) -> str:
        """In the first round the tensors must equal the initial state, which the client computes itself."""
        if request.round:
            return ""
        for name in request.tensors:
            own, sent = self.initial.tensor(name), request.tensors.tensor(name)
            slack = _ROUNDING * (float(own.abs().max()) if own.numel() else 0.0)
            if own.shape != sent.shape or not torch.allclose(sent.to(own), own, rtol=0.0, atol=slack):
                return f"{name} differs from the initial tensor that every party computes"
        return ""
