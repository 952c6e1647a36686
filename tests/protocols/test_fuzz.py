"""Altered messages: on any bytes a decoder raises only `MessageError`, at a cost bounded by the number of bytes.

A server that refuses one ends with the right sum, a client with no secret. Messages in any order release no sum. The inputs are
messages of real sessions, altered in all the ways of `tests.fuzz.mutations`. `tests/fuzz/decoders.py` does the same guided by
coverage, without a limit on its time.
"""

from __future__ import annotations

import math
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocols.client import Client
from protocols.errors import MessageError, ProtocolError
from protocols.keys import Identity, Secret
from protocols.parameters import SERVER, Parameters, stages
from protocols.wire import (
    Advertise,
    Confirm,
    Confirmations,
    Delivery,
    Kind,
    Masked,
    Opened,
    Reader,
    Roster,
    Shares,
    Survivors,
)
from tests.cells import every
from tests.fuzz.mutations import Noise, Pick, mutated
from tests.protocols.looking import everything
from tests.protocols.sessions import Cast, Play, cast, drawn, play, secret

CASTS: dict[str, dict[str, Any]] = {
    "complete": {"count": 5, "threshold": 2},
    "complete, active": {"count": 5, "threshold": 3, "active": True, "bound": 1000},
    "ring, active, 64 bits": {"count": 7, "neighbours": 4, "threshold": 3, "active": True, "bits": 64, "length": 3},
    "ring, one word": {"count": 7, "neighbours": 4, "threshold": 2, "length": 1},
}


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


DECODERS: dict[int, Any] = {
    **{Kind.ADVERTISE: Advertise, Kind.SHARES: Shares, Kind.MASKED: Masked, Kind.CONFIRM: Confirm},
    **{Kind.OPENED: Opened, Kind.ROSTER: Roster, Kind.DELIVERY: Delivery},
    **{Kind.SURVIVORS: Survivors, Kind.CONFIRMATIONS: Confirmations},
}
names = st.sampled_from(list(CASTS))


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the executed lines of the package: a measure of time that is the same on every machine."""
    lines = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if "protocols" not in frame.f_code.co_filename:
            return None
        lines[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def read(kind: int, data: bytes, parameters: Parameters, sender: int) -> Any:
    if sender == SERVER:
        return DECODERS[kind].from_bytes(data, parameters)
    return DECODERS[kind].from_bytes(data, parameters, sender)


def written(decoded: Any, parameters: Parameters, sender: int) -> bytes:
    if isinstance(decoded, Masked):
        frame, view = Masked.frame(parameters, sender, decoded.signature)
        view[:] = decoded.vector
        return bytes(frame)
    return bytes(decoded.to_bytes(parameters) if sender == SERVER else decoded.to_bytes(parameters, sender))


def judged(kind: int, data: bytes, parameters: Parameters, sender: int) -> bool:
    """Whether the decoder accepts the bytes. It may raise only `MessageError`; accepted bytes equal their own re-encoding."""
    try:
        decoded = read(kind, data, parameters, sender)
    except MessageError:
        return False
    assert written(decoded, parameters, sender) == data
    return True


Target = Callable[[Play, Pick, Noise], None]


def decodes(scene: Play, pick: Pick, noise: Noise) -> None:
    message = messages(scene)[pick(0, len(messages(scene)) - 1)]
    judged(message[5], mutated(message, pool(), pick, noise), scene.cast.parameters, sender_of(message))


def serves(scene: Play, pick: Pick, noise: Noise) -> None:
    """A server gets one mutated message beside the recorded ones. If it refuses it, the sum is what it would have been."""
    server, refused, stage = scene.cast.server(), False, drawn_stage(scene, pick, first=0)
    senders = [client for at, client in scene.said if at == stage]
    sender = senders[pick(0, len(senders) - 1)]
    lie = mutated(scene.said[stage, sender], pool(), pick, noise)
    try:
        for now in stages(scene.cast.parameters):
            if now == stage:
                try:
                    server.receive(sender, lie)
                except ProtocolError:
                    refused = True
            for client in sorted(server.waiting):
                if (now, client) in scene.said:
                    server.receive(client, scene.said[now, client])
            server.close()
    except ProtocolError:
        assert not refused
    else:
        assert not refused or server.total().tolist() == scene.expected().tolist()


def answers(scene: Play, pick: Pick, noise: Noise) -> None:
    """A client gets the recorded messages and then a mutated one. If it refuses it, it is finished and keeps no secret."""
    me, names = scene.cast.ids[0], stages(scene.cast.parameters)
    stage, client = drawn_stage(scene, pick, first=1), clients_of(scene.cast)[me]
    alone = replace(scene, clients={me: client})
    for earlier in names[: names.index(stage)]:
        alone.act(earlier, me, scene.told[earlier, me])
    try:
        alone.act(stage, me, mutated(scene.told[stage, me], pool(), pick, noise))
    except ProtocolError:
        with pytest.raises(MessageError, match="finished"):
            alone.act(stage, me, scene.told[stage, me])
        assert not [thing for thing in everything(client) if isinstance(thing, Secret)]


def drawn_stage(scene: Play, pick: Pick, first: int) -> str:
    names = stages(scene.cast.parameters)
    return names[pick(first, len(names) - 1)]


TARGETS: tuple[Target, ...] = (decodes, serves, answers)


@pytest.mark.parametrize(("target", "examples"), list(zip(TARGETS, (150, 40, 40), strict=True)))
def test_an_altered_message_is_refused_and_harms_nothing(target: Target, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(name=names, data=st.data())
    def tried(name: str, data: st.DataObject) -> None:
        target(recorded(name), *choices(data))

    tried()


def sender_of(message: bytes) -> int:
    return int.from_bytes(message[40:44], "little")


def test_every_kind_of_message_is_among_those_that_are_changed() -> None:
    assert {message[5] for message in pool()} == set(DECODERS) == set(Kind)
    for name in CASTS:
        scene = recorded(name)
        for message in messages(scene):
            assert judged(message[5], message, scene.cast.parameters, sender_of(message))


COUNTS = [*range(3), *range(2**31 - 2, 2**31 + 3), *range(2**32 - 8, 2**32), 2**32 // 86 + 1, 2**32 // 37 + 1, 2**28]


@every("name", CASTS)
@pytest.mark.parametrize("size", [0, 400, 40_000])
def test_the_cost_of_a_message_is_bounded_by_its_size(name: str, size: int) -> None:
    """The messages are real ones, and their headers before bodies with wrong counts in all places where a count could be."""
    scene = recorded(name)
    for message in {message[5]: message for message in messages(scene)}.values():
        bodies = [message[48:], bytes(size), bytes(range(256)) * (size // 256)]
        for at in (0, 32):
            bodies += [bytes(at) + count.to_bytes(4, "little") + bytes(size) for count in COUNTS]
        for body in bodies:
            cheap(message[5], message[:48] + body, scene.cast.parameters, sender_of(message))


def cheap(kind: int, data: bytes, parameters: Parameters, sender: int) -> None:
    with counted() as lines:
        judged(kind, data, parameters, sender)
    assert lines[0] < 500 + 5 * len(data)
    allowed = 20_000 + 60 * len(data)
    # The peak includes all threads, and a thread of the test runner may allocate memory meanwhile. A decoder's own memory is
    # the same each time, so one measurement below the limit is enough.
    assert any(memory_peak(kind, data, parameters, sender) < allowed for _ in range(3))


def memory_peak(kind: int, data: bytes, parameters: Parameters, sender: int) -> int:
    tracemalloc.start()
    judged(kind, data, parameters, sender)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def believed(reader: Reader) -> int:
    """A broken `Reader.count` that allocates as many entries as the message claims."""
    number = int.from_bytes(reader.view(4), "little")
    bytearray(min(4 * number, 2**24))
    return number


def unchecked(reader: Reader, size: int) -> memoryview:
    start, reader.at = reader.at, reader.at + size
    return reader.data[start : reader.at]


@pytest.mark.parametrize(("name", "broken"), [("count", believed), ("view", unchecked), ("end", lambda reader: None)])
def test_a_decoder_that_believes_what_it_reads_is_caught(
    name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, name, broken)
    with pytest.raises((AssertionError, ValueError, struct.error)):
        test_the_cost_of_a_message_is_bounded_by_its_size(400)


PRIME = 2**256 + 297


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(name=names, data=st.data())
def test_messages_and_closings_in_any_order(name: str, data: st.DataObject) -> None:
    """A server receives the messages of a session from any client at any time; before the end it releases no sum."""
    scene = recorded(name)
    server, said = scene.cast.server(), list(scene.said.items())
    for _ in range(data.draw(st.integers(1, 40))):
        try:
            if data.draw(st.integers(0, 7)) == 0:
                server.close()
            stage, client = data.draw(st.sampled_from([server.stage, *stages(scene.cast.parameters)])), 0
            fitting = [(owner, message) for (at, owner), message in said if at == stage] or [(client, b"")]
            for owner, message in fitting if data.draw(st.booleans()) else [data.draw(st.sampled_from(fitting))]:
                server.receive(owner if data.draw(st.integers(0, 9)) else scene.cast.ids[0], message)
        except ProtocolError:
            pass
        if server.stage != "done":
            with pytest.raises(MessageError, match="there is no sum"):
                server.total()


def shifted(made: Cast, liar: int) -> Callable[[str, int, bytes], bytes]:
    """The liar opens shares of mask keys that, with the shares of the next two holders, interpolate to the key plus one."""
    basis = [me + 1 for me in made.ids[:3]]
    weight = math.prod(place * pow(place - basis[0], -1, PRIME) for place in basis[1:])

    def say(stage: str, client: int, message: bytes) -> bytes:
        if (stage, client) != ("unmask", liar):
            return message
        opened = Opened.from_bytes(message, made.parameters, client)
        lies = {
            owner: ((int.from_bytes(share, "little") + pow(weight, -1, PRIME)) % PRIME).to_bytes(33, "little")
            for owner, share in opened.keys.items()
        }
        return Opened(opened.seeds, lies).to_bytes(made.parameters, client)

    return say


def test_a_share_that_gives_an_equivalent_key_puts_the_blame_on_nobody_else() -> None:
    """X25519 ignores the lowest bits of a private key, so the key plus one has the same public key."""
    made = cast(count=7, threshold=3)
    scene = play(made, silent={"mask": made.ids[-1:]}, say=shifted(made, made.ids[0]))
    assert scene.server.suspects == {made.ids[0]}
    assert scene.server.total().tolist() == scene.expected().tolist()
