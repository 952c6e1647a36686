"""The reports of the simulation agree with the sessions that it plays.

Every lie is noticed by the right party in the right stage, and by nobody once the check against it is removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import protocols.client
import protocols.roster
import protocols.server
from protocols import lies
from protocols import simulate as module
from protocols.client import Client
from protocols.errors import Aborted, ParameterError
from protocols.graph import Graph
from protocols.lies import ATTACKS
from protocols.parameters import Parameters, Policy, stages
from protocols.record import InMemory
from protocols.server import Server
from protocols.simulate import Report, Simulation, departures, simulate
from protocols.wire import Masked, Reader, traffic
from tests.cells import chosen, every

RING = {"clients": 24, "neighbours": 10, "corrupt": 0.0}
SESSIONS: dict[str, dict[str, Any]] = {
    "passive": {"clients": 9},
    "active": {"clients": 9, "active": True},
    "ring": RING,
    "ring, active": {**RING, "active": True},
    "64 bits": {"clients": 6, "bits": 64},
    "two": {"clients": 2, "corrupt": 0.0},
}


def simulation(**options: Any) -> Simulation:
    return Simulation(**{"clients": 9, "dim": 30, **options})


@pytest.mark.parametrize("options", SESSIONS.values(), ids=SESSIONS)
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


@every("active", [False, True])
@every(("clients", "dropout"), [(16, 0.05), (11, 0.2), (10, 0.3)])
def test_with_dropouts_a_complete_graph_always_finishes(clients: int, dropout: float, active: bool) -> None:
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


@pytest.mark.parametrize("options", [SESSIONS["passive"], SESSIONS["ring, active"]], ids=["passive", "chosen"])
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


@pytest.mark.parametrize("mode", ["passive", "active", "ring, active"])
def test_weak_masks_replace_the_masks_that_the_liar_added(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zeros for its weak stream, the server receives the plain vector of the liar."""
    plain, received, mask, receive = dict[int, Any](), dict[int, Any](), Client.mask, Server.receive

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
    simulate(Simulation(**SESSIONS[mode], dim=8, tamper="weak-masks"))
    assert len([client for client in received if np.array_equal(received[client], plain[client])]) == 1


collect, masks_left = protocols.client.collect, protocols.server.masks_left  # as they are, unpatched

MODES: dict[str, dict[str, Any]] = {
    "passive": {"clients": 8},
    "active": {"clients": 8, "active": True},
    "ring": {"clients": 16, "neighbours": 8, "corrupt": 0.0},
    "chosen": {"clients": 16, "neighbours": 8, "corrupt": 0.0, "active": True},
}
WIDER = {"clients": 24, "neighbours": 10}  # with dropouts, the remaining clients still need enough neighbours
EVERYWHERE = ("passive", "active", "ring", "chosen")
SIGNED = ("active", "chosen")

# Kind -> the party that notices, the stage, the words of its error. "roster" and "survivors": the stages that show these.
NOTICED: dict[str, tuple[str, str, str]] = {
    "weak-masks": ("server", "unmask", "a coordinate of the sum is beyond"),
    "beyond-bound": ("server", "unmask", "a coordinate of the sum is beyond"),
    "clear-metadata": ("server", "mask", "31 bytes too many at the end"),
    "small-order": ("server", "advertise", "a key of small order that would hide nothing"),
    "copied-key": ("server", "advertise", "a key of another client"),
    "repeated-id": ("server", "advertise", "has sent its message already"),
    "impostor": ("server", "advertise", "lack its signature"),
    "changed-choice": ("server", "share", "dealt its shares to others than exactly its neighbours"),
    "self-share": ("server", "share", "dealt its shares to others than exactly its neighbours"),
    "wrong-commitment": ("server", "unmask", "shares rebuild the secret that was committed to"),
    "wrong-share": ("server", "unmask", "opened wrong shares"),
    "early-drop": ("server", "share", "dealt no shares, and the sum is over the"),
    "replay": ("server", "advertise", "belongs to another session"),
    "low-threshold": ("clients", "parameters", "threshold"),
    "small-sum": ("clients", "parameters", "survivors is"),
    "downgrade": ("clients", "parameters", "needs an active session"),
    "foreign-registry": ("clients", "parameters", "identities differ from those registered at this client"),
    "swapped-key": ("clients", "roster", "lack its signature"),
    "reused-key": ("clients", "roster", "lack its signature"),
    "small-order-roster": ("clients", "roster", "a key of small order that would hide nothing"),
    "uninvited": ("clients", "roster", "was not invited"),
    "short-roster": ("clients", "roster", "take part, fewer than the"),
    "surround": ("clients", "roster", "lack its signature"),
    "other-choice": ("clients", "mask", "another choice of neighbours|listed as having dealt them"),
    "hidden-choice": ("clients", "mask", "its keys were not on the roster"),
    "withheld-delivery": ("clients", "consistency", "masked under another list of dealers|has not dealt its shares"),
    "deserted": ("clients", "mask", "have dealt shares, fewer than|have dealt shares, and no sum of fewer"),
    "altered-share": ("clients", "mask", "does not open"),
    "own-share": ("clients", "mask", "which is no neighbour|not from exactly the clients listed as having dealt"),
    "left-out": ("clients", "survivors", "leaves out this client"),
    "unlisted-survivor": ("clients", "survivors", "is not on the roster|has not dealt its shares"),
    "undealt-survivor": ("clients", "survivors", "never dealt its shares|has not dealt its shares"),
    "short-list": ("clients", "survivors", "no sum of fewer than"),
    "isolated": ("clients", "survivors", "survivors, and no sum of fewer|holders of this client's shares survive"),
    "cut-ring": ("clients", "survivors", "survivors, and no sum of fewer"),
    "listed-twice": ("clients", "survivors", "is repeated"),
    "stale-list": ("clients", "survivors", "belongs to another session"),
    "both-shares": ("clients", "unmask", "out of turn"),
    "second-unmask": ("clients", "unmask", "this session was claimed before"),
    "split-survivors": ("clients", "unmask", "the list of survivors is signed by"),
    "forged-signatures": ("clients", "unmask", "has not signed the list of survivors"),
}
SIGNED_ONLY = {
    *("impostor", "downgrade", "foreign-registry", "swapped-key", "reused-key", "surround", "other-choice"),
    *("split-survivors", "forged-signatures", "hidden-choice", "withheld-delivery", "changed-choice"),
}
RING_ONLY = {"surround", "other-choice", "hidden-choice", "changed-choice", "cut-ring"}
# Kinds of lies that do not cost the other clients, or the clients that received no lie, their sum.
EXACT = {
    *("clear-metadata", "small-order", "copied-key", "repeated-id", "impostor", "self-share", "changed-choice"),
    *("wrong-share", "early-drop", "replay", "both-shares", "second-unmask"),
}


def modes(kind: str) -> list[str]:
    offered = SIGNED if kind in SIGNED_ONLY else EVERYWHERE
    return [mode for mode in offered if kind not in RING_ONLY or "neighbours" in MODES[mode]]


CASES = [(kind, mode) for kind in NOTICED for mode in modes(kind)]
# On every change: each kind in the smallest session that it can be told in, and where clients choose if the error is another.
QUICK = [
    (kind, mode) for kind, mode in CASES if mode == modes(kind)[0] or (mode == "chosen" and "|" in NOTICED[kind][2])
]


def tampered(kind: str, mode: str, dropout: float = 0.0, **options: Any) -> Report:
    return simulate(Simulation(**{"dim": 16, "dropout": dropout, "tamper": kind, **MODES[mode], **options}))


def stage(name: str, mode: str) -> str:
    if name == "roster":
        return "share"
    if name == "survivors":
        return "consistency" if mode in SIGNED else "unmask"
    return name


def test_every_kind_is_in_the_table_here() -> None:
    assert set(ATTACKS) == set(NOTICED)
    for kind, attack in ATTACKS.items():
        assert attack.kind == kind
        assert (attack.active, attack.ring) == (kind in SIGNED_ONLY, kind in RING_ONLY)
        assert attack.does.endswith(".")
        assert attack.catcher == NOTICED[kind][0]


@pytest.mark.parametrize(
    ("kind", "mode", "dropout"),
    chosen(
        ((kind, mode, dropout) for kind, mode in CASES for dropout in (0.0, 0.08)),
        ((kind, mode, 0.0) for kind, mode in QUICK),
    ),
)
def test_a_lie_is_noticed_by_who_should_notice_it(kind: str, mode: str, dropout: float) -> None:
    catcher, when, words = NOTICED[kind]
    report = tampered(kind, mode, dropout, **(WIDER if dropout and "neighbours" in MODES[mode] else {}))
    told = report.tamper
    assert told is not None
    assert told.caught, (told, report.aborted)
    assert report.well
    assert (told.kind, told.stage) == (kind, stage(when, mode))
    assert told.by is not None
    assert told.by.startswith("client " if catcher == "clients" else "the server")
    assert any(part in told.what for part in words.split("|")), told.what
    if kind in EXACT:
        assert report.exact
    assert report.exact is not False


@every(
    ("kind", "options"),
    [
        *((kind, {"neighbours": 10}) for kind in SIGNED_ONLY),
        *((kind, {"active": True}) for kind in RING_ONLY),
        ("replay", {"clients": 4}),
        ("honesty", {}),
    ],
)
def test_what_nobody_could_notice_is_not_tried(kind: str, options: dict[str, Any]) -> None:
    """Without signatures, without a ring, or among too few clients."""
    with pytest.raises(ParameterError, match="tamper"):
        Simulation(**{"clients": 24, "dim": 4, "tamper": kind, **options})


LONG: dict[str, Any] = {
    "clients": 40,
    "dim": 16,
    "neighbours": 4,
    "corrupt": 0.0,
    "threshold": 1,  # otherwise clients left with one neighbour would refuse for that reason
}  # a ring from which four clients may drop out before a sum is too small


def test_a_long_list_that_isolates_one_client_or_cuts_the_ring_is_refused_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the check of the holders, or of the ring's connection, refuses the list."""
    for kind, words in (
        ("isolated", "0 holders of this client's shares survive"),
        ("cut-ring", "cut into separate sums"),
    ):
        told = simulate(Simulation(**LONG, tamper=kind)).tamper
        assert told is not None
        assert told.caught
        assert words in told.what
    monkeypatch.setattr(Graph, "holds_together", lambda graph, alive, window: True)
    told = simulate(Simulation(**LONG, tamper="cut-ring")).tamper
    assert told is not None
    assert not told.caught


def nothing(*arguments: object, **options: object) -> None:
    return None


def points_alone(owner: int, advert: Any) -> tuple[int, int]:
    return protocols.roster.point(advert.channel), protocols.roster.point(advert.mask)


def trusting(delivery: Any, inbound: Any, session: bytes, me: int) -> Any:
    """`collect` without the check of the shares' owners."""
    sealed = {owner: one for owner, one in delivery.sealed.items() if owner in inbound}
    return collect(type(delivery)(sealed), inbound, session, me)


def all_or_nothing(graph: Any, members: Any, *least: int) -> Any:
    """`core` of a protocol in which one early dropout aborts the session."""
    if len(members) < len(graph.order):
        raise Aborted("somebody dropped out")
    return frozenset(members)


def nobody_suspected(*arguments: Any) -> Any:
    return masks_left(*arguments)[0], frozenset()


def believing(*arguments: object) -> bool:
    return True


# Kind, mode, and the parts of the protocol to replace: owner, name, replacement.
Patches = Sequence[tuple[Any, str, Any]]
REMOVED: list[tuple[str, str, Patches]] = [
    *(
        (kind, mode, [(Server, "_check_size", nothing)])
        for kind in ("weak-masks", "beyond-bound")
        for mode in EVERYWHERE
    ),
    ("clear-metadata", "passive", [(Reader, "end", nothing)]),
    ("small-order", "passive", [(where, "usable", points_alone) for where in (protocols.server, protocols.roster)]),
    ("small-order-roster", "passive", [(protocols.roster, "usable", points_alone)]),
    ("impostor", "active", [(protocols.server, "authentic", nothing), (protocols.roster, "authentic", nothing)]),
    ("wrong-commitment", "passive", [(protocols.server, "_committed", lambda *of: believing)]),
    ("wrong-share", "passive", [(protocols.server, "masks_left", nobody_suspected)]),
    ("early-drop", "passive", [(protocols.server, "core", all_or_nothing)]),
    *((kind, "passive", [(Parameters, "session", bytes(32))]) for kind in ("replay", "stale-list")),
    ("reused-key", "active", [(Parameters, "session", bytes(32))]),
    *((kind, "active", [(Policy, "check", nothing)]) for kind in ("low-threshold", "small-sum", "downgrade")),
    ("small-sum", "passive", [(Policy, "check", nothing)]),
    *((kind, "active", [(protocols.roster, "authentic", nothing)]) for kind in ("swapped-key", "reused-key")),
    ("surround", "chosen", [(protocols.roster, "authentic", nothing), (protocols.client, "related", nothing)]),
    *(("withheld-delivery", mode, [(protocols.client, "check_statements", nothing)]) for mode in SIGNED),
    ("altered-share", "passive", [(protocols.client, "unseal", lambda *of: bytes(66))]),
    ("own-share", "ring", [(protocols.client, "collect", trusting)]),
    *(
        (kind, mode, [(protocols.client, "check_survivors", nothing)])
        for kind in ("left-out", "unlisted-survivor", "undealt-survivor", "short-list", "isolated")
        for mode in ("passive", "chosen")
    ),
    *(("cut-ring", mode, [(protocols.client, "check_survivors", nothing)]) for mode in ("ring", "chosen")),
    ("second-unmask", "active", [(InMemory, "claim", nothing)]),
    *(("split-survivors", mode, [(protocols.client, "confirmed", nothing)]) for mode in SIGNED),
    *(("forged-signatures", mode, [(protocols.client, "signs", believing)]) for mode in SIGNED),
]


ONCE = list({(kind, patches[0][1]): (kind, mode, patches) for kind, mode, patches in REMOVED}.values())


@pytest.mark.parametrize(
    ("kind", "mode", "patches"),
    chosen(REMOVED, ONCE),
    ids=[f"{kind}, {mode}, {patches[0][1]}" for kind, mode, patches in REMOVED],
)
def test_without_its_check_a_lie_goes_through(
    kind: str, mode: str, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, name, instead in patches:
        monkeypatch.setattr(where, name, instead)
    told = tampered(kind, mode).tamper
    assert told is not None
    assert not told.caught, told


def test_one_that_believes_is_enough_for_a_lie_to_have_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    check: Callable[[Policy, Parameters], None] = Policy.check
    credulous = iter([True])

    def all_but_one(policy: Policy, parameters: Parameters) -> None:
        if not next(credulous, False):
            check(policy, parameters)

    monkeypatch.setattr(Policy, "check", all_but_one)
    told = tampered("small-sum", "passive").tamper
    assert told is not None
    assert not told.caught
    assert "not every party that had to notice did" in told.what


def test_the_wrong_one_noticing_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that refuse every message, with another error, have not caught the lie."""

    def refuses(self: Client, message: bytes) -> bytes:
        raise Aborted("no reason")

    monkeypatch.setattr(Client, "share", refuses)
    told = tampered("swapped-key", "active").tamper
    assert told is not None
    assert (told.caught, told.by) == (False, None)
    assert "the first error, in stage share, was raised by client" in told.what
    assert "no reason" in told.what
