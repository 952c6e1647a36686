"""Sums with `active = true`, against a lying server: signed keys, an agreed list of survivors, neighbours chosen by clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocols import wire
from secure_fed.rounds.transport import Recording
from tests.cells import chosen
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

TWELVE = [4] * 12
ACTIVE = {**MASKED, "secure_aggregation.active": True}
CHOSEN = {**ACTIVE, "secure_aggregation.neighbours": 8, "secure_aggregation.corrupt": 0.0}
KINDS = {"complete": ACTIVE, "chosen": CHOSEN}
STAGES = ["advertise", "share", "mask", "consistency", "unmask"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way", "privacy"),
    chosen(
        [(kind, *pair) for kind in KINDS for pair in PAIRS if pair[0] in ("fedlora", "fra_lora sketch")],
        [
            ("complete", "fedlora", "nothing"),
            ("complete", "fedlora", "hidden"),
            ("chosen", "fedlora", "local"),
            ("chosen", "fra_lora sketch", "central"),
        ],
    ),
)
def test_a_run_goes_from_end_to_end(kind: str, way: str, privacy: str) -> None:
    cohort = 12 if privacy != "hidden" else 4
    settings = {**KINDS[kind], **WAYS[way], **PRIVACY[privacy], "federation.cohort": cohort, "federation.rounds": 2}
    built = federation(settings, sizes=TWELVE)
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    result = built.run()
    names = [ask.name for ask, reply in recording.exchanges if (ask.round, reply.client) == (1, 4)]
    assert names == STAGES * (2 if "sketch" in way else 1)
    assert result.summary["secure_aggregation"]["active"] is True
    assert result.summary["secure_aggregation"]["neighbours"] == (11 if kind == "complete" else 8)
    for ask, reply in recording.exchanges:
        if kind == "complete" or ask.name != "unmask":  # the number of shares held depends on the clients' choices
            assert len(reply.message) == wire.traffic(ask.parameters)[ask.name].up
        assert any(ask.parameters.registry)


@pytest.mark.parametrize("settings", chosen([{}, SKETCH], [{}]), ids=["fedlora", "sketch"])
def test_the_result_is_that_of_a_server_that_is_trusted_to_keep_to_the_protocol(settings: dict[str, Any]) -> None:
    runs = [federation({**kind, **settings}, sizes=TWELVE).run() for kind in (MASKED, ACTIVE, CHOSEN)]
    assert toys.same(runs[0].state.tensors, runs[1].state.tensors)
    assert toys.same(runs[0].state.tensors, runs[2].state.tensors)


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
    federation({**CHOSEN, "federation.rounds": 3}, sizes=[4] * 16).run()
    assert len(set(graphs)) == len(graphs) == 3
    assert all(len(holders) == 8 for graph in graphs for holders in graph)


def test_whoever_vanishes_early_is_left_out_of_a_sum_that_goes_on() -> None:
    """The session is not restarted: no stage needs every client."""
    built = federation({**CHOSEN, "secure_aggregation.neighbours": 10, "secure_aggregation.dropout": 0.2}, sizes=TWELVE)
    heard = listen(built)
    recording = Recording(built.assembly.transport)
    seen = one_round(built, transport=Losing(recording, {3: "share", 8: "advertise"}))
    stayed = set(range(12)) - {3, 8}
    assert set(heard.replies[0, "change"]) == stayed
    np.testing.assert_allclose(seen.means["change"], np.mean(list(heard.values(0, "change").values()), 0), atol=1e-7)
    assert len({ask.parameters.session for ask, _ in recording.exchanges}) == 1
    assert seen.record["masked"]["survivors"] == 10
    assert seen.record["bytes_up"] == sum(len(reply.message) for _, reply in recording.exchanges)


@pytest.mark.slow
@pytest.mark.parametrize("way", chosen([{}, SKETCH], [{}]), ids=["fedlora", "sketch"])
@pytest.mark.parametrize(
    ("kind", "cohort", "clients", "rounds"),
    chosen([(MASKED, 6, 12, 6), (ACTIVE, 44, 48, 4)], [(MASKED, 6, 12, 6)]),
    ids=["passive", "active"],
)
def test_secret_cohorts_from_which_some_vanish(
    kind: dict[str, Any], cohort: int, clients: int, rounds: int, way: dict[str, Any]
) -> None:
    """With `active = true` only cohort sizes that coins almost never draw too small are allowed."""
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
