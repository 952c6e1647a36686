"""Every lie is noticed by the right party in the right stage, and by nobody once the check against it is removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import protocols.client
import protocols.roster
import protocols.server
from protocols.client import Client
from protocols.errors import Aborted, ParameterError
from protocols.graph import Graph
from protocols.lies import ATTACKS
from protocols.parameters import Parameters, Policy
from protocols.record import InMemory
from protocols.server import Server
from protocols.simulate import Report, Simulation, simulate
from protocols.wire import Reader
from tests.cells import chosen, every

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


# The modes of the quick tests, by (needs a ring, needs signatures).
MOST_CHECKED = {
    **{(False, False): ("passive", "chosen"), (False, True): ("active", "chosen")},
    **{(True, False): ("ring", "chosen"), (True, True): ("chosen",)},
}
CASES = [(kind, mode) for kind in NOTICED for mode in modes(kind)]


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
        ((kind, mode, 0.0) for kind, mode in CASES if mode in MOST_CHECKED[kind in RING_ONLY, kind in SIGNED_ONLY]),
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


# --- with the check removed


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
