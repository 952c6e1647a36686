"""Sessions with messages altered in transit: a refused message harms no other party and leaves no secret behind."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocols.client import Client
from protocols.errors import Aborted, MessageError, ProtocolError, Tampering
from protocols.parameters import stages
from protocols.server import Server
from protocols.wire import Buffer, Opened
from tests.cells import chosen
from tests.fuzz.mutations import mutated
from tests.protocols.fooling import (
    CASTS,
    Outcome,
    changed,
    clients_of,
    fooled_clients,
    fooled_server,
    noise_of,
    pool,
    recorded,
)
from tests.protocols.looking import contents, remains
from tests.protocols.sessions import METHODS, Cast, cast, play

PRIME = 2**256 + 297
every_cast = pytest.mark.parametrize("name", chosen(CASTS, ["complete, active", "ring, one word"]))

LIES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=4, unique=True)


def places(made: Cast, chosen: list[tuple[int, int]]) -> set[tuple[str, int]]:
    names = stages(made.parameters)
    return {(names[stage % len(names)], made.ids[client % made.count]) for stage, client in chosen}


@every_cast
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=LIES, data=st.data())
def test_a_server_goes_on_after_what_it_refused(name: str, chosen: list[tuple[int, int]], data: st.DataObject) -> None:
    made = recorded(name).cast
    result = fooled_server(made, places(made, chosen), changed(data))
    if not result.believed:
        assert result.scene.server.survivors == made.ids
        assert result.scene.server.suspects == frozenset()
        assert result.scene.server.total().tolist() == result.scene.expected().tolist()


@every_cast
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=LIES, data=st.data())
def test_a_client_is_finished_after_what_it_refused(
    name: str, chosen: list[tuple[int, int]], data: st.DataObject
) -> None:
    made = recorded(name).cast
    result = fooled_clients(made, places(made, chosen), changed(data))
    assert result.finished
    if result.believed:
        return
    assert all(isinstance(error, Aborted) for error in result.honestly)  # only: too few clients are left
    if result.done:
        assert result.scene.server.total().tolist() == result.scene.expected().tolist()


def fooled_often(name: str, fooled: Callable[..., Outcome]) -> Counter[str]:
    """The counted outcomes of sixty sessions with one altered message each."""
    made, rng, ends = recorded(name).cast, random.Random(5), Counter[str]()
    for _ in range(60):
        lies = {(rng.choice(stages(made.parameters)), rng.choice(made.ids))}
        result = fooled(made, lies, lambda message: mutated(message, pool(), rng.randint, noise_of(rng)))
        assert result.finished
        ends.update({"refused": len(result.refused), "believed": result.believed, "done": result.done})
    return ends


@every_cast
@pytest.mark.parametrize("fooled", chosen([fooled_server, fooled_clients], [fooled_server]))
def test_lies_are_mostly_refused_and_sometimes_believed(name: str, fooled: Callable[..., Outcome]) -> None:
    """So the two tests above cover refused and accepted messages."""
    ends = fooled_often(name, fooled)
    assert ends["refused"] > 20
    assert ends["believed"] > 0 or recorded(name).cast.active  # active: signatures refuse nearly all random changes
    assert ends["done"] > 20


def hasty(server: Server, sender: int, message: Buffer) -> None:
    """A broken `Server.receive` that stops waiting for a client before it has read the client's message."""
    if sender not in server._waiting:
        raise MessageError("has sent its message already")
    server._waiting.discard(sender)
    steps = server._stage_steps()
    if steps is None:
        raise KeyError(server.stage)
    steps[0](sender, message)
    server._heard.add(sender)


def test_a_client_that_keeps_its_secrets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "_forget", lambda client: None)
    with pytest.raises(AssertionError):
        fooled_often("complete", fooled_clients)


def test_a_server_that_counts_before_it_reads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "receive", hasty)
    with pytest.raises((ProtocolError, KeyError, AssertionError)):
        fooled_often("complete", fooled_server)


@every_cast
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
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


@every_cast
@given(order=st.lists(st.sampled_from(["advertise", "share", "mask", "confirm", "unmask"]), max_size=8))
def test_the_steps_of_a_client_in_any_order(name: str, order: list[str]) -> None:
    scene = recorded(name)
    me = scene.cast.ids[0]
    client, failed = clients_of(scene.cast)[me], False
    told = {METHODS[stage]: message for (stage, owner), message in scene.told.items() if owner == me}
    for step in order:
        last = (scene.vectors[me],) if step == "mask" else ()
        arguments = () if step == "advertise" else (told.get(step, b""), *last)
        try:
            getattr(client, step)(*arguments)
            assert not failed
        except ProtocolError:
            failed = True


# --- faults that a reviewer found


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


def all_wrong(made: Cast, owner: int) -> Callable[[str, int, bytes], bytes]:
    """All clients but the owner open a wrong share of the owner's seed."""

    def say(stage: str, client: int, message: bytes) -> bytes:
        if stage != "unmask" or client == owner:
            return message
        opened = Opened.from_bytes(message, made.parameters, client)
        share = opened.seeds[owner]
        seeds = {**opened.seeds, owner: bytes([share[0] ^ client]) + share[1:]}
        return Opened(seeds, opened.keys).to_bytes(made.parameters, client)

    return say


def test_the_error_of_a_session_without_a_sum_keeps_no_seed_alive() -> None:
    """An error keeps its frames' variables alive, and a log may print them: they must not contain rebuilt seeds."""
    made = cast(count=7, threshold=3)
    clients, server = clients_of(made), made.server()
    seeds = [client._keys.seed.reveal() for client in clients.values() if client._keys is not None]
    with pytest.raises(Tampering) as caught:
        play(made, clients=clients, server=server, say=all_wrong(made, made.ids[-1]))
    held = contents((server, remains(caught.value)))
    assert len(seeds) == 7
    assert [seed for seed in seeds if seed in held] == []
