"""Sums with `active = true`, against a lying server: signed keys, an agreed list of survivors, neighbours chosen by clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocols.errors import ProtocolError
from protocols.wire import Survivors
from secure_fed.rounds.transport import Stage
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.masked.wide_toys import MASKED, SKETCH, Tampered, federation, one_round

TWELVE = [4] * 12
ACTIVE = {**MASKED, "secure_aggregation.active": True}
CHOSEN = {**ACTIVE, "secure_aggregation.neighbours": 8, "secure_aggregation.corrupt": 0.0}


@pytest.mark.parametrize("settings", chosen([{}, SKETCH], [{}]), ids=["fedlora", "sketch"])
def test_the_result_is_that_of_a_server_that_is_trusted_to_keep_to_the_protocol(settings: dict[str, Any]) -> None:
    usual = {**settings, "federation.rounds": 1}
    first, *others = (federation({**usual, **kind}, sizes=TWELVE).run() for kind in (MASKED, ACTIVE, CHOSEN))
    assert all(toys.same(first.state.tensors, other.state.tensors) for other in others)


def test_in_every_sum_clients_choose_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from protocols import server as protocol

    graphs: list[Any] = []
    closing = protocol.Server.close

    def noting(self: Any) -> Any:
        sent = closing(self)
        if self.stage == "mask":
            graphs.append(tuple(self._graph.holders(client) for client in range(16)))
        return sent

    monkeypatch.setattr(protocol.Server, "close", noting)
    federation({**CHOSEN, "federation.rounds": 2}, sizes=[4] * 16).run()
    assert len(set(graphs)) == len(graphs) == 2
    assert all(len(holders) == 8 for graph in graphs for holders in graph)


def test_two_lists_of_survivors_are_noticed_in_active_mode() -> None:
    built = federation({**ACTIVE, "secure_aggregation.dropout": 0.25}, sizes=[4] * 8)

    def lied(client: int, stage: Stage) -> Stage:
        if stage.name != "consistency" or client < 4:
            return stage
        return replace(stage, message=Survivors(tuple(range(1, 8))).to_bytes(stage.parameters))

    with refused(ProtocolError):
        one_round(built, transport=Tampered(built.assembly.transport, lied))
