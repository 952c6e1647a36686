"""Lists of survivors that are false on the face of it, to each who is shown one."""

from __future__ import annotations

from collections.abc import Callable

from protocols.errors import Aborted, MessageError, Tampering
from protocols.rig.scene import Attack, Inbox, Scene
from protocols.rig.tampering.means import Tell, earlier, listing, unheard

Change = Callable[[Scene, set[int]], None]


def to_victim(change: Change) -> Tell:
    """The victim alone is shown a list that was changed."""

    def tell(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
        if stage != scene.stage_of("survivors"):
            return inbox
        survivors = set(scene.server.survivors)
        change(scene, survivors)
        return {**inbox, scene.victim: listing(scene, survivors)}

    return tell


def to_all_listed(change: Change) -> Tell:
    """All who are on the changed list are shown it, and nobody else is shown any."""

    def tell(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
        if stage != scene.stage_of("survivors"):
            return inbox
        survivors = set(scene.server.survivors)
        change(scene, survivors)
        return {client: listing(scene, survivors) for client in inbox if client in survivors}

    return tell


def _leave_out(scene: Scene, survivors: set[int]) -> None:
    survivors.remove(scene.victim)


def _add_stranger(scene: Scene, survivors: set[int]) -> None:
    survivors.add(scene.parameters.clients[-1] + 1)


def _shorten(scene: Scene, survivors: set[int]) -> None:
    for client in sorted(survivors - {scene.victim})[scene.parameters.survivors - 2 :]:
        survivors.remove(client)


def _isolate(scene: Scene, survivors: set[int]) -> None:
    survivors.difference_update(scene.server._graph.neighbours(scene.victim))


def _cut(scene: Scene, survivors: set[int]) -> None:
    """Two windows of the ring are said to be gone, so that the two clients between them would have a sum of their own."""
    order, half = scene.server._graph.order, scene.parameters.neighbours // 2
    place = order.index(scene.victim)
    turned = order[place:] + order[:place]
    survivors.difference_update(turned[half + 1 : 2 * half + 1], turned[2 * half + 3 : 3 * half + 3])


def _twice(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """Written by hand, since no code of ours would."""
    if stage != scene.stage_of("survivors"):
        return inbox
    true = inbox[scene.victim]
    return dict.fromkeys(inbox, true[:-4] + true[-8:-4])


def _stale(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    if stage != scene.stage_of("survivors"):
        return inbox
    return {**inbox, scene.victim: earlier(scene).told[stage, scene.victim]}


def _undealt(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    if stage != scene.stage_of("survivors"):
        return inbox
    lie = listing(scene, {*scene.server.survivors, scene.liar})
    near = scene.server._graph.neighbours(scene.liar)
    return {client: lie if client in near else message for client, message in inbox.items()}


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
        send=unheard,
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
        "The server says that two stretches of the ring dropped out, so that two clients have a sum of their own.",
        "clients",
        "survivors",
        Aborted,
        ring=True,
        tell=to_all_listed(_cut),
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
