"""Against a server that may lie: signed keys, an agreed list of survivors, and on a ring a graph that all drew together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocols import costs
from secure_fed.transport import Recording
from tests.secure_fed import toys
from tests.secure_fed.masked.wide_toys import (
    MASKED,
    PAIRS,
    PRIVACY,
    SKETCH,
    WAYS,
    Losing,
    federation,
    listen,
    one_round,
)

TEN = [4] * 10
ACTIVE = {**MASKED, "secure_aggregation.active": True}
RING = {**ACTIVE, "secure_aggregation.neighbours": 6, "secure_aggregation.corrupt": 0.0}
STAGES = ["advertise", "share", "mask", "consistency", "unmask"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ACTIVE, RING], ids=["complete", "ring"])
@pytest.mark.parametrize(("way", "privacy"), [pair for pair in PAIRS if pair[0] in ("fedlora", "fra_lora sketch")])
def test_a_run_goes_from_end_to_end(way: str, privacy: str, kind: dict[str, Any]) -> None:
    cohort = 10 if privacy != "hidden" else 4
    settings = {**kind, **WAYS[way], **PRIVACY[privacy], "federation.cohort": cohort, "federation.rounds": 2}
    built = federation(settings, sizes=TEN)
    recording = built.transport = Recording(built.transport)
    result = built.run()
    names = [ask.name for ask, reply in recording.exchanges if (ask.round, reply.client) == (1, 4)]
    expected = STAGES if kind is ACTIVE else [STAGES[0], "reveal", *STAGES[1:]]
    assert names == expected * (2 if "sketch" in way else 1)
    assert result.summary["secure_aggregation"]["active"] is True
    assert result.summary["secure_aggregation"]["neighbours"] == (9 if kind is ACTIVE else 6)
    for ask, reply in recording.exchanges:
        assert len(reply.message) == costs.traffic(ask.parameters)[ask.name].up
        assert any(ask.parameters.registry)


@pytest.mark.parametrize("settings", [{}, SKETCH], ids=["fedlora", "sketch"])
def test_the_result_is_that_of_a_server_that_is_trusted_to_keep_to_the_protocol(settings: dict[str, Any]) -> None:
    runs = [federation({**kind, **settings}, sizes=TEN).run() for kind in (MASKED, ACTIVE, RING)]
    assert toys.same(runs[0].state.tensors, runs[1].state.tensors)
    assert toys.same(runs[0].state.tensors, runs[2].state.tensors)


def test_every_sum_on_a_ring_draws_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from protocols import server as protocol

    graphs: list[Any] = []
    closing = protocol.Server.close

    def noting(self: Any) -> Any:
        sent = closing(self)
        if self.stage == "mask":
            graphs.append(tuple(tuple(self._graph.neighbours(client)) for client in range(16)))
        return sent

    monkeypatch.setattr(protocol.Server, "close", noting)
    sixteen = [4] * 16  # which have 15! / 2 graphs: of ten, two in a hundred thousand would be one
    federation({**RING, "secure_aggregation.neighbours": 4, "federation.rounds": 5}, sizes=sixteen).run()
    assert len(graphs) == 5
    assert len(set(graphs)) == 5
    assert all(len(neighbours) == 4 for graph in graphs for neighbours in graph)


def test_whoever_keeps_its_part_of_the_randomness_is_left_out_of_a_new_draw() -> None:
    built = federation({**RING, "secure_aggregation.dropout": 0.2}, sizes=TEN)
    heard = listen(built)
    recording = Recording(built.transport)
    seen = one_round(built, transport=Losing(recording, dict.fromkeys((3, 8), "reveal")))
    stayed = set(range(10)) - {3, 8}
    assert set(heard.replies[0, "change"]) == stayed
    np.testing.assert_allclose(seen.means["change"], np.mean(list(heard.values(0, "change").values()), 0), atol=1e-7)
    sessions = {ask.parameters.session for ask, _ in recording.exchanges}
    assert len(sessions) == 2
    assert seen.record["masked"]["survivors"] == 8
    sent = sum(len(reply.message) for _, reply in recording.exchanges)
    assert seen.record["bytes_up"] == sent, "what the first attempt took is counted"


@pytest.mark.slow
@pytest.mark.parametrize("way", [{}, SKETCH], ids=["fedlora", "sketch"])
@pytest.mark.parametrize(
    ("kind", "cohort", "clients", "rounds"), [(MASKED, 6, 12, 12), (ACTIVE, 44, 48, 4)], ids=["passive", "active"]
)
def test_secret_cohorts_from_which_some_vanish(
    kind: dict[str, Any], cohort: int, clients: int, rounds: int, way: dict[str, Any]
) -> None:
    """Where the server may lie, only a cohort that coins hardly ever draw too small is allowed."""
    settings = {
        **kind,
        **way,
        **PRIVACY["central"],
        "federation.cohort": cohort,
        "federation.vanishing": 0.25,
        "secure_aggregation.dropout": 0.25,
        "secure_aggregation.corrupt": 0.05,
        "federation.rounds": rounds,
    }
    result = federation(settings, sizes=[3] * clients).run()
    assert result.summary["rounds"] == rounds
    assert {record["masked"]["survivors"] for record in result.records} == {None}
