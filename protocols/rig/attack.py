"""A lie in a session: the changed messages, and who must refuse them, in which stage and with which error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocols.errors import ProtocolError
from protocols.parameters import Parameters
from protocols.rig.scene import Inbox, Scene


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
    propose: Callable[[Parameters], Parameters] | None = None  # the session that the clients are invited to
    tell: Callable[[Scene, str, Inbox], Inbox] | None = None  # the server's messages, in the place of the true ones
    send: Callable[[Scene, str, int, bytes], None] | None = None  # delivers a client's answer, or another, or nothing
    closing: Callable[[Scene, str], None] | None = None  # before the server ends a stage
    outcome: Callable[[Scene], str] | None = None  # where nobody has to refuse: what came out right, "" if it did not


HONEST = Attack("", "nobody lies", "", "", ProtocolError)


def lie(
    into: list[Attack],
    kind: str,
    catcher: str,
    stage: str,
    error: type[ProtocolError],
    hook: str,
    how: Callable[[Any], Any] = lambda function: function,
    **more: Any,
) -> Callable[[Any], Any]:
    """Add the attack whose `hook` is made by `how` from the decorated function. Its docstring is what the attack does."""

    def add(function: Any) -> Any:
        does = " ".join(function.__doc__.split())
        into.append(Attack(kind, does, catcher, stage, error, **{hook: how(function)}, **more))
        return function

    return add
