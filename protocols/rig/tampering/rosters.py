"""Rosters, choices and deliveries that a server has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from protocols.errors import Aborted, Tampering
from protocols.keys import Identity
from protocols.messages import SEALED, Advertise, Delivery, Roster
from protocols.rig.attack import Attack, lie
from protocols.rig.scene import Inbox, Scene
from protocols.rig.tampering.means import Tell, earlier, forged, signed, told
from protocols.roster import near

ROSTERS: list[Attack] = []
Adverts = dict[int, Advertise]
RosterChange = Callable[[Scene, Adverts], None]

_false_roster = partial(lie, ROSTERS, catcher="clients", stage="roster", hook="tell")
_false_mail = partial(lie, ROSTERS, catcher="clients", hook="tell")


def roster(change: RosterChange) -> Tell:
    """All clients but the peer are shown a changed roster; the peer would recognise its own keys."""

    def shown(scene: Scene, inbox: Inbox) -> Inbox:
        lie = _changed_roster(scene, inbox[scene.peer], change)
        return {client: message if client == scene.peer else lie for client, message in inbox.items()}

    return told("roster")(shown)


def near_peer(change: RosterChange) -> Tell:
    """All clients whose roster contains the peer are shown a changed roster."""

    def shown(scene: Scene, inbox: Inbox) -> Inbox:
        return {
            client: _changed_roster(scene, message, change)
            if client != scene.peer and scene.peer in Roster.from_bytes(message, scene.parameters).adverts
            else message
            for client, message in inbox.items()
        }

    return told("roster")(shown)


def _changed_roster(scene: Scene, message: bytes, change: RosterChange) -> bytes:
    """The roster of that message with its advertisements changed."""
    adverts = dict(Roster.from_bytes(message, scene.parameters).adverts)
    change(scene, adverts)
    return Roster(adverts).to_bytes(scene.parameters)


def delivery(change: Callable[[Scene, dict[int, bytes]], None]) -> Tell:
    """The victim receives other shares than were dealt."""

    def brought(scene: Scene, inbox: Inbox) -> Inbox:
        true = Delivery.from_bytes(inbox[scene.victim], scene.parameters)
        sealed = dict(true.sealed)
        change(scene, sealed)
        return {**inbox, scene.victim: Delivery(sealed, true.dealt).to_bytes(scene.parameters)}

    return told("mask")(brought)


@_false_roster("swapped-key", error=Tampering, how=roster, active=True)
def _swapped_key(scene: Scene, adverts: Adverts) -> None:
    """The server shows all others its own keys in the place of one client's, to sit in the middle."""
    adverts[scene.peer] = signed(scene, forged(scene), scene.peer, Identity.new())


@_false_roster("reused-key", error=Tampering, how=roster, active=True)
def _reused_key(scene: Scene, adverts: Adverts) -> None:
    """The server shows all others the keys that one client advertised in an earlier session, with its signature of then."""
    # Genuine, from the previous session, in which the server may have rebuilt the key.
    before = earlier(scene)
    adverts[scene.peer] = Advertise.from_bytes(before.answers["advertise", scene.peer], before.parameters, scene.peer)


@_false_roster("small-order-roster", error=Tampering, how=roster)
def _small_order_roster(scene: Scene, adverts: Adverts) -> None:
    """The server shows all others a mask key of small order as one client's."""
    adverts[scene.peer] = replace(adverts[scene.peer], mask=bytes(32))


@_false_roster("uninvited", error=Tampering, how=roster)
def _uninvited(scene: Scene, adverts: Adverts) -> None:
    """The server puts a client of its own on the roster."""
    stranger = scene.parameters.clients[-1] + 1
    adverts[stranger] = signed(scene, forged(scene), stranger, Identity.new())


@_false_roster("short-roster", error=Aborted)
def _few_choices(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """The server shows a roster of fewer clients than the least sum has."""
    # Where clients choose, the victim is shown too few of its choices; otherwise all are shown a roster that is too short.
    if not scene.parameters.chosen or stage != "share":
        return roster(_short_roster)(scene, stage, inbox)
    adverts = dict(Roster.from_bytes(inbox[scene.victim], scene.parameters).adverts)
    for client in scene.server._graph.holders(scene.victim)[scene.parameters.threshold - 1 :]:
        adverts.pop(client, None)
    return {**inbox, scene.victim: Roster(adverts).to_bytes(scene.parameters)}


def _short_roster(scene: Scene, adverts: Adverts) -> None:
    spared = (scene.peer, scene.victim)
    for client in [one for one in adverts if one not in spared][scene.parameters.survivors - 1 - len(spared) :]:
        del adverts[client]


@_false_roster("surround", error=Tampering, how=near_peer, active=True, ring=True)
def _swapped_choice(scene: Scene, adverts: Adverts) -> None:
    """The server shows those near a client another choice of neighbours than the client made, to surround whom it likes."""
    adverts[scene.peer] = replace(adverts[scene.peer], choice=bytes(32))


@_false_mail("other-choice", stage="mask", error=Tampering, how=told("mask"), active=True, ring=True)
def _other_choices(scene: Scene, inbox: Inbox) -> Inbox:
    """The server lists another choice of neighbours than a client made, so that masks are on one side only."""
    # All clients near the peer receive a list of dealers with another choice of the peer than it advertised.
    messages = dict(inbox)
    for client, message in inbox.items():
        if scene.peer in scene.clients[client]._agreed.adverts:
            true = Delivery.from_bytes(message, scene.parameters)
            lie = replace(true, dealt={**true.dealt, scene.peer: bytes(32)})
            messages[client] = lie.to_bytes(scene.parameters)
    return messages


@_false_mail("hidden-choice", stage="", error=Tampering, active=True, ring=True)
def _hide_chooser(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """The server hides from one client that another chose it as a neighbour."""
    # The victim is a client that another chose one-sidedly. It notices once it reads everybody's choice, in the next stage.
    if stage == "share":
        graph, leaving = scene.server._graph, set().union(*scene.leaving.values())
        staying = [client for client in inbox if client not in leaving]
        one_sided = (
            (client, owner)
            for client in (scene.victim, *staying)
            for owner in graph.owners(client)
            if owner in staying and owner not in graph.holders(client)
        )
        scene.victim, hidden = next(one_sided)
        adverts = dict(Roster.from_bytes(inbox[scene.victim], scene.parameters).adverts)
        del adverts[hidden]
        return {**inbox, scene.victim: Roster(adverts).to_bytes(scene.parameters)}
    if stage == "mask":
        scene.expect(scene.victim)
    return inbox


def _whatever_it_signed(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    """The server that lied to the victim accepts its vector nevertheless."""
    if (stage, client) != ("mask", scene.victim):
        scene.deliver(client, answer)
        return
    digest, scene.server._digest = scene.server._digest, scene.clients[client]._dealt
    scene.deliver(client, answer)
    scene.server._digest = digest


def _without(scene: Scene, inbox: Inbox, gone: Collection[int]) -> Inbox:
    """The victim's delivery omits the clients `gone`, as if they had not dealt."""
    true = Delivery.from_bytes(inbox[scene.victim], scene.parameters)
    lie = [{one: entry for one, entry in part.items() if one not in gone} for part in (true.sealed, true.dealt)]
    return {**inbox, scene.victim: Delivery(*lie).to_bytes(scene.parameters)}


@_false_mail("withheld-delivery", stage="consistency", error=Tampering, active=True, send=_whatever_it_signed)
def _withhold(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """The server says to one client that a neighbour has not dealt its shares, so that the two share no mask."""
    # The victim notices by the list of survivors, and the clients near it by its signature.
    if stage == "mask":
        return _without(scene, inbox, scene.server._graph.partners(scene.victim)[:1])
    if stage == "consistency":
        for client in inbox.keys() - scene.gone:
            if scene.victim in (client, *near(client, scene.server._graph, scene.server.survivors)):
                scene.expect(client)
    return inbox


@_false_mail("deserted", stage="mask", error=Aborted, how=told("mask"))
def _deserted(scene: Scene, inbox: Inbox) -> Inbox:
    """The server says to one client that its neighbourhood dropped out, all but a few that collude."""
    graph = scene.server._graph
    around = sorted({*graph.holders(scene.victim), *graph.owners(scene.victim)})
    return _without(scene, inbox, around[scene.parameters.threshold - 1 :])


@_false_mail("altered-share", stage="mask", error=Tampering, how=delivery)
def _altered_share(scene: Scene, sealed: dict[int, bytes]) -> None:
    """The server changes a bit of what one client sealed for another."""
    owner = next(iter(sealed))
    sealed[owner] = sealed[owner][:-1] + bytes([sealed[owner][-1] ^ 1])


@_false_mail("own-share", stage="mask", error=Tampering, how=delivery)
def _own_share(scene: Scene, sealed: dict[int, bytes]) -> None:
    """The server delivers to a client a share in its own name."""
    sealed[scene.victim] = bytes(SEALED)
