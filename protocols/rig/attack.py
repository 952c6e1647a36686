"""A lie in a session: the changed messages, and who must refuse them, in which stage and with which error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocols.errors import ProtocolError
from protocols.parameters import Parameters
from protocols.rig.scene import Inbox, Scene


def as_proposed(parameters: Parameters) -> Parameters:
    return parameters


def as_announced(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    return inbox


def as_answered(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    scene.deliver(client, answer)


def nothing_more(scene: Scene, stage: str) -> None:
    return None


@dataclass(frozen=True)
class Attack:
    """A lie, who should notice it, when, and with which error.

    Every client that is told something false in `stage` has to refuse it, and every false message that the server is sent
    (`Scene.hear` with lie=True) has to be refused by it. `stage` is that of a session, or "roster" or "survivors" for the
    one in which these are shown, or "" for each.
    """

    kind: str
    does: str
    catcher: str  # "server" or "clients"
    stage: str
    error: type[ProtocolError]
    active: bool = False  # only an active session can notice it
    ring: bool = False  # there has to be a ring
    exact: bool = False  # the others must get their sum all the same
    propose: Callable[[Parameters], Parameters] = as_proposed  # what session the clients are asked into
    tell: Callable[[Scene, str, Inbox], Inbox] = as_announced  # what the server tells, in the place of what it should
    send: Callable[[Scene, str, int, bytes], None] = as_answered  # what becomes of a client's answer
    closing: Callable[[Scene, str], None] = nothing_more  # before the server ends a stage
    outcome: Callable[[Scene], str] | None = None  # where nobody has to refuse: what came out right, "" if it did not


HONEST = Attack("", "nobody lies", "", "", ProtocolError)
