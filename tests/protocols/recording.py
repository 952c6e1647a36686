"""Golden sessions: fixed keys, every message, and the outcome of a replay in which one byte of a message is changed.

`python -m tests.protocols.recording` rewrites `tests/vectors/secure_aggregation.json`; run it only when the protocol's version
changes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from protocols.client import Client, Keys
from protocols.errors import ProtocolError
from protocols.keys import AgreementKey, Identity, Secret
from protocols.parameters import stages
from protocols.server import Server
from tests.protocols.sessions import Cast, Play, play

PATH = Path(__file__).resolve().parents[1] / "vectors" / "secure_aggregation.json"
Session = dict[str, Any]

CASTS: dict[str, dict[str, Any]] = {
    "passive, complete, 32 bits": {"count": 4, "threshold": 2, "bound": 1000, "length": 5},
    "active, chosen, 64 bits": {
        **{"count": 6, "neighbours": 4, "threshold": 3, "survivors": 5},
        **{"active": True, "bits": 64, "bound": 10**6},
    },
}


def cast_of(session: Session) -> Cast:
    made = Cast(**session["cast"])
    if not made.active:
        return made
    secrets = {me: bytes.fromhex(session["keys"][str(me)]["identity"]) for me in made.ids}
    return replace(made, identities={me: Identity.from_secret(Secret(secret)) for me, secret in secrets.items()})


def clients_of(session: Session, made: Cast) -> dict[int, Client]:
    """The clients with the keys of the recording."""
    clients = {}
    for me in made.ids:
        channel, mask, seed, choice = (
            Secret(bytes.fromhex(session["keys"][str(me)][name])) for name in ("channel", "mask", "seed", "choice")
        )
        keys = Keys(AgreementKey.from_secret(channel), AgreementKey.from_secret(mask), seed, choice)
        clients[me] = made.client(me, _keys=keys)
    return clients


class Replay:
    """A replay of a session. The shares, which are random, are copied from the recording; everything else is computed again.

    `change` alters one byte of one message. It names the direction ("said" by a client, "told" by the server), the stage, the
    client, the place of the byte (`at`) and the value to combine it with by exclusive or (`xor`). `outcome` names the first
    refusal.
    """

    def __init__(self, session: Session, change: Mapping[str, Any] | None = None) -> None:
        made = cast_of(session)
        kind, shares = f"i{made.bits // 8}", session.get("said", {})
        vectors = {me: np.array(session["vectors"][str(me)], kind).view(kind.replace("i", "u")) for me in made.ids}

        def told(stage: str, client: int, message: bytes) -> bytes:
            if scene.errors:
                raise ProtocolError("the first refusal ends the replay")
            return changed("told", stage, client, message)

        def changed(direction: str, stage: str, client: int, message: bytes) -> bytes:
            if change is None or (change["direction"], change["stage"], change["client"]) != (direction, stage, client):
                return message
            at = change["at"]
            return message[:at] + bytes([message[at] ^ change["xor"]]) + message[at + 1 :]

        def said(stage: str, client: int, answer: bytes) -> bytes:
            recorded = shares.get(f"share {client}") if stage == "share" else None
            return changed("said", stage, client, bytes.fromhex(recorded) if recorded else answer)

        scene = Play(made, made.server(), clients_of(session, made), vectors)
        self.server: Server = scene.server
        try:
            play(made, after=scene, silent=session["silent"], tell=told, say=said)
            suspects = sorted(scene.server.suspects)
            self.outcome = f"suspects: {suspects}" if suspects else "done"
        except ProtocolError as error:
            self.outcome = f"server: {type(error).__name__}"
        for client, refusal in list(scene.errors.items())[:1]:
            self.outcome = f"client {client}: {type(refusal).__name__}"
        self.said, self.told = (
            {f"{stage} {me}": message.hex() for (stage, me), message in messages.items() if (stage, me) in scene.said}
            for messages in (scene.said, scene.told)
        )


HEADER = [
    ("magic", 4),
    ("version", 1),
    ("kind", 1),
    ("zero", 2),
    ("session", 32),
    ("sender", 4),
    ("zero at the end", 4),
]


def fields(direction: str, stage: str, made: Cast, message: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, place and size of every field; of a table, its count and first entry. Written by hand from the message format."""
    p = made.parameters
    keys = [
        ("channel", 32),
        ("mask", 32),
        *([("choice", 32)] if p.chosen else []),
        *([("signature", 64)] if p.active else []),
    ]
    sealed = [("count", 4), ("id", 4), ("ciphertext", 82)]
    signatures = [("count", 4), ("id", 4), ("signature", 64)]
    survivors = [("count", 4), ("id", 4)]
    told = {
        "share": [("count", 4), ("id", 4), *keys],
        "mask": sealed,
        "consistency": survivors,
        "unmask": signatures if p.active else survivors,
    }
    said = {
        "advertise": keys,
        "share": [("commitment", 32), *sealed],
        "mask": [("words", p.bits // 8)],
        "consistency": [("signature", 64)],
        "unmask": [("count of seeds", 4), ("owner of a seed", 4), ("share of a seed", 33)],
    }
    at = 0
    for name, size in HEADER + (told if direction == "told" else said)[stage]:
        yield name, at, size
        at += size
    if p.active:
        yield from second(direction, stage, made, message)
    if (direction, stage) == ("said", "unmask"):
        at = 52 + struct.unpack_from("<I", message, 48)[0] * 37
        yield "count of keys", at, 4
        if len(message) > at + 4:  # a neighbour dropped out: a share of its mask key follows
            yield from (("owner of a key", at + 4, 4), ("share of a key", at + 8, 33))


def second(direction: str, stage: str, made: Cast, message: bytes) -> Iterator[tuple[str, int, int]]:
    """The fields of an active session's messages after the first table, or after the words."""
    p = made.parameters
    if (direction, stage) == ("said", "mask"):
        yield "signature", len(message) - 64, 64
    if direction == "told" and stage in ("mask", "consistency"):
        width, entry, name = (86, 32, "choice") if stage == "mask" else (4, 64, "signature")
        at = 52 + struct.unpack_from("<I", message, 48)[0] * width
        yield from (("second count", at, 4), ("second id", at + 4, 4))
        if stage == "consistency" or p.chosen:
            yield name, at + 8, entry


def changes(session: Session) -> Iterator[dict[str, Any]]:
    """One changed bit in every field of the first and the last message of every stage, in both directions."""
    made = cast_of(session)
    for direction in ("said", "told"):
        for stage in stages(made.parameters):
            names = [name for name in session[direction] if name.startswith(f"{stage} ") and session[direction][name]]
            for name in sorted({*names[:1], *names[-1:]}):
                message, client = bytes.fromhex(session[direction][name]), int(name.split()[1])
                for field, at, size in fields(direction, stage, made, message):
                    place = at if "share" in field or (size <= 4 and field != "words") else at + size - 1
                    yield {
                        **{"direction": direction, "stage": stage, "client": client, "field": field},
                        **{"at": place, "xor": 0x40 if field == "words" else 1},
                    }


def record(name: str) -> Session:
    made = Cast(**CASTS[name])
    names = ("channel", "mask", "seed", "choice", "identity")
    session: Session = {
        "name": name,
        "cast": CASTS[name],
        "session": "",
        "silent": {"mask": [made.ids[-2]]},
        "keys": {me: {key: Secret.new().reveal().hex() for key in names} for me in map(str, made.ids)},
        "vectors": {str(me): [(-1) ** at * (me * 10 + at) for at in range(made.length)] for me in made.ids},
    }
    session["session"] = cast_of(session).parameters.session.hex()
    replay = Replay(session)
    if replay.outcome != "done":
        raise RuntimeError(replay.outcome)
    session.update(said=replay.said, told=replay.told, survivors=list(replay.server.survivors))
    session["total"] = [int(word) for word in replay.server.total()]
    session["tampered"] = [{**change, "refused": Replay(session, change).outcome} for change in changes(session)]
    return session


if __name__ == "__main__":
    PATH.write_text(json.dumps([record(name) for name in CASTS], indent=1) + "\n", encoding="utf-8")
