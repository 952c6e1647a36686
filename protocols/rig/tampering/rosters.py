"""Rosters, joint randomness and deliveries that a server has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from protocols.errors import Aborted, Tampering
from protocols.keys import Identity
from protocols.messages import SEALED, Advertise, Delivery, Reveals, Roster
from protocols.rig.scene import Attack, Inbox, Scene
from protocols.rig.tampering.means import Tell, earlier, forged, signed

Adverts = dict[int, Advertise]


def roster(change: Callable[[Scene, Adverts], None]) -> Tell:
    """All are shown a roster that was changed, save for the peer, which would know its own keys again."""

    def tell(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
        if stage != scene.stage_of("roster"):
            return inbox
        adverts = dict(Roster.from_bytes(inbox[scene.peer], scene.parameters).adverts)
        change(scene, adverts)
        lie = Roster(adverts).to_bytes(scene.parameters)
        return {client: message if client == scene.peer else lie for client, message in inbox.items()}

    return tell


def _swapped_key(scene: Scene, adverts: Adverts) -> None:
    adverts[scene.peer] = signed(scene, forged(scene), scene.peer, Identity.new())


def _small_order(scene: Scene, adverts: Adverts) -> None:
    adverts[scene.peer] = replace(adverts[scene.peer], mask=bytes(32))


def _reused_key(scene: Scene, adverts: Adverts) -> None:
    """Genuine, of the session before, in which the server may have rebuilt the key."""
    before = earlier(scene)
    adverts[scene.peer] = Advertise.from_bytes(before.said["advertise", scene.peer], before.parameters, scene.peer)


def _uninvited(scene: Scene, adverts: Adverts) -> None:
    stranger = scene.parameters.clients[-1] + 1
    adverts[stranger] = signed(scene, forged(scene), stranger, Identity.new())


def _short_roster(scene: Scene, adverts: Adverts) -> None:
    spared = (scene.peer, scene.victim)
    for client in [one for one in adverts if one not in spared][scene.parameters.survivors - 1 - len(spared) :]:
        del adverts[client]


def reveals(change: Callable[[Scene, bytes], bytes]) -> Tell:
    """All are shown joint randomness that was changed."""

    def tell(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
        if stage != "share":
            return inbox
        lie = change(scene, inbox[scene.victim])
        return dict.fromkeys(inbox, lie)

    return tell


def _chosen_graph(scene: Scene, message: bytes) -> bytes:
    parts = dict(Reveals.from_bytes(message, scene.parameters).reveals)
    parts[scene.peer] = replace(parts[scene.peer], secret=bytes(32))  # any of its choice, until the ring suits it
    return Reveals(parts).to_bytes(scene.parameters)


def _withheld_part(scene: Scene, message: bytes) -> bytes:
    parts = dict(Reveals.from_bytes(message, scene.parameters).reveals)
    del parts[scene.peer]
    return Reveals(parts).to_bytes(scene.parameters)


def delivery(change: Callable[[Scene, dict[int, bytes]], None]) -> Tell:
    """The victim is brought other shares than were dealt."""

    def tell(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
        if stage != "mask":
            return inbox
        sealed = dict(Delivery.from_bytes(inbox[scene.victim], scene.parameters).sealed)
        change(scene, sealed)
        return {**inbox, scene.victim: Delivery(sealed).to_bytes(scene.parameters)}

    return tell


def _deserted(scene: Scene, sealed: dict[int, bytes]) -> None:
    for owner in list(sealed)[scene.parameters.threshold - 1 :]:
        del sealed[owner]


def _altered_share(scene: Scene, sealed: dict[int, bytes]) -> None:
    owner = next(iter(sealed))
    sealed[owner] = sealed[owner][:-1] + bytes([sealed[owner][-1] ^ 1])


def _own_share(scene: Scene, sealed: dict[int, bytes]) -> None:
    sealed[scene.victim] = bytes(SEALED)


ROSTERS = (
    Attack(
        "swapped-key",
        "The server shows all others its own keys in the place of one client's, to sit in the middle.",
        "clients",
        "roster",
        Tampering,
        active=True,
        tell=roster(_swapped_key),
    ),
    Attack(
        "reused-key",
        "The server shows all others the keys that one client advertised in an earlier session, with its signature of then.",
        "clients",
        "roster",
        Tampering,
        active=True,
        tell=roster(_reused_key),
    ),
    Attack(
        "small-order-roster",
        "The server shows all others a mask key of small order as one client's.",
        "clients",
        "roster",
        Tampering,
        tell=roster(_small_order),
    ),
    Attack(
        "uninvited",
        "The server puts a client of its own on the roster.",
        "clients",
        "roster",
        Tampering,
        tell=roster(_uninvited),
    ),
    Attack(
        "short-roster",
        "The server shows a roster of fewer clients than the least sum has.",
        "clients",
        "roster",
        Aborted,
        tell=roster(_short_roster),
    ),
    Attack(
        "surround",
        "The server changes one client's part of the joint randomness, to pick the graph and surround whom it likes.",
        "clients",
        "share",
        Tampering,
        active=True,
        ring=True,
        tell=reveals(_chosen_graph),
    ),
    Attack(
        "withheld-part",
        "The server leaves out one client's part of the joint randomness, to choose between two graphs.",
        "clients",
        "share",
        Aborted,
        active=True,
        ring=True,
        tell=reveals(_withheld_part),
    ),
    Attack(
        "deserted",
        "The server says to one client that its neighbourhood dropped out, all but a few that collude.",
        "clients",
        "mask",
        Aborted,
        tell=delivery(_deserted),
    ),
    Attack(
        "altered-share",
        "The server changes a bit of what one client sealed for another.",
        "clients",
        "mask",
        Tampering,
        tell=delivery(_altered_share),
    ),
    Attack(
        "own-share",
        "The server delivers to a client a share in its own name.",
        "clients",
        "mask",
        Tampering,
        tell=delivery(_own_share),
    ),
)
