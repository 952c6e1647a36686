"""Masked sums with a method whose tensors shrink: clients take shapes from the server, if the run can have reached them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch

from protocols.errors import Tampering
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.triplet import kept, triplets
from secure_fed.methods.method import State
from secure_fed.rounds.server import Server
from secure_fed.rounds.transport import Request
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed.masked.lying import watch
from tests.secure_fed.masked.wide_toys import MASKED, federation

SETTINGS = {
    "method.name": "fedara",
    "method.rank": 4,
    "method.warmup_rounds": 1,
    "method.final_rounds": 1,
    "federation.rounds": 5,
}
Lie = Callable[[Tensors, Tensors], Tensors]  # from the initial and the honest tensors


@dataclass(frozen=True)
class Lying(Server):
    """A server that sends changed tensors in round `lies_in`, with layouts that fit them."""

    initial: Tensors = field(default_factory=Tensors)
    lies_in: int = -1
    lie: Lie = lambda initial, honest: honest

    def request(self, state: State, *given: Any) -> Request:
        request = super().request(self._lied(state), *given)
        return replace(request, tensors=self._told(state, request.tensors))

    def layout(self, state: State, pass_name: str) -> Layout:
        return super().layout(self._lied(state), pass_name)

    def _lied(self, state: State) -> State:
        """The state with the changed tensors."""
        return replace(state, tensors=state.tensors | self._told(state, state.tensors))

    def _told(self, state: State, honest: Tensors) -> Tensors:
        return self.lie(self.initial, honest) if state.round == self.lies_in else honest


def lying(masks: str, round_: int, lie: Lie) -> Federation:
    built = federation({**MASKED, **SETTINGS, "method.masks": masks})
    honest = {each.name: getattr(built.assembly.server, each.name) for each in fields(Server)}
    built.assembly = replace(
        built.assembly, server=Lying(**honest, initial=built.assembly.initial.tensors, lies_in=round_, lie=lie)
    )
    return built


def only(tensors: Tensors, live: int) -> Tensors:
    """The first `live` ranks of each module."""
    return kept(tensors, {t.module: torch.arange(len(tensors.tensor(t.e))) < live for t in triplets(tensors)})


def reshaped(part: str, shape: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    def lie(initial: Tensors, honest: Tensors) -> Tensors:
        name = getattr(triplets(honest)[-1], part)
        return honest | {name: shape(honest.tensor(name))}

    return lie


# The round of the lie, method.masks, and the lie.
LIES: dict[str, tuple[int, str, Lie]] = {
    "ranks that are gone, for votes": (4, "votes", lambda initial, honest: initial),
    "ranks that are gone": (4, "global", lambda initial, honest: initial),
    "fewer ranks than the schedule has": (2, "global", lambda initial, honest: only(honest, 0)),
    "no rank": (3, "votes", lambda initial, honest: only(initial, 0)),
    "fewer ranks in the warm-up": (1, "votes", lambda initial, honest: only(honest, 2)),
    "fewer ranks at first": (0, "global", lambda initial, honest: only(honest, 3)),
    "an A of more ranks": (3, "votes", reshaped("a", lambda a: torch.cat([a, a]))),
    "an E without a rank": (3, "votes", reshaped("e", lambda e: e[:0])),
    "a narrower B": (3, "global", reshaped("b", lambda b: b[1:])),
    "a name less": (3, "votes", lambda initial, honest: honest.without(list(honest)[:1])),
    "a name more": (3, "votes", lambda initial, honest: honest | {"x": torch.zeros(1)}),
    "no tensors": (3, "votes", lambda initial, honest: Tensors()),
    "other numbers": (3, "votes", lambda initial, honest: Tensors((n, honest.tensor(n).double()) for n in honest)),
}


@pytest.mark.parametrize("masks", ["votes", "global"])
def test_an_honest_server_is_answered_in_every_round(masks: str) -> None:
    """Shows that the refusals in the tests below are due to the lies and to nothing else."""
    result = lying(masks, 3, lambda initial, honest: honest).run()
    assert result.state.round == 5
    assert result.state.tensors.numel < federation({**MASKED, **SETTINGS}).assembly.initial.tensors.numel


QUICK = (
    "ranks that are gone",
    "fewer ranks in the warm-up",
    "fewer ranks at first",
    "an A of more ranks",
    "other numbers",
)


@pytest.mark.parametrize("what", chosen(LIES, QUICK))
def test_shapes_that_the_run_cannot_have_come_to_are_refused_before_anybody_trains(what: str) -> None:
    round_, masks, lie = LIES[what]
    built = lying(masks, round_, lie)
    seen = watch(built)
    with refused(Tampering):
        built.run()
    assert {trained for trained, _ in seen.trained} == set(range(round_))


def test_other_ranks_of_an_admitted_number_are_the_servers_choice() -> None:
    """The server may choose which ranks stay: the choice reveals no more to it than an honest one."""
    built = lying("votes", 3, lambda initial, honest: only(honest, 2))
    assert built.run().state.round == 5
