"""The reports of the simulation agree with the sessions that it plays."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from protocols import lies
from protocols import simulate as module
from protocols.client import Client
from protocols.errors import ParameterError
from protocols.parameters import stages
from protocols.server import Server
from protocols.simulate import Simulation, departures, simulate
from protocols.wire import Masked, traffic
from tests.cells import every

RING = {"clients": 24, "neighbours": 10, "corrupt": 0.0}
MODES: dict[str, dict[str, Any]] = {
    "passive": {"clients": 9},
    "active": {"clients": 9, "active": True},
    "ring": RING,
    "ring, active": {**RING, "active": True},
    "64 bits": {"clients": 6, "bits": 64},
    "two": {"clients": 2, "corrupt": 0.0},
}
every_mode = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


def simulation(**options: Any) -> Simulation:
    return Simulation(**{"clients": 9, "dim": 30, **options})


@every_mode
def test_everybody_stays_and_the_sum_is_exact_at_the_promised_cost(options: dict[str, Any]) -> None:
    asked = simulation(**options)
    report = simulate(asked)
    assert (report.exact, report.aborted, report.tamper) == (True, None, None)
    assert (report.survivors, report.dropped, report.well) == (asked.clients, 0, True)
    promised = traffic(asked.parameters(()))
    chosen = asked.parameters(()).chosen  # then the number of clients near a client is random
    for stage in report.stages:
        up, down = promised[stage.name]
        assert (stage.bytes_up, stage.bytes_down) == (up, pytest.approx(down, rel=0.15 if chosen else 0))
    assert [stage.answered for stage in report.stages] == [asked.clients] * len(promised)
    if not chosen:
        assert report.bytes_total == asked.clients * sum(up + down for up, down in promised.values())
    for stage in report.stages:
        assert 0 < stage.client_seconds <= stage.client_seconds_most
        assert stage.server_seconds > 0


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dropout", [0.05, 0.2, 0.3])
def test_with_dropouts_a_complete_graph_always_finishes(dropout: float, active: bool) -> None:
    for clients in (10, 11, 16):
        report = simulate(simulation(clients=clients, dropout=dropout, active=active, corrupt=0.05))
        assert report.dropped == round(dropout * clients)
        assert report.exact, report.aborted
        assert clients - report.dropped <= report.survivors <= clients
        assert [stage.answered for stage in report.stages][-1] == clients - report.dropped


def one_survivor_less(server: Server) -> NDArray[Any]:
    server.survivors = server.survivors[1:]
    return TOTAL(server)


TOTAL = Server.total


@pytest.mark.parametrize("wrong", [lambda server: TOTAL(server) + np.uint32(1), one_survivor_less])
def test_a_wrong_sum_or_one_over_others_than_the_survivors_is_called_wrong(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "total", wrong)
    report = simulate(simulation())
    assert (report.exact, report.well, report.aborted) == (False, False, None)


def test_with_too_many_gone_there_is_no_sum_and_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "departures", lambda parameters, count: {"mask": [0, 1, 2, 3]})
    report = simulate(simulation(clients=10))
    assert (report.exact, report.well, report.survivors) == (None, False, 0)
    assert report.aborted
    assert [stage.name for stage in report.stages] == ["advertise", "share", "mask"]


@pytest.mark.parametrize("options", [MODES["passive"], MODES["ring, active"]], ids=["passive", "chosen"])
def test_departures_are_spread_over_the_stages_and_differ_from_run_to_run(options: dict[str, Any]) -> None:
    parameters = simulation(**{**options, "clients": 24}).parameters(())
    seen = set()
    for _ in range(20):
        leaving = departures(parameters, 11)
        gone = [client for clients in leaving.values() for client in clients]
        assert len(gone) == len(set(gone)) == 11
        assert set(gone) <= set(parameters.clients)
        assert set(leaving) == set(stages(parameters))
        assert max(map(len, leaving.values())) - min(map(len, leaving.values())) <= 1
        seen.add(str(sorted(leaving.items())))
    assert len(seen) > 15


@pytest.mark.nightly
def test_of_five_hundred_clients_some_vanish_before_the_first_shares_are_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an active session clients drop out before every stage, from the first on."""
    gone = {"advertise": [3, 4, 5], "share": [77, 78, 79], "mask": [100, 200], "consistency": [300], "unmask": [400]}
    monkeypatch.setattr(module, "departures", lambda parameters, count: gone)
    report = simulate(simulation(clients=500, dim=4, dropout=0.02, active=True))
    assert report.exact, report.aborted
    assert report.survivors == 492


@pytest.mark.parametrize("place", [0, 1])
def test_an_early_loss_leaves_the_sum_of_the_others(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients drop out in the first or the second stage of an active session: no stage needs all clients."""
    monkeypatch.setattr(module, "departures", lambda parameters, count: {stages(parameters)[place]: [0, 7]})
    report = simulate(simulation(**RING, dropout=0.1, active=True))
    assert report.exact, report.aborted
    assert report.survivors == 22


def test_what_is_given_is_kept_to_and_the_rest_is_chosen() -> None:
    asked = simulation(clients=24, neighbours=10, threshold=8, active=True, corrupt=0.0)
    assert (asked.choice.neighbours, asked.choice.threshold) == (10, 8)
    parameters = asked.parameters(())
    assert (parameters.neighbours, parameters.threshold, parameters.survivors) == (10, 8, 22)
    chosen = simulation(clients=40, dropout=0.2)
    assert (chosen.choice.survivors, chosen.parameters(()).survivors) == (32, 32)
    assert simulation(clients=40).choice.survivors == 36  # a tenth may be missing even if dropout is 0
    assert simulation(clients=40, dropout=0.2, tamper="early-drop").choice.survivors == 31


@every(
    ("name", "value"),
    [
        *(("clients", value) for value in (1, 10**7)),
        *(("dim", value) for value in (0, 10**12)),
        *(("dropout", value) for value in (-0.1, 1.0, float("nan"), 0.9)),
        ("bits", 16),
        *(("corrupt", value) for value in (1.0, float("nan"), 0.95)),
        *(("neighbours", value) for value in (0, 7)),
        *(("threshold", value) for value in (99, 0)),
        ("tamper", "nonsense"),
    ],
)
def test_what_cannot_be_simulated_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=name):
        simulation(**{"clients": 30, name: value})


def test_progress_is_told_of_every_client() -> None:
    told: list[tuple[str, int, int]] = []
    simulate(simulation(clients=4), progress=lambda *now: told.append(now))
    assert told == [(stage, done, 4) for stage in ("advertise", "share", "mask", "unmask") for done in (1, 2, 3, 4)]


def test_a_report_is_json() -> None:
    report = simulate(simulation(dropout=0.2, active=True))
    told = report.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert (told["clients"], told["dim"], told["bits"], told["active"], told["dropped"]) == (9, 30, 32, True, 2)
    assert (told["exact"], told["aborted"], told["tamper"]) == (True, None, None)
    assert told["failure"] == told["abort_probability"] == 0


@pytest.mark.parametrize(("clients", "active"), [(12, False), (12, True), (110, True)])
def test_weak_masks_replace_the_masks_that_the_liar_added(
    clients: int, active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With zeros for its weak stream the server receives the plain vector of the liar; each of 110 chooses its neighbours."""
    plain: dict[int, Any] = {}
    received: dict[int, Any] = {}
    mask, receive = Client.mask, Server.receive

    def masked(self: Client, message: bytes, vector: Any) -> bytearray:
        plain[self.me] = np.array(vector)
        return mask(self, message, vector)

    def taken(self: Server, client: int, message: bytes) -> None:
        if self.stage == "mask":
            received[client] = Masked.from_bytes(bytearray(message), self.parameters, client).vector
        receive(self, client, message)

    monkeypatch.setattr(Client, "mask", masked)
    monkeypatch.setattr(Server, "receive", taken)
    monkeypatch.setattr(lies, "random", SimpleNamespace(Random=lambda seed: SimpleNamespace(randbytes=bytes)))
    simulate(Simulation(clients=clients, dim=8, active=active, corrupt=0.05, tamper="weak-masks"))
    assert len([client for client in received if np.array_equal(received[client], plain[client])]) == 1
