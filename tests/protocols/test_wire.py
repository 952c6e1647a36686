"""Every message, encoded and decoded, strict to the byte; `test_fuzz` decodes any bytes.

The closed forms of a session's cost are compared with the bytes of real sessions, message by message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocols.errors import MessageError
from protocols.parameters import SERVER, Parameters, stages
from protocols.wire import (
    HEADER,
    Advertise,
    Confirm,
    Confirmations,
    Delivery,
    Masked,
    Opened,
    Roster,
    Shares,
    Survivors,
    Traffic,
    traffic,
)
from tests.cells import every
from tests.protocols.sessions import cast, play

CLIENTS = tuple(range(10, 20))
SENDER = 12


def parameters(*, active: bool = True, neighbours: int = 4, bits: int = 32, run: str = "messages") -> Parameters:
    registry = bytes([1] * 32) if active else bytes(32)
    return Parameters(
        run=run,
        round=3,
        layout=bytes(32),
        length=5,
        bits=bits,
        clients=CLIENTS,
        neighbours=neighbours,
        threshold=3 if neighbours == 4 else 6,
        survivors=6,
        active=active,
        partners=1 if active and neighbours == 4 else 0,
        registry=registry,
    )


CHOSEN = parameters()
PASSIVE = parameters(active=False)


def filled(size: int, start: int = 1) -> bytes:
    return bytes((start + 7 * at) % 256 for at in range(size))


ADVERT = Advertise(filled(32), filled(32, 2), filled(32, 3), filled(64, 4))
CLIENT_MESSAGES: list[Any] = [
    ADVERT,
    Shares(filled(32), {10: filled(82), 17: filled(82, 9)}),
    Confirm(filled(64)),
    Opened({10: filled(33), 11: filled(33, 3)}, {15: filled(33, 8)}),
]
SERVER_MESSAGES: list[Any] = [
    Roster({10: ADVERT, 14: Advertise(filled(32, 5), filled(32, 6), filled(32, 7), filled(64, 8))}),
    Delivery({10: filled(82), 11: filled(82, 4)}, {10: filled(32, 6), 12: filled(32, 7)}),
    Survivors((10, 13, 19), {10: filled(64, 3)}),
    Confirmations({10: filled(64), 13: filled(64, 2)}),
]


def encoded(message: Any) -> bytes:
    return message.to_bytes(CHOSEN, SENDER) if message in CLIENT_MESSAGES else message.to_bytes(CHOSEN)


def decoder(kind: type) -> Callable[[bytes], Any]:
    if kind in (Roster, Delivery, Survivors, Confirmations):
        return lambda data: kind.from_bytes(data, CHOSEN)  # type: ignore[attr-defined]
    return lambda data: kind.from_bytes(data, CHOSEN, SENDER)  # type: ignore[attr-defined]


def frame(words: list[int], used: Parameters = CHOSEN) -> bytes:
    data, view = Masked.frame(used, SENDER, filled(64, 6) if used.active else b"")
    view[:] = words
    return bytes(data)


EXAMPLES = {type(message): encoded(message) for message in [*CLIENT_MESSAGES, *SERVER_MESSAGES]}
EXAMPLES[Masked] = frame([1, 2, 3, 4, 5])
every_kind = pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)


@every("message", [*CLIENT_MESSAGES, *SERVER_MESSAGES])
def test_a_message_is_read_as_it_was_written(message: Any) -> None:
    assert decoder(type(message))(encoded(message)) == message


def test_a_masked_vector_is_read_as_it_was_written() -> None:
    for bits, words in ((32, [0, 1, 2**32 - 1, 7, 8]), (64, [0, 1, 2**64 - 1, 2**40, 8])):
        used = parameters(bits=bits)
        vector = Masked.from_bytes(frame(words, used), used, SENDER).vector
        assert (vector.tolist(), vector.dtype) == (words, np.dtype(f"u{bits // 8}"))


def test_the_frame_of_a_masked_vector_is_the_message_itself() -> None:
    data, view = Masked.frame(CHOSEN, SENDER, filled(64))
    view += np.uint32(0x04030201)
    assert data[HEADER.size :] == bytes([1, 2, 3, 4] * 5) + filled(64)
    assert np.shares_memory(Masked.from_bytes(data, CHOSEN, SENDER).vector, view)


@every("advert", [ADVERT, Advertise(filled(32), filled(32), b"", filled(64)), Advertise(b"", filled(32))])
def test_an_advertisement_with_fields_of_another_kind_of_session_is_not_written(advert: Advertise) -> None:
    with pytest.raises(MessageError):
        advert.to_bytes(PASSIVE, SENDER)


@every_kind
def test_every_other_length_is_refused(kind: type) -> None:
    data = EXAMPLES[kind]
    for length in range(len(data)):
        with pytest.raises(MessageError):
            decoder(kind)(data[:length])
    with pytest.raises(MessageError, match="1 bytes too many at the end"):
        decoder(kind)(data + b"\0")


HEADER_LIES = {
    "magic": (0, b"SFSB"),
    "version": (4, b"\1"),
    "kind": (5, b"\7"),
    "reserved": (6, b"\1"),
    "session": (8, parameters(run="another").session),
    "sender": (40, struct.pack("<I", 13)),
    "reserved at the end": (44, b"\0\0\0\1"),
}


@every_kind
@every("lie", HEADER_LIES)
def test_every_field_of_the_header_is_checked(kind: type, lie: str) -> None:
    at, value = HEADER_LIES[lie]
    data = bytearray(EXAMPLES[kind])
    data[at : at + len(value)] = value
    with pytest.raises(MessageError):
        decoder(kind)(bytes(data))


# The offset of the first table's count, and the size of its entries.
TABLES = {Shares: (80, 86), Opened: (48, 37), Roster: (48, 164), Delivery: (48, 86), Survivors: (48, 4)}
TABLES[Confirmations] = (48, 68)


@every("kind", TABLES)
@every("second", [10, 9, 0, SERVER])
def test_a_table_is_of_ascending_clients(kind: type, second: int) -> None:
    at, width = TABLES[kind]
    data = bytearray(EXAMPLES[kind])
    assert struct.unpack_from("<I", data, at + 4) == (10,)
    struct.pack_into("<I", data, at + 4 + width, second)
    with pytest.raises(MessageError):
        decoder(kind)(bytes(data))


def test_both_shares_of_one_client_are_no_message() -> None:
    both = Opened({10: filled(33), 11: filled(33)}, {11: filled(33)}).to_bytes(CHOSEN, SENDER)
    with pytest.raises(MessageError, match="both shares of client 11"):
        Opened.from_bytes(both, CHOSEN, SENDER)


def test_what_is_read_from_a_message_no_longer_depends_on_its_bytes() -> None:
    data = bytearray(EXAMPLES[Delivery])
    read = Delivery.from_bytes(data, CHOSEN)
    data[60:] = bytes(len(data) - 60)
    assert read == decoder(Delivery)(EXAMPLES[Delivery])


def test_opened_shares_are_not_shown() -> None:
    share = bytes(range(200, 233))
    shown = repr(Opened({1: share}, {2: share}))
    assert repr(share)[2:-1] not in shown


SHAPES = [{"count": 2}, {"count": 3}, {"count": 7}, {"count": 9, "neighbours": 4}]
WORDS = [{"bits": 32, "length": 333}, {"bits": 64, "length": 1}]


@every(("shape", "words"), [(SHAPES[0], WORDS[1]), *((shape, WORDS[0]) for shape in SHAPES)])
@every("active", [False, True])
def test_every_client_sends_and_is_sent_what_is_foretold(
    shape: dict[str, int], words: dict[str, int], active: bool
) -> None:
    """In the first stage, what is sent down is the parameters."""
    made = cast(**shape, **words, active=active)
    foretold = traffic(made.parameters)
    assert tuple(foretold) == stages(made.parameters)
    if made.parameters.chosen:
        return
    scene, found = play(made), dict[str, set[Traffic]]()
    for (stage, client), answer in scene.said.items():
        told = scene.told[stage, client] or made.parameters.to_bytes()
        found.setdefault(stage, set()).add(Traffic(up=len(answer), down=len(told)))
    assert found == {stage: {cost} for stage, cost in foretold.items()}


def test_where_clients_choose_the_mean_is_what_is_foretold() -> None:
    """`traffic` gives exact means, and expectations where a message's size depends on how many clients are near a client."""
    scene = play(cast(count=24, neighbours=8, active=True, corrupt=1))
    foretold, many = traffic(scene.cast.parameters), len(scene.clients)
    for stage, cost in foretold.items():
        up = [len(answer) for (at, _), answer in scene.said.items() if at == stage]
        down = [len(told) for (at, _), told in scene.told.items() if at == stage and told]
        assert len(up) == many
        assert sum(up) == many * cost.up
        if stage in ("mask", "unmask"):
            assert sum(down) == many * cost.down
        elif down:
            assert sum(down) / many == pytest.approx(cost.down, rel=0.1)
