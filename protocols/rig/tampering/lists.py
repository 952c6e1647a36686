"""Lists of survivors that are false on the face of it, to each who is shown one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocols.errors import Aborted, MessageError, Tampering
from protocols.messages import HEADER
from protocols.rig.attack import Attack
from protocols.rig.scene import Inbox, Scene
from protocols.rig.tampering.means import Tell, earlier, listing, withheld

Change = Callable[[Scene, set[int]], None]


def to_victim(change: Change) -> Tell:
    """The victim alone is shown a list that was changed."""

    def tell(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
        if stage != scene.stage_of("survivors"):
            return inbox
        survivors = set(scene.server.survivors)
        change(scene, survivors)
        return {**inbox, scene.victim: listing(scene, survivors, scene.victim)}

    return tell


def to_all_listed(change: Change) -> Tell:
    """All who are on the changed list are shown it, and nobody else is shown any."""

    def tell(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
        if stage != scene.stage_of("survivors"):
            return inbox
        survivors = set(scene.server.survivors)
        change(scene, survivors)
        return {client: listing(scene, survivors, client) for client in inbox if client in survivors}

    return tell


def _leave_out(scene: Scene, survivors: set[int]) -> None:
    survivors.remove(scene.victim)


def _add_stranger(scene: Scene, survivors: set[int]) -> None:
    survivors.add(scene.parameters.clients[-1] + 1)


def _shorten(scene: Scene, survivors: set[int]) -> None:
    for client in sorted(survivors - {scene.victim})[scene.parameters.survivors - 2 :]:
        survivors.remove(client)


def _isolate(scene: Scene, survivors: set[int]) -> None:
    survivors.difference_update(scene.server._graph.holders(scene.victim))


def _cut(scene: Scene, survivors: set[int]) -> None:
    """Two windows of the ring are said to be gone, so that the two clients between them would have a sum of their own."""
    order, half = scene.server._graph.order, scene.parameters.neighbours // 2
    place = order.index(scene.victim)
    turned = order[place:] + order[:place]
    survivors.difference_update(turned[half + 1 : 2 * half + 1], turned[2 * half + 3 : 3 * half + 3])


def _cut_choices(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """Where clients choose, all whom the victim chose to mask with are said to be gone. It and its holders notice."""
    if not scene.parameters.chosen or stage != scene.stage_of("survivors"):
        return to_all_listed(_cut)(scene, stage, inbox)
    graph: Any = scene.server._graph
    listed = set(scene.server.survivors) - set(graph.firsts(scene.victim))
    shown = listed & {scene.victim, *graph.holders(scene.victim)}
    return {client: listing(scene, listed, client) if client in shown else true for client, true in inbox.items()}


def _twice(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """Written by hand, since no code of ours would."""
    if stage != scene.stage_of("survivors"):
        return inbox
    end = HEADER.size + 4 + 4 * len(scene.server.survivors)  # of the list: signatures may follow
    return {client: true[: end - 4] + true[end - 8 : end - 4] + true[end:] for client, true in inbox.items()}


def _stale(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    if stage != scene.stage_of("survivors"):
        return inbox
    return {**inbox, scene.victim: earlier(scene).messages[stage, scene.victim]}


def _undealt(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    if stage != scene.stage_of("survivors"):
        return inbox
    lie = {*scene.server.survivors, scene.liar}
    known = inbox if scene.parameters.active else scene.server._graph.holders(scene.liar)
    return {client: listing(scene, lie, client) if client in known else true for client, true in inbox.items()}


LISTS = (
    Attack(
        "left-out",
        "The server shows one client a list of survivors without it, though its vector is in the sum.",
        "clients",
        "survivors",
        Tampering,
        tell=to_victim(_leave_out),
    ),
    Attack(
        "unlisted-survivor",
        "The server lists a survivor that is not on the roster.",
        "clients",
        "survivors",
        Tampering,
        tell=to_all_listed(_add_stranger),
    ),
    Attack(
        "undealt-survivor",
        "The server lists a survivor that dropped out before its shares were out; its neighbours notice.",
        "clients",
        "survivors",
        Tampering,
        send=withheld,
        tell=_undealt,
    ),
    Attack(
        "short-list",
        "The server lists fewer survivors than the least sum has.",
        "clients",
        "survivors",
        Aborted,
        tell=to_all_listed(_shorten),
    ),
    Attack(
        "isolated",
        "The server says to one client that all its neighbours dropped out after it had sent its vector.",
        "clients",
        "survivors",
        Aborted,
        tell=to_victim(_isolate),
    ),
    Attack(
        "cut-ring",
        "The server says that those dropped out who share masks with one client or two, so that these have a sum of their own.",
        "clients",
        "survivors",
        Aborted,
        ring=True,
        tell=_cut_choices,
    ),
    Attack(
        "listed-twice",
        "The server lists a survivor twice, so that fewer look like more.",
        "clients",
        "survivors",
        MessageError,
        tell=_twice,
    ),
    Attack(
        "stale-list",
        "The server shows one client the list of survivors of an earlier session.",
        "clients",
        "survivors",
        MessageError,
        tell=_stale,
    ),
)
