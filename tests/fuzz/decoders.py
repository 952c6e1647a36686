"""Coverage-guided fuzzing of every decoder, of a server and of a client, with mutated messages of real sessions.

    pip install atheris                            # not among the project's dependencies
    python tests/fuzz/decoders.py -max_total_time=600 -rss_limit_mb=1024 -timeout=20

All options are libFuzzer's, the limits of memory and of time per message among them; a folder as an argument keeps the corpus.
The fuzzer stops with a traceback and a file `crash-...` when an exception other than `ProtocolError` escapes (from a decoder:
other than `MessageError`), when a decoder accepts bytes that its encoder would not write, when a server that has refused a
message does not end with the right sum, and when a client that has refused a message answers again or keeps secrets. To
reproduce a failure, pass the file as the argument.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["protocols"]):
    from protocols.client import Client, Keys
    from protocols.errors import MessageError, ProtocolError
    from protocols.parameters import SERVER, Parameters, stages
    from protocols.server import Server
    from protocols.wire import Advertise, Confirm, Confirmations, Delivery, Masked, Opened, Roster, Shares, Survivors
    from tests.fuzz.mutations import Noise, Pick, mutated
    from tests.protocols.sessions import METHODS, Play, cast, play

CASTS: list[dict[str, Any]] = [
    {"count": 4, "threshold": 2},
    {"count": 4, "threshold": 2, "active": True, "bound": 1000},
    {"count": 6, "neighbours": 4, "threshold": 3, "active": True, "bits": 64},
    {"count": 6, "neighbours": 2, "threshold": 1, "length": 1},
]
UP = {1: Advertise, 3: Shares, 4: Masked, 5: Confirm, 6: Opened}
DOWN = {16: Roster, 18: Delivery, 19: Survivors, 20: Confirmations}


@dataclass(frozen=True)
class Recording:
    """A complete session in which one client drops out, copies of the server before each stage, and the clients' keys."""

    scene: Play
    keys: dict[int, Keys]
    before: dict[str, Server]
    messages: list[bytes]

    @property
    def parameters(self) -> Parameters:
        return self.scene.cast.parameters


def copied(server: Server) -> Server:
    """A copy of the server. Copies share the objects that never change once they are agreed on."""
    shared = [server.parameters, getattr(server, "_agreed", None), getattr(server, "_graph", None)]
    return copy.deepcopy(server, {id(thing): thing for thing in shared})


def recorded(options: dict[str, Any]) -> Recording:
    made = cast(**options)
    keys = {me: Keys.new() for me in made.ids}
    before: dict[str, Server] = {}
    server = made.server()

    def watch(stage: str, client: int, message: bytes) -> bytes:
        before.setdefault(stage, copied(server))
        return message

    clients = {me: made.client(me, _keys=keys[me]) for me in made.ids}
    lone = made.parameters.holders > 2
    silent = {"mask": made.ids[-1:]} if lone else {"unmask": made.ids[-1:]}
    scene = play(made, server=server, clients=clients, tell=watch, silent=silent)
    messages = [message for message in (*scene.told.values(), *scene.said.values()) if message]
    return Recording(scene, keys, before, messages)


RECORDINGS = [recorded(options) for options in CASTS]
OTHERS = [message for recording in RECORDINGS for message in recording.messages]


def written(decoded: Any, parameters: Parameters, sender: int) -> bytes:
    if isinstance(decoded, Masked):
        frame, view = Masked.frame(parameters, sender, decoded.signature)
        view[:] = decoded.vector
        return bytes(frame)
    encoded: bytes = decoded.to_bytes(parameters) if sender == SERVER else decoded.to_bytes(parameters, sender)
    return encoded


def fuzz_decoder(recording: Recording, pick: Pick, noise: Noise) -> None:
    message = recording.messages[pick(0, len(recording.messages) - 1)]
    kind, sender = message[5], int.from_bytes(message[40:44], "little")
    lie = mutated(message, OTHERS, pick, noise)
    parameters = recording.parameters
    with contextlib.suppress(MessageError):
        if kind in DOWN:
            decoded: Any = DOWN[kind].from_bytes(lie, parameters)  # type: ignore[attr-defined]
        else:
            decoded = UP[kind].from_bytes(lie, parameters, sender)  # type: ignore[attr-defined]
        if written(decoded, parameters, sender) != lie:
            raise RuntimeError(f"{type(decoded).__name__} takes bytes that it would not write: {lie.hex()}")


def fuzz_server(recording: Recording, pick: Pick, noise: Noise) -> None:
    """Send the server one mutated message in one stage, and the recorded messages after it."""
    scene, names = recording.scene, stages(recording.parameters)
    stage = names[pick(0, len(names) - 1)]
    server = copied(recording.before[stage])
    said = [client for at, client in scene.said if at == stage]
    sender = said[pick(0, len(said) - 1)]
    lie = mutated(scene.said[stage, sender], OTHERS, pick, noise)
    taken = True
    try:
        server.receive(sender, lie)
    except ProtocolError:
        taken = False
    finish = contextlib.suppress(ProtocolError) if taken else contextlib.nullcontext()
    with finish:
        for following in names[names.index(stage) :]:
            for client in sorted(server.waiting):
                if (following, client) in scene.said:
                    server.receive(client, scene.said[following, client])
            server.close()
    if not taken and server.total().tolist() != scene.expected().tolist():
        raise RuntimeError(f"after a refused message of stage {stage} the sum is another: {lie.hex()}")


def fuzz_client(recording: Recording, pick: Pick, noise: Noise) -> None:
    """Send a client the recorded messages of the earlier stages, and then a mutated one."""
    scene, names = recording.scene, stages(recording.parameters)
    me = scene.cast.ids[0]
    stage = names[pick(1, len(names) - 1)]
    client = scene.cast.client(me, _keys=recording.keys[me])

    def act(at: str, message: bytes) -> Any:
        step: Callable[..., Any] = getattr(client, METHODS[at])
        if at == "advertise":
            return step()
        return step(message, scene.vectors[me]) if at == "mask" else step(message)

    for earlier in names[: names.index(stage)]:
        act(earlier, scene.told[earlier, me])
    try:
        act(stage, mutated(scene.told[stage, me], OTHERS, pick, noise))
    except ProtocolError:
        finished(client, lambda: act(stage, scene.told[stage, me]))


def finished(client: Client, again: Callable[[], Any]) -> None:
    try:
        again()
    except MessageError:
        if client._keys is None and not client._held and not client._inbound:
            return
    raise RuntimeError("a client that has refused a message answers again, or keeps secrets")


def one(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    recording = RECORDINGS[provider.ConsumeIntInRange(0, len(RECORDINGS) - 1)]
    target = (fuzz_decoder, fuzz_decoder, fuzz_decoder, fuzz_server, fuzz_client)[provider.ConsumeIntInRange(0, 4)]
    target(recording, provider.ConsumeIntInRange, provider.ConsumeBytes)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
