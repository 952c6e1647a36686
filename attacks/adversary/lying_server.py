"""A lying server: it chooses the tensors that clients start a round from, and reads one client's contribution or a sum.

Its victims are the clients of an assembled federation. They refuse the requests that they would refuse in a run, bound their
contributions, and add their noise. With masks, the protocol itself computes the sum. Nothing is charged: this is a simulation
by somebody who has the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attacks.adversary.case import Inapplicable
from secure_fed.errors import SecureFedError, expected
from secure_fed.learning.training.local import Falling, scheduled_lr
from secure_fed.methods.method import State
from secure_fed.rounds.client import Client
from secure_fed.rounds.transport import InProcess, Request, Stage
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, Tensors


class Refused(SecureFedError):  # noqa: N818 - a client's decision, no fault
    """A client, or the protocol, refused the lie. The message is the client's."""


@dataclass(frozen=True)
class LyingServer:
    """The vantage of a server that lies in one round (`round`, counted from 0).

    state: the tensors that an honest server would send in that round; None: the initial state. trusting: clients check no
    requests (`secure_fed.rounds.request_checks`), as in frameworks that check nothing.
    """

    assembly: Assembly
    round: int = 1
    state: Tensors | None = None
    trusting: bool = False

    def __post_init__(self) -> None:
        passes = self.assembly.method.plan(self.assembly.initial).passes
        if len(passes) != 1:
            raise Inapplicable(
                f"a round of {self.assembly.config.method.name} has {len(passes)} passes; a lying server attacks methods of "
                "one pass alone"
            )
        self.assembly.charges.budget = _Uncharged()

    @property
    def honest(self) -> Tensors:
        return self.assembly.initial.tensors if self.state is None else self.state

    @property
    def lr(self) -> float:
        """The scheduled learning rate; clients refuse any other."""
        return scheduled_lr(self.assembly.config.training, self.round, self.assembly.config.federation.rounds)

    @property
    def falling(self) -> Falling:
        """How the learning rate falls within the round."""
        return Falling(self.assembly.config.training, self.round, self.assembly.config.federation.rounds)

    @property
    def limit(self) -> float:
        """The largest magnitude of a value that clients accept."""
        return math.inf if self.trusting else self.assembly.config.federation.largest_value

    def request(self, tensors: Tensors) -> Request:
        """The round's request, with `tensors` replacing the honest tensors of the same names."""
        state = replace(self.assembly.initial, tensors=self.honest | tensors, round=self.round)
        server = self.assembly.server
        plan = server.plan(State(state.tensors, round=self.round))
        return server.request(state, plan, plan.passes[0], self.lr, {})

    def answer(self, client: int, tensors: Tensors, examples: Sequence[Any] | None = None) -> Tensors:
        """A client's contribution. examples: replace the client's own."""
        return self._handled(self._holding(client, examples), self.request(tensors))

    def replayed(self, client: int, tensors: Tensors, examples: Sequence[Any]) -> Tensors:
        """The contribution that a client with these examples would send, without noise, as the server simulates it.

        In a run without privacy, order and dropout come from the public seed. In a private run they are secret, so they are
        drawn afresh.
        """
        own, protection = self.assembly.clients[client], self.assembly.protection
        if protection.placement.private:
            quiet = replace(protection.mechanism, noise_multiplier=_NEXT_TO_NONE)
            protection = replace(protection, mechanism=quiet)
        simulated = own.like(examples, protection=protection, acceptable=None, attendance=None)
        return self._handled(simulated, self.request(tensors))

    def summed(
        self,
        cohort: Sequence[int],
        tensors: Tensors,
        told: Mapping[int, Tensors] | None = None,
        held: Mapping[int, Sequence[Any]] | None = None,
    ) -> Tensors:
        """The sum over a cohort: by the masked protocol if the run has one, else by an ideal sum that does not compare
        requests.

        told: tensors sent to single clients instead of `tensors`. held: examples that replace single clients' own.
        """
        masks, server, usual = self.assembly.masks, self.assembly.server, self.request(tensors)
        requests = {client: self.request((told or {}).get(client, tensors)) for client in cohort}
        everybody = {one: self._holding(one, (held or {}).get(one)) for one in cohort if one < self.clients}
        if masks is None:
            return _added([self._handled(client, requests[one]) for one, client in everybody.items()])
        before = {one: masks.clients[one].client for one in everybody}
        try:
            for one, client in everybody.items():
                masks.clients[one].client = client
            masks.begin(None)
            layout = server.layout(replace(self.assembly.initial, round=self.round), usual.pass_name)
            transport = _Telling(InProcess(masks.clients), requests, usual.digest)
            return server.gather(list(cohort), usual, layout, transport).total.total()
        except expected() as error:
            raise Refused(str(error)) from error
        finally:
            for one, client in before.items():
                masks.clients[one].client = client

    def simulated_sum(self, answers: Sequence[Tensors]) -> Tensors:
        """The sum of contributions that the server simulated, with one share of noise for each."""
        total, shares = _added(answers), self.assembly.protection.shares
        if shares is None:
            return total
        std = shares.std(self.assembly.protection.clip_norm, total.numel, len(answers))
        return Tensors((name, total.tensor(name) + std * torch.randn(total.tensor(name).shape)) for name in total)

    @property
    def clients(self) -> int:
        """The number of clients; participants with a higher index are dummies."""
        return len(self.assembly.clients)

    def _holding(self, client: int, examples: Sequence[Any] | None) -> Client:
        """The client with these examples, without its record of turns: every trial requests a contribution from it."""
        own = self.assembly.clients[client]
        bounds: dict[str, Any] = {"acceptable": None} if self.trusting else {}
        return own.like(own.examples if examples is None else examples, attendance=None, **bounds)

    def _handled(self, client: Client, request: Request) -> Tensors:
        try:
            return client.handle(request).contribution
        except expected() as error:
            raise Refused(str(error)) from error


@dataclass(frozen=True)
class _Telling:
    """A transport that gives each client its own request, in a session that matches the request.

    usual: digest of the session's own request. A client with another request gets session parameters that agree with it;
    otherwise it would refuse the request at once.
    """

    inner: InProcess
    requests: Mapping[int, Request]
    usual: str

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        return self.inner.exchange({client: self._told(client, stage) for client, stage in requests.items()})

    def _told(self, client: int, stage: Stage) -> Stage:
        request = self.requests.get(client)
        if request is None or request.digest == self.usual or stage.listed is not None:
            return stage
        parameters = replace(stage.parameters, layout=bytes.fromhex(request.digest))
        return replace(stage, parameters=parameters, request=stage.request and request)


class _Uncharged:
    """The budget of a simulation, in which nothing is released."""

    made = None

    def charge(self, round_: int, pass_name: str) -> None:
        pass

    def allowance(self, who: str, wanted: int, round_: int) -> int:
        return wanted


def _added(contributions: Sequence[Tensors]) -> Tensors:
    total = PlainSum(Layout.of(contributions[0]))
    for one in contributions:
        total.add(one)
    return total.total()


_NEXT_TO_NONE = 1e-9  # noise multiplier
