"""Attacks that show two lists of survivors instead of one, to have both secrets of a client opened."""

from __future__ import annotations

import copy
from functools import partial

from protocols.errors import Aborted, MessageError, Spent, Tampering
from protocols.keys import Identity
from protocols.messages import Confirm, Confirmations
from protocols.rig.attack import Attack, lie
from protocols.rig.scene import Inbox, Scene
from protocols.rig.tampering.means import listing

ANSWERS: list[Attack] = []
_unmasked = partial(lie, ANSWERS, catcher="clients", stage="unmask")


@_unmasked("both-shares", error=MessageError, hook="closing", exact=True)
def _ask_again(scene: Scene, stage: str) -> None:
    """The server asks all once more, with a list on which one survivor is missing, to have both its secrets opened."""
    if stage != "unmask":
        return
    lie = set(scene.server.survivors) - {scene.peer}
    for client, machine in scene.clients.items():
        if client in scene.inbox and client not in {*scene.gone, scene.peer}:
            scene.lie(machine, "unmask", listing(scene, lie, client))


def _keep_copy(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    if stage == "unmask":
        scene.kept = copy.copy(scene.clients[scene.victim])
    return inbox


@_unmasked("second-unmask", error=Spent, hook="closing", exact=True, tell=_keep_copy)
def _ask_copy(scene: Scene, stage: str) -> None:
    """The server asks a client once more that was put back to the state before it answered."""
    if stage == "unmask":
        scene.lie(scene.kept, "unmask", scene.messages["unmask", scene.victim])


def _split(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """Half of the clients, not including the peer, are shown a list without the peer."""
    if stage != "consistency":
        return inbox
    survivors = set(scene.server.survivors)
    ordered = sorted(inbox, key=lambda client: client != scene.peer)
    half = (len(ordered) + 1) // 2
    scene.kept = [], []  # signatures over each list, by signer
    lists = dict.fromkeys(ordered[:half], survivors) | dict.fromkeys(ordered[half:], survivors - {scene.peer})
    return {client: listing(scene, shown, client) for client, shown in lists.items()}


def _keep_signatures(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    """Keep signatures over two lists: a lying server needs them, and an honest server would end the session here."""
    if stage != "consistency":
        scene.deliver(client, answer)
        return
    side = scene.kept[scene.peer not in scene.clients[client]._survivors]
    side.append((client, Confirm.from_bytes(answer, scene.parameters, client).signature))


@_unmasked("split-survivors", error=Aborted, hook="closing", active=True, tell=_split, send=_keep_signatures)
def _show_sides(scene: Scene, stage: str) -> None:
    """The server shows two lists of survivors, each to half of the clients, to have both secrets of one of them opened."""
    # Each side gets the signatures over its own list, all of them genuine.
    if stage != "consistency":
        return
    for side in scene.kept:
        message = Confirmations(dict(side)).to_bytes(scene.parameters)
        for client, _ in side:
            scene.lie(scene.clients[client], "unmask", message)


def _all_but_victims(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    if (stage, client) != ("consistency", scene.victim):
        scene.deliver(client, answer)


@_unmasked("forged-signatures", error=Tampering, hook="tell", active=True, send=_all_but_victims)
def _forge(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """The server shows one client another list than the rest, and signs that list in the others' names."""
    lie = set(scene.server.survivors) - {scene.peer}
    if stage == "consistency":
        return {**inbox, scene.victim: listing(scene, lie, scene.victim)}
    if stage != "unmask":
        return inbox
    session, shown = scene.parameters.session, scene.clients[scene.victim]
    signatures = {
        client: Identity.new().sign("survivors", session, Confirm.signed(client, shown._dealt, shown._list))
        for client in scene.server.survivors
        if client != scene.peer
    }
    return {**inbox, scene.victim: Confirmations(signatures).to_bytes(scene.parameters)}
