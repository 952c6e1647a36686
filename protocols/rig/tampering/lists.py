"""Lists of survivors that every client that receives one can recognise as false."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from protocols.errors import Aborted, MessageError, Tampering
from protocols.rig.attack import Attack, lie
from protocols.rig.scene import Inbox, Scene
from protocols.rig.tampering.means import Tell, earlier, listing, told, withheld
from protocols.wire import HEADER

LISTS: list[Attack] = []
ListChange = Callable[[Scene, set[int]], None]

_false_list = partial(lie, LISTS, catcher="clients", stage="survivors", hook="tell")
_in_place_of_lists = told("survivors")


def to_victim(change: ListChange) -> Tell:
    """Only the victim is shown a changed list."""
    return _in_place_of_lists(
        lambda scene, inbox: {**inbox, scene.victim: listing(scene, _changed_list(scene, change), scene.victim)}
    )


def to_all_listed(change: ListChange) -> Tell:
    """All clients on the changed list are shown it, and no other client is shown a list."""

    def shown(scene: Scene, inbox: Inbox) -> Inbox:
        survivors = _changed_list(scene, change)
        return {client: listing(scene, survivors, client) for client in inbox if client in survivors}

    return _in_place_of_lists(shown)


def _changed_list(scene: Scene, change: ListChange) -> set[int]:
    survivors = set(scene.server.survivors)
    change(scene, survivors)
    return survivors


@_false_list("left-out", error=Tampering, how=to_victim)
def _leave_out(scene: Scene, survivors: set[int]) -> None:
    """The server shows one client a list of survivors without it, though its vector is in the sum."""
    survivors.remove(scene.victim)


@_false_list("unlisted-survivor", error=Tampering, how=to_all_listed)
def _add_stranger(scene: Scene, survivors: set[int]) -> None:
    """The server lists a survivor that is not on the roster."""
    survivors.add(scene.parameters.clients[-1] + 1)


@_false_list("undealt-survivor", error=Tampering, how=_in_place_of_lists, send=withheld)
def _undealt(scene: Scene, inbox: Inbox) -> Inbox:
    """The server lists a survivor that dropped out before its shares were out; its neighbours notice."""
    lie = {*scene.server.survivors, scene.liar}
    known = inbox if scene.parameters.active else scene.server._graph.holders(scene.liar)
    return {client: listing(scene, lie, client) if client in known else true for client, true in inbox.items()}


@_false_list("short-list", error=Aborted, how=to_all_listed)
def _shorten(scene: Scene, survivors: set[int]) -> None:
    """The server lists fewer survivors than the least sum has."""
    for client in sorted(survivors - {scene.victim})[scene.parameters.survivors - 2 :]:
        survivors.remove(client)


@_false_list("isolated", error=Aborted, how=to_victim)
def _isolate(scene: Scene, survivors: set[int]) -> None:
    """The server says to one client that all its neighbours dropped out after it had sent its vector."""
    survivors.difference_update(scene.server._graph.holders(scene.victim))


def _cut(scene: Scene, survivors: set[int]) -> None:
    """Two windows of the ring are said to be gone, so that the two clients between them would have a sum of their own."""
    order, half = scene.server._graph.order, scene.parameters.neighbours // 2
    place = order.index(scene.victim)
    turned = order[place:] + order[:place]
    survivors.difference_update(turned[half + 1 : 2 * half + 1], turned[2 * half + 3 : 3 * half + 3])


@_false_list("cut-ring", error=Aborted, how=_in_place_of_lists, ring=True)
def _cut_choices(scene: Scene, inbox: Inbox) -> Inbox:
    """The server says that those dropped out who share masks with one client or two, so that these have a sum of their own."""
    if not scene.parameters.chosen:
        return to_all_listed(_cut)(scene, scene.stage, inbox)
    # Where clients choose, the list omits all mask partners that the victim chose. It and its holders notice.
    graph: Any = scene.server._graph
    listed = set(scene.server.survivors) - set(graph.firsts(scene.victim))
    shown = listed & {scene.victim, *graph.holders(scene.victim)}
    return {client: listing(scene, listed, client) if client in shown else true for client, true in inbox.items()}


@_false_list("listed-twice", error=MessageError, how=_in_place_of_lists)
def _twice(scene: Scene, inbox: Inbox) -> Inbox:
    """The server lists a survivor twice, so that fewer look like more."""
    # Encoded by hand, since the protocol's code never encodes such a list.
    end = HEADER.size + 4 + 4 * len(scene.server.survivors)  # of the list: signatures may follow
    return {client: true[: end - 4] + true[end - 8 : end - 4] + true[end:] for client, true in inbox.items()}


@_false_list("stale-list", error=MessageError, how=_in_place_of_lists)
def _stale(scene: Scene, inbox: Inbox) -> Inbox:
    """The server shows one client the list of survivors of an earlier session."""
    return {**inbox, scene.victim: earlier(scene).messages[scene.stage, scene.victim]}
