"""Sessions with altered messages: from the server to clients, or in a client's name to the server."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from protocols.client import Client, Keys
from protocols.errors import MessageError, ProtocolError
from protocols.keys import Identity
from protocols.parameters import stages
from tests.fuzz.mutations import Noise, Pick, mutated
from tests.protocols.looking import contents
from tests.protocols.sessions import METHODS, Cast, Play, drawn, play, secret

CASTS: dict[str, dict[str, Any]] = {
    "complete": {"count": 5, "threshold": 2},
    "complete, active": {"count": 5, "threshold": 3, "active": True, "bound": 1000},
    "ring, active, 64 bits": {"count": 7, "neighbours": 4, "threshold": 3, "active": True, "bits": 64, "length": 3},
    "ring, one word": {"count": 7, "neighbours": 4, "threshold": 2, "length": 1},
}
Lie = Callable[[bytes], bytes]


def cast_of(options: dict[str, Any]) -> Cast:
    """The cast, with the same identities on every call, since hypothesis replays its examples."""
    made, rng = Cast(**options), random.Random(1)
    return replace(made, identities={me: Identity.from_secret(secret(rng)) for me in made.ids}) if made.active else made


def clients_of(made: Cast) -> dict[int, Client]:
    """The clients, with the same keys on every call, and so the same graph."""
    rng = random.Random(made.parameters.session)
    return {me: made.client(me, _keys=drawn(rng)) for me in made.ids}


@cache
def recorded(name: str) -> Play:
    """A session in which one client drops out before it sends its masked vector."""
    made = cast_of(CASTS[name])
    return play(made, clients=clients_of(made), silent={"mask": made.ids[-1:]})


def messages(scene: Play) -> list[bytes]:
    return [message for message in (*scene.told.values(), *scene.said.values()) if message]


@cache
def pool() -> tuple[bytes, ...]:
    """The messages of all sessions. `mutated` puts pieces of one into another."""
    return tuple(dict.fromkeys(message for name in CASTS for message in messages(recorded(name))))


def choices(data: st.DataObject) -> tuple[Pick, Noise]:
    return (lambda least, most: data.draw(st.integers(least, most)), lambda most: data.draw(st.binary(max_size=most)))


@dataclass
class Outcome:
    """A session with altered messages: whether any was accepted, and the clients whose altered message was refused."""

    scene: Play
    believed: bool = False
    refused: set[int] = field(default_factory=set)
    honestly: list[ProtocolError] = field(default_factory=list)  # errors that unaltered messages raised
    finished: bool = True  # whether `finished` holds for every client that refused
    done: bool = False


def fooled_server(made: Cast, lies: set[tuple[str, int]], lie: Lie) -> Outcome:
    """Play a session. For each (stage, client) in `lies` the server first receives an altered message in the client's name."""
    result = Outcome(Play(made, made.server(), clients_of(made), made.vectors()))
    scene, inbox = result.scene, dict.fromkeys(made.ids, b"")
    for stage in stages(made.parameters):
        for client, message in inbox.items():
            try:
                answer = scene.act(stage, client, message)
            except ProtocolError:
                if not result.believed:
                    raise
                continue
            if (stage, client) in lies:
                try:
                    scene.server.receive(client, lie(answer))
                except ProtocolError:
                    result.refused.add(client)
                else:
                    result.believed = True
                    continue
            try:
                scene.server.receive(client, answer)
            except ProtocolError:  # an accepted lie may already contain this client's keys
                if not result.believed:
                    raise
        try:
            inbox = scene.server.close()
        except ProtocolError:
            if not result.believed:
                raise
            return result
    result.done = True
    return result


def fooled_clients(made: Cast, lies: set[tuple[str, int]], lie: Lie) -> Outcome:
    """Play a session. Each (stage, client) in `lies` receives an altered message; a client that refuses it is finished."""
    result, altered = (
        Outcome(Play(made, made.server(), clients_of(made), made.vectors())),
        dict[tuple[str, int], bytes](),
    )
    scene = result.scene

    def tell(stage: str, client: int, message: bytes) -> bytes:
        told = lie(message) if (stage, client) in lies and message else message
        if told != message:
            altered[stage, client] = message
        return told

    try:
        play(made, after=scene, tell=tell)
        result.done = True
    except ProtocolError as error:
        result.honestly.append(error)
    keys = {me: client._keys for me, client in clients_of(made).items()}
    for (stage, client), message in altered.items():
        result.believed |= (stage, client) in scene.said
        result.finished &= client not in scene.errors or finished(scene.clients[client], keys[client], stage, message)
    result.refused = set(scene.errors)
    result.honestly += [error for client, error in scene.errors.items() if client not in {me for _, me in altered}]
    return result


def finished(client: Client, keys: Keys | None, stage: str, message: bytes) -> bool:
    """Whether the client refuses even the unaltered `message` and holds none of its secrets any more."""
    vector = np.zeros(client.parameters.length, f"u{client.parameters.bits // 8}")
    arguments = (message, vector) if stage == "mask" else (message,)
    with pytest.raises(MessageError, match="out of turn: this client is finished"):
        getattr(client, METHODS[stage])(*arguments)
    assert keys is not None
    held = contents(client)
    secrets = (keys.seed, keys.mask.private, keys.channel.private)
    return not any(secret.reveal() in held for secret in secrets)


def changed(data: st.DataObject) -> Lie:
    pick, noise = choices(data)
    return lambda message: mutated(message, pool(), pick, noise)


def noise_of(rng: random.Random) -> Noise:
    return lambda most: rng.randbytes(rng.randint(0, most))
