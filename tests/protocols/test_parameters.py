"""The limits of a session's parameters, its number, which depends on all of them, and the sessions that a policy refuses.

A policy is computed for one number of neighbours: a server free to choose it would choose a graph with more colluders.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import fields, replace
from typing import Any

import pytest

from protocols.errors import ParameterError
from protocols.keys import registry_digest
from protocols.parameters import PROTOCOL, Parameters, Policy, stages
from tests.cells import every

IDENTITIES = {client: hashlib.sha256(str(client).encode()).digest() for client in range(30)}
TEN = tuple(range(10))
GOLDEN = "4b0aafe4e0472ff4d932c884f3ffd998ce3c82946cf33b502dc63f27fefbbfd1"


def session_of(**changes: Any) -> Parameters:
    """A usable session of ten clients on a complete graph (nine holders, threshold six), with these changes."""
    given: dict[str, Any] = {
        "run": "run",
        "round": 3,
        "layout": bytes(range(32)),
        "length": 100,
        "bits": 32,
        "clients": TEN,
        "neighbours": 9,
        "threshold": 6,
        "survivors": 7,
        "active": False,
    }
    return Parameters(**(given | changes))


def active_of(**changes: Any) -> Parameters:
    clients = changes.get("clients", TEN)
    chosen = changes.get("neighbours", 9) < len(clients) - 1
    given = {"active": True, "registry": registry_digest(IDENTITIES, clients), "partners": int(chosen)}
    return session_of(**(given | changes))


def naive_encoding(parameters: Parameters) -> bytes:
    def number(value: int, size: int = 4) -> bytes:
        return value.to_bytes(size, "little")

    run = parameters.run.encode("utf-8")
    encoded = b"secure-fed/session" + number(PROTOCOL) + number(len(run)) + run + number(parameters.round, 8)
    encoded += parameters.layout + number(parameters.length) + number(parameters.bits) + number(len(parameters.clients))
    encoded += b"".join(number(client) for client in parameters.clients)
    for value in (parameters.neighbours, parameters.threshold, parameters.survivors, int(parameters.active)):
        encoded += number(value)
    encoded += number(parameters.partners)
    return encoded + number(parameters.bound, 8) + parameters.registry


def test_the_session_is_the_digest_of_the_stated_encoding() -> None:
    for parameters in (session_of(), active_of(run="Zürich", bits=64, round=2**64 - 1, bound=2**40)):
        assert parameters.session == hashlib.sha256(naive_encoding(parameters)).digest()
    assert session_of().session.hex() == GOLDEN


CHANGES: dict[str, tuple[Any, ...]] = {
    "run": ("ruN", "run ", "run2", "r", "run\0"),
    "round": (0, 2, 2**32 + 3, 2**64 - 1),
    "layout": (bytes(32), bytes([1, *range(1, 32)]), bytes([*range(31), 255])),
    "length": (1, 99, 101, 2**32 - 1),
    "bits": (64,),
    "clients": ((*range(9), 10), (*range(9), 2**32 - 2), tuple(range(1, 11)), tuple(range(9))),
    "neighbours": (8, 10, 11, 4),
    "threshold": (5, 7, 9),
    "survivors": (6, 8, 10),
    "active": (True,),
    "bound": (1, 1000, 2**27),
    "partners": (1, 4),
    "registry": (registry_digest(IDENTITIES, TEN), registry_digest(IDENTITIES, range(9))),
}


def varied(name: str, value: Any) -> Parameters:
    """A session with this value in this field. It differs from `session_of()`, or if it sets a registry, from `active_of()`."""
    threshold = {"threshold": 4} if name == "neighbours" and value == 4 else {}
    if name in ("active", "partners"):
        base = replace(session_of())
        object.__setattr__(base, name, value)  # set directly, since no usable session differs in this field alone
        return base
    if name == "registry":
        return active_of(registry=value)
    return session_of(**({name: value} | threshold))


@every("name", CHANGES)
def test_changing_any_one_field_changes_the_session(name: str) -> None:
    assert set(CHANGES) == {field.name for field in fields(Parameters)}
    sessions = {session_of().session, *(varied(name, value).session for value in CHANGES[name])}
    assert len(sessions) == 1 + len(CHANGES[name])


CHOSEN = {"neighbours": 8, "threshold": 7, "survivors": 8}
VIOLATIONS: list[dict[str, Any]] = [
    *({"run": value} for value in ("", "\udc80", 7)),
    *({"round": value} for value in (-1, 2**64, True)),
    *({"layout": value} for value in (bytes(31), "x" * 32)),
    *({"length": value} for value in (0, 2**32)),
    *({"bits": value} for value in (16, 32.0)),
    *(
        {"clients": value}
        for value in ((1,), [1, 2, 3], (*range(9), 2**32 - 1), (-1, *range(9)), (False, *range(1, 10)))
    ),
    *({"clients": value} for value in ((0, 1, 1, *range(3, 10)), (1, 0, *range(2, 10)))),
    {"active": 1},
    {"active": True, "registry": bytes(32)},
    *({"registry": value} for value in (bytes([1] * 32), b"")),
    *({"neighbours": value} for value in (0, 7)),
    *({"threshold": value} for value in (0, 10)),
    {"neighbours": 4, "threshold": 5},
    *({"survivors": value} for value in (1, 11)),
    *({"bound": value} for value in (-1, (2**31 - 1) // 10 + 1)),
    {"partners": 1},
    *({"active": True, **CHOSEN, "partners": value} for value in (0, 5)),
    {"active": True, **CHOSEN, "survivors": 5},
    # An active session needs more than half of the holders.
    {"active": True, "threshold": 4},
    {"active": True, "neighbours": 6, "threshold": 3},
]


@every("changes", VIOLATIONS)
def test_what_no_session_can_be_made_of_is_refused_by_its_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        (active_of if changes.get("active") is True else session_of)(**changes)
    assert str(caught.value).split()[0] == list(changes)[-1]


def test_the_largest_values_are_usable() -> None:
    session_of(bound=(2**31 - 1) // 10, length=2**32 - 1, round=2**64 - 1, clients=(*range(9), 2**32 - 2))
    session_of(clients=(0, 1), neighbours=1, threshold=1, survivors=2)
    active_of(threshold=5)
    active_of(neighbours=6, threshold=4)


def test_complete_chosen_and_stages() -> None:
    assert [session_of(neighbours=k).complete for k in (8, 9, 10)] == [False, True, True]
    assert [session_of(neighbours=k).holders for k in (8, 9, 10)] == [8, 9, 9]
    assert [active_of(neighbours=k).chosen for k in (8, 9, 10)] == [True, False, False]
    assert not session_of(neighbours=8).chosen
    assert stages(session_of(neighbours=8)) == ("advertise", "share", "mask", "unmask")
    assert stages(active_of()) == ("advertise", "share", "mask", "consistency", "unmask")
    assert stages(active_of(neighbours=8)) == stages(active_of())
    assert (active_of(neighbours=8).masked, active_of(neighbours=8).signers, active_of().signers) == (4, 7, 7)


@every("keys", [{0: bytes(32)}, {0: bytes(32), 1: bytes(33)}, {0: bytes(32), 1: bytes(32)}])
def test_a_registry_has_a_key_for_each(keys: dict[int, bytes]) -> None:
    """It is the digest of numbers and keys, and no two clients have one identity."""
    entries = (3).to_bytes(4, "little") + IDENTITIES[3] + (7).to_bytes(4, "little") + IDENTITIES[7]
    expected = hashlib.sha256(b"secure-fed/registry" + (2).to_bytes(4, "little") + entries).digest()
    assert registry_digest(IDENTITIES, (3, 7)) == registry_digest(IDENTITIES, [7, 3]) == expected
    with pytest.raises(ParameterError):
        registry_digest(keys, (0, 1))


def policy_of(**changes: Any) -> Policy:
    given: dict[str, Any] = {"threshold": 2, "survivors": 2, "identities": IDENTITIES}
    return Policy(**(given | changes))


def accepts(policy: Policy, parameters: Parameters) -> bool:
    try:
        policy.check(parameters)
    except ParameterError:
        return False
    return True


def test_a_passive_session_needs_more_than_the_corrupt_holders() -> None:
    for threshold in range(1, 10):
        for corrupt in range(9):
            parameters = session_of(threshold=threshold, survivors=10)
            assert accepts(policy_of(threshold=1, corrupt=corrupt), parameters) == (corrupt < threshold)


@every("neighbours", [4, 6, 8, 9, 10, 50])
def test_an_active_session_needs_twice_the_threshold_over_holders_and_corrupt(neighbours: int) -> None:
    """h is the number of holders: at most the number of other clients, however large `neighbours` is."""
    h = min(neighbours, 9)
    seen = set()
    for threshold in range(h // 2 + 1, h + 1):
        for corrupt in range(h):
            parameters = active_of(neighbours=neighbours, threshold=threshold, survivors=10)
            safe = 2 * threshold > h + corrupt
            policy = policy_of(corrupt=corrupt, partners=int(neighbours < 9), neighbours=neighbours)
            assert accepts(policy, parameters) == safe
            seen.add(safe)
    assert seen == {True, False}


@every("named", [4, 6, 8, 9, 10, 50])
@every("told", [4, 6, 8, 9, 10, 50])
def test_a_client_takes_part_on_the_graph_of_its_policy_and_on_no_other(named: int, told: int) -> None:
    parameters = active_of(neighbours=told, threshold=min(told, 9), survivors=10)
    policy = policy_of(corrupt=1, partners=int(named < 9), neighbours=named)
    assert accepts(policy, parameters) == (named == told)


def test_a_number_that_is_named_holds_in_a_passive_session_and_is_asked_for_in_an_active_one() -> None:
    for named, told in itertools.product((4, 9), (4, 6, 9)):
        parameters = session_of(neighbours=told, threshold=min(told, 6))
        assert accepts(policy_of(neighbours=named), parameters) == (named == told)
    for neighbours, corrupt in itertools.product((8, 9), range(3)):
        parameters = active_of(neighbours=neighbours, threshold=8, survivors=10)
        assert accepts(policy_of(corrupt=corrupt, partners=int(neighbours < 9)), parameters) == (corrupt == 0)
        assert accepts(policy_of(corrupt=corrupt, partners=int(neighbours < 9), neighbours=neighbours), parameters)
    assert accepts(policy_of(corrupt=1, window=1), session_of())


PASSIVE, ACTIVE = session_of(), active_of()
TWENTY = session_of(clients=tuple(range(20)), neighbours=8, survivors=15)
EIGHT = active_of(**CHOSEN, partners=3)
CHOOSING = {"corrupt": 2, "partners": 3, "colluding": 5, "neighbours": 8}
DEMANDS: list[tuple[str, Parameters, dict[str, Any], dict[str, Any] | Parameters]] = [
    # The word that the refusal has, a session, a policy that accepts it, and the policy or the session that does not fit.
    ("threshold", PASSIVE, {"threshold": 6}, {"threshold": 7}),
    ("survivors", PASSIVE, {"survivors": 7}, {"survivors": 8}),
    ("clients", PASSIVE, {"clients": 10}, {"clients": 11}),
    ("honest", PASSIVE, {"corrupt": 5}, session_of(survivors=6)),
    ("passive", ACTIVE, {"active": True}, PASSIVE),
    ("identities", ACTIVE, {"identities": IDENTITIES | {77: bytes(32)}}, {"identities": IDENTITIES | {4: bytes(32)}}),
    ("identity", ACTIVE, {}, {"identities": {}}),
    ("set window", TWENTY, {}, {"corrupt": 3}),
    ("raise neighbours", TWENTY, {"corrupt": 3, "window": 3}, {"corrupt": 3, "window": 4}),
    ("partners is 2", EIGHT, CHOOSING, active_of(**CHOSEN, partners=2)),
    ("two lists", EIGHT, CHOOSING, active_of(**{**CHOSEN, "survivors": 7}, partners=3)),
    ("set partners", EIGHT, CHOOSING, {"corrupt": 2, "neighbours": 8}),
]


@every(("word", "parameters", "fits", "does_not"), DEMANDS)
def test_a_policy_refuses_what_is_weaker_than_it_demands(
    word: str, parameters: Parameters, fits: dict[str, Any], does_not: dict[str, Any] | Parameters
) -> None:
    policy_of(**fits).check(parameters)
    policy, other = (fits, does_not) if isinstance(does_not, Parameters) else (does_not, parameters)
    with pytest.raises(ParameterError, match=word):
        policy_of(**policy).check(other)


LEAST = {"threshold": 0, "survivors": 1, "corrupt": -1, "window": -1, "clients": 1, "partners": -1, "colluding": 0.5}


@every(("name", "value"), LEAST.items())
def test_a_policy_is_of_sensible_numbers(name: str, value: float) -> None:
    with pytest.raises(ParameterError, match=name):
        policy_of(**{name: value})
