"""A lie in a session: the changed messages, and the party that must refuse them, in which stage and with which error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocols.errors import ProtocolError
from protocols.parameters import Parameters
from protocols.rig.scene import Inbox, Scene


@dataclass(frozen=True)
class Attack:
    """A lie, the party that should notice it, the stage, and the error.

    Every client that receives something false in `stage` must refuse it, and the server must refuse every false message that it
    receives (`Scene.deliver` with lie=True). `stage` is a stage of the session, or "parameters" for the invitation, or "roster"
    or "survivors" for the stage in which these are shown, or "" for every stage.
    """

    kind: str
    does: str
    catcher: str  # "server" or "clients"
    stage: str
    error: type[ProtocolError]
    active: bool = False  # only an active session can notice it
    ring: bool = False  # needs a graph that is not complete
    exact: bool = False  # the others must still get their sum
    propose: Callable[[Parameters], Parameters] | None = None  # the session that clients are invited to
    tell: Callable[[Scene, str, Inbox], Inbox] | None = None  # the server's messages, in place of the true ones
    send: Callable[[Scene, str, int, bytes], None] | None = None  # delivers a client's answer, another, or nothing
    closing: Callable[[Scene, str], None] | None = None  # before the server ends a stage
    outcome: Callable[[Scene], str] | None = None  # where no party must refuse: the correct outcome, "" if it failed


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
    """Add the attack whose `hook` is made by `how` from the decorated function. Its docstring describes the attack."""

    def add(function: Any) -> Any:
        does = " ".join(function.__doc__.split())
        into.append(Attack(kind, does, catcher, stage, error, **{hook: how(function)}, **more))
        return function

    return add
