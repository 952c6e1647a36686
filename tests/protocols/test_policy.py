"""The sessions that a client's policy refuses, whatever the server proposes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from protocols.errors import ParameterError
from protocols.keys import registry_digest
from protocols.parameters import Parameters, Policy
from tests.cells import every

IDENTITIES = {client: hashlib.sha256(str(client).encode()).digest() for client in range(30)}
TEN = tuple(range(10))


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


def test_why_the_rule_of_an_active_session_is_that() -> None:
    """Of two lists honest holders answer one, corrupt holders both: both lists can get t answers exactly if 2 t <= h + c."""
    for holders in range(1, 12):
        for corrupt in range(holders + 1):
            for threshold in range(1, holders + 1):
                both = any(
                    first + corrupt >= threshold and (holders - corrupt - first) + corrupt >= threshold
                    for first in range(holders - corrupt + 1)
                )
                assert both == (2 * threshold <= holders + corrupt)


@pytest.mark.parametrize("name", ["threshold", "survivors", "clients"])
def test_the_clients_own_minima_hold(name: str) -> None:
    value = {"threshold": 6, "survivors": 7, "clients": 10}[name]
    policy_of(**{name: value}).check(session_of())
    with pytest.raises(ParameterError, match=f"session's {name} is {value}, and .* at least {value + 1}"):
        policy_of(**{name: value + 1}).check(session_of())


def test_two_of_a_sum_are_honest() -> None:
    policy_of(corrupt=5).check(session_of(survivors=7))
    with pytest.raises(ParameterError, match="raise survivors to at least 7"):
        policy_of(corrupt=5).check(session_of(survivors=6))


def test_who_asks_for_an_active_session_refuses_a_passive_one() -> None:
    policy_of(active=True).check(active_of())
    policy_of(active=False).check(active_of())
    with pytest.raises(ParameterError, match="session is passive"):
        policy_of(active=True).check(session_of())


def test_an_active_session_is_of_the_identities_that_the_client_has_registered() -> None:
    foreign = IDENTITIES | {4: bytes(32)}
    with pytest.raises(ParameterError, match="identities differ from those registered at this client"):
        policy_of(identities=foreign).check(active_of())
    with pytest.raises(ParameterError, match="client 0 has no registered identity"):
        policy_of(identities={}).check(active_of())
    policy_of(identities=IDENTITIES | {77: bytes(32)}).check(active_of())  # identities of uninvited clients are ignored


def test_a_window_that_guards_nothing_is_refused() -> None:
    ring = session_of(clients=tuple(range(20)), neighbours=8, survivors=15)
    policy_of(corrupt=3, window=3).check(ring)
    policy_of().check(ring)
    policy_of(corrupt=3).check(session_of())  # a complete graph needs no window
    with pytest.raises(ParameterError, match="set window"):
        policy_of(corrupt=3).check(ring)
    with pytest.raises(ParameterError, match="4 corrupt in 4 consecutive"):
        policy_of(corrupt=3, window=4).check(ring)


def test_where_clients_choose_a_policy_asks_for_partners_and_for_one_list() -> None:
    def chosen(**changes: Any) -> Parameters:
        return active_of(**({"neighbours": 8, "threshold": 7, "survivors": 8, "partners": 3} | changes))

    policy = policy_of(corrupt=2, partners=3, colluding=5, neighbours=8)
    policy.check(chosen())
    with pytest.raises(ParameterError, match="partners is 2, and this client's policy needs 3"):
        policy.check(chosen(partners=2))
    with pytest.raises(ParameterError, match=r"with 5 corrupt of 10 two lists .* raise survivors to at least 8"):
        policy.check(chosen(survivors=7))
    with pytest.raises(ParameterError, match="sets no partners: set partners"):
        policy_of(corrupt=2, neighbours=8).check(chosen())
    for changes, says in (
        ({"partners": 0}, "partners is 0: choose from 1 to 4"),
        ({"partners": 5}, "partners is 5: choose from 1 to 4"),
        ({"survivors": 5}, "survivors is 5, and that many of 10"),
    ):
        with pytest.raises(ParameterError, match=says):
            chosen(**changes)
    with pytest.raises(ParameterError, match="partners is 1: it is 0 where clients do not choose"):
        session_of(partners=1)


def test_two_lists_of_survivors_cannot_both_be_signed_by_enough() -> None:
    """A corrupt client signs both lists, an honest client one. Both get enough signatures exactly if 2 survivors <= n + C."""
    for clients in range(2, 12):
        for corrupt in range(clients + 1):
            for survivors in range(1, clients + 1):
                honest = clients - corrupt
                both = any(
                    one + corrupt >= survivors and honest - one + corrupt >= survivors for one in range(honest + 1)
                )
                assert both == (2 * survivors <= clients + corrupt)


@every(
    "changes",
    [
        {"threshold": 0},
        {"survivors": 1},
        {"corrupt": -1},
        {"window": -1},
        {"clients": 1},
        {"corrupt": 0.5},
        {"partners": -1},
    ],
)
def test_a_policy_is_of_sensible_numbers(changes: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=f"{next(iter(changes))} of the policy"):
        policy_of(**changes)
