"""Errors: one readable sentence, an exit status, and pickling for process pools."""

from __future__ import annotations

import pickle

import pytest

from protocols.errors import Aborted, MessageError, ParameterError, ProtocolError, RangeError, Spent, Tampering
from tests.cells import every

KINDS = (ProtocolError, ParameterError, RangeError, MessageError, Tampering, Aborted, Spent)


@every(
    ("parts", "expected"),
    [
        ({}, "3 are left"),
        ({"who": "client 4"}, "3 are left [client 4]"),
        ({"stage": "mask"}, "3 are left [stage mask]"),
        ({"who": "client 4", "stage": "mask"}, "3 are left [client 4, stage mask]"),
        ({"protected": "no vector was sent"}, "3 are left: no vector was sent"),
        (
            {"who": "the server", "stage": "unmask", "protected": "no sum is released"},
            "3 are left [the server, stage unmask]: no sum is released",
        ),
    ],
)
def test_what_is_known_is_said_and_nothing_else(parts: dict[str, str], expected: str) -> None:
    assert str(ProtocolError("3 are left", **parts)) == expected


@every("kind", KINDS)
def test_every_error_keeps_its_parts_and_can_be_sent_to_another_process(kind: type[ProtocolError]) -> None:
    error = kind("it went wrong", who="client 4", stage="share", protected="nothing was sent")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert type(one) is kind
        assert (one.what, one.who, one.stage, one.protected) == (
            "it went wrong",
            "client 4",
            "share",
            "nothing was sent",
        )
        assert str(one) == "it went wrong [client 4, stage share]: nothing was sent"


def test_exit_statuses_tell_what_to_change_from_what_happened() -> None:
    assert {kind: kind.exit_code for kind in KINDS} == {
        ProtocolError: 1,
        ParameterError: 2,
        RangeError: 2,
        MessageError: 1,
        Tampering: 1,
        Aborted: 1,
        Spent: 1,
    }


def test_parts_beside_the_sentence_are_named() -> None:
    with pytest.raises(TypeError):
        ProtocolError("what", "client 4")  # type: ignore[misc]
