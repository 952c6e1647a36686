"""Rosters, choices and deliveries that a server has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from protocols.errors import Aborted, Tampering
from protocols.keys import Identity
from protocols.messages import SEALED, Advertise, Delivery, Roster
from protocols.opening import near
from protocols.rig.attack import Attack
from protocols.rig.scene import Inbox, Scene
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
    adverts[scene.peer] = Advertise.from_bytes(before.answers["advertise", scene.peer], before.parameters, scene.peer)


def _uninvited(scene: Scene, adverts: Adverts) -> None:
    stranger = scene.parameters.clients[-1] + 1
    adverts[stranger] = signed(scene, forged(scene), stranger, Identity.new())


def _few_choices(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """Where clients choose, the victim is shown too few of those it chose; else all are shown a roster that is too short."""
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


def _swapped_choice(scene: Scene, adverts: Adverts) -> None:
    adverts[scene.peer] = replace(adverts[scene.peer], choice=bytes(32))


def near_peer(change: Callable[[Scene, Adverts], None]) -> Tell:
    """All who are shown the peer are shown a roster that was changed."""

    def tell(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
        if stage != scene.stage_of("roster"):
            return inbox
        messages = dict(inbox)
        for client, message in inbox.items():
            adverts = dict(Roster.from_bytes(message, scene.parameters).adverts)
            if scene.peer in adverts and client != scene.peer:
                change(scene, adverts)
                messages[client] = Roster(adverts).to_bytes(scene.parameters)
        return messages

    return tell


def _hide_chooser(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """The victim, somebody whom another chose one-sidedly, is not shown the other. It notices once it reads everybody's choice,
    in the next stage."""
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


def _other_choices(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """All who are near the peer read another choice of it than it advertised, when those who have dealt are listed."""
    if stage != "mask":
        return inbox
    messages = dict(inbox)
    for client, message in inbox.items():
        if scene.peer in scene.clients[client]._agreed.adverts:
            true = Delivery.from_bytes(message, scene.parameters)
            lie = replace(true, dealt={**true.dealt, scene.peer: bytes(32)})
            messages[client] = lie.to_bytes(scene.parameters)
    return messages


def _withhold(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """The victim is told that somebody has not dealt who has, and is brought nothing from there, so that it does not mask with
    that client. It notices by the list of survivors, and who is near it by what it has signed."""
    if stage == "mask":
        true = Delivery.from_bytes(inbox[scene.victim], scene.parameters)
        withheld = scene.server._graph.partners(scene.victim)[0]
        lie = [{one: entry for one, entry in part.items() if one != withheld} for part in (true.sealed, true.dealt)]
        return {**inbox, scene.victim: Delivery(*lie).to_bytes(scene.parameters)}
    if stage == "consistency":
        for client in inbox.keys() - scene.gone:
            if scene.victim in (client, *near(client, scene.server._graph, scene.server.survivors)):
                scene.expect(client)
    return inbox


def _whatever_it_signed(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    """The server that has lied to the victim takes its vector nevertheless."""
    if (stage, client) != ("mask", scene.victim):
        scene.deliver(client, answer)
        return
    digest, scene.server._digest = scene.server._digest, scene.clients[client]._dealt
    scene.deliver(client, answer)
    scene.server._digest = digest


def delivery(change: Callable[[Scene, dict[int, bytes]], None]) -> Tell:
    """The victim is brought other shares than were dealt."""

    def tell(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
        if stage != "mask":
            return inbox
        sealed = dict(Delivery.from_bytes(inbox[scene.victim], scene.parameters).sealed)
        dealt = dict(Delivery.from_bytes(inbox[scene.victim], scene.parameters).dealt)
        change(scene, sealed)
        if dealt:  # whose shares are not brought is not said to have dealt
            owners = scene.server._graph.owners(scene.victim)
            dealt = {one: seed for one, seed in dealt.items() if one not in owners or one in sealed}
        return {**inbox, scene.victim: Delivery(sealed, dealt).to_bytes(scene.parameters)}

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
        tell=_few_choices,
    ),
    Attack(
        "surround",
        "The server shows those near a client another choice of neighbours than the client made, to surround whom it likes.",
        "clients",
        "roster",
        Tampering,
        active=True,
        ring=True,
        tell=near_peer(_swapped_choice),
    ),
    Attack(
        "other-choice",
        "The server lists another choice of neighbours than a client made, so that masks are on one side only.",
        "clients",
        "mask",
        Tampering,
        active=True,
        ring=True,
        tell=_other_choices,
    ),
    Attack(
        "hidden-choice",
        "The server hides from one client that another chose it as a neighbour.",
        "clients",
        "",
        Tampering,
        active=True,
        ring=True,
        tell=_hide_chooser,
    ),
    Attack(
        "withheld-delivery",
        "The server says to one client that a neighbour has not dealt its shares, so that the two share no mask.",
        "clients",
        "consistency",
        Tampering,
        active=True,
        tell=_withhold,
        send=_whatever_it_signed,
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
