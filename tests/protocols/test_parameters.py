"""The limits of a session's parameters, its number, which depends on all of them, and the sessions that a policy refuses.

A policy is computed for one number of neighbours: a server free to choose it would choose a graph with more colluders.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.client import Client
from protocols.errors import ParameterError
from protocols.keys import Identity, registry_digest
from protocols.parameters import PROTOCOL, Parameters, Policy, stages
from protocols.thresholds import choose
from tests.cells import every

IDENTITIES = {client: hashlib.sha256(str(client).encode()).digest() for client in range(30)}
TEN = tuple(range(10))
GOLDEN = "f2fe2555ddfbc6096fa0759bb0ab092f4246f754b7191e9ad8dbb0edba7d3960"


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


def test_equal_sessions_have_one_number() -> None:
    assert session_of() == session_of()
    assert session_of().session == session_of().session
    assert hash(session_of()) == hash(session_of())


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


def test_the_changes_are_of_every_field() -> None:
    assert set(CHANGES) == {field.name for field in fields(Parameters)}


@every("name", CHANGES)
def test_changing_any_one_field_changes_the_session(name: str) -> None:
    sessions = {session_of().session, *(varied(name, value).session for value in CHANGES[name])}
    assert len(sessions) == 1 + len(CHANGES[name])


def test_the_session_holds_the_protocols_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = session_of().session
    monkeypatch.setattr("protocols.parameters.PROTOCOL", PROTOCOL + 1)
    assert session_of().session != before


@given(st.data())
def test_no_two_different_sessions_have_one_number(data: st.DataObject) -> None:
    def drawn() -> Parameters:
        clients = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=4, unique=True).map(sorted))
        holders = len(clients) - 1
        return session_of(
            run=data.draw(st.text(st.sampled_from("ab\0\1"), min_size=1, max_size=3)),
            round=data.draw(st.integers(0, 2)),
            clients=tuple(clients),
            neighbours=holders + data.draw(st.integers(0, 1)),
            threshold=data.draw(st.integers(1, holders)),
            survivors=data.draw(st.integers(2, len(clients))),
            bound=data.draw(st.integers(0, 2)),
        )

    one, other = drawn(), drawn()
    assert (one == other) == (one.session == other.session)


VIOLATIONS: list[tuple[dict[str, Any], str]] = [
    ({"run": ""}, "run is ''"),
    ({"run": "\udc80"}, "UTF-8"),
    ({"run": 7}, "run is 7"),
    ({"round": -1}, "round is -1"),
    ({"round": 2**64}, "round is 18446744073709551616"),
    ({"round": True}, "round is True"),
    ({"layout": bytes(31)}, "layout is not 32 bytes"),
    ({"layout": "x" * 32}, "layout is not 32 bytes"),
    ({"length": 0}, "length is 0"),
    ({"length": 2**32}, "length is 4294967296"),
    ({"bits": 16}, "bits is 16"),
    ({"bits": 32.0}, r"bits is 32\.0"),
    ({"clients": (1,)}, "at least two"),
    ({"clients": [1, 2, 3]}, "not a tuple"),
    ({"clients": (*range(9), 2**32 - 1)}, "clients holds 4294967295"),
    ({"clients": (-1, *range(9))}, "clients holds -1"),
    ({"clients": (0, 1, 1, *range(3, 10))}, "1 after 1"),
    ({"clients": (1, 0, *range(2, 10))}, "0 after 1"),
    ({"clients": (False, *range(1, 10))}, "clients holds False"),
    ({"active": 1}, "active is 1"),
    ({"active": True}, "the digest of the identities in an active session"),
    ({"registry": bytes([1] * 32)}, "zeros in a passive session"),
    ({"registry": b""}, "registry is not 32 bytes"),
    ({"neighbours": 0}, "neighbours is 0"),
    ({"neighbours": 7}, "neighbours is 7 on a graph that is not complete"),
    ({"threshold": 0}, "threshold is 0 and 9 hold"),
    ({"threshold": 10}, "from 1 to 9"),
    ({"neighbours": 4, "threshold": 5}, "from 1 to 4"),
    ({"survivors": 1}, "survivors is 1"),
    ({"survivors": 11}, "from 2 to 10"),
    ({"bound": -1}, "bound is -1"),
    ({"bound": (2**31 - 1) // 10 + 1}, "a bound of 214748364"),
]


@every(("changes", "says"), VIOLATIONS)
def test_what_no_session_can_be_made_of_is_refused_in_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says) as caught:
        session_of(**changes)
    assert "\n" not in str(caught.value)
    assert ". " not in str(caught.value)


def test_an_active_session_needs_more_than_half_of_the_holders() -> None:
    active_of(threshold=5)
    with pytest.raises(ParameterError, match="at least 5"):
        active_of(threshold=4)
    active_of(neighbours=6, threshold=4)
    with pytest.raises(ParameterError, match="at least 4"):
        active_of(neighbours=6, threshold=3)


def test_the_largest_values_are_usable() -> None:
    session_of(bound=(2**31 - 1) // 10, length=2**32 - 1, round=2**64 - 1, clients=(*range(9), 2**32 - 2))
    session_of(clients=(0, 1), neighbours=1, threshold=1, survivors=2)


def test_complete_chosen_and_stages() -> None:
    assert [session_of(neighbours=k).complete for k in (8, 9, 10)] == [False, True, True]
    assert [session_of(neighbours=k).holders for k in (8, 9, 10)] == [8, 9, 9]
    assert [active_of(neighbours=k).chosen for k in (8, 9, 10)] == [True, False, False]
    assert not session_of(neighbours=8).chosen
    assert stages(session_of(neighbours=8)) == ("advertise", "share", "mask", "unmask")
    assert stages(active_of()) == ("advertise", "share", "mask", "consistency", "unmask")
    assert stages(active_of(neighbours=8)) == stages(active_of())
    assert (active_of(neighbours=8).masked, active_of(neighbours=8).signers, active_of().signers) == (4, 7, 7)


def test_the_registry_is_the_digest_of_numbers_and_keys() -> None:
    expected = b"secure-fed/registry" + (2).to_bytes(4, "little")
    expected += (3).to_bytes(4, "little") + IDENTITIES[3] + (7).to_bytes(4, "little") + IDENTITIES[7]
    assert (
        registry_digest(IDENTITIES, (3, 7)) == registry_digest(IDENTITIES, [7, 3]) == hashlib.sha256(expected).digest()
    )


def test_a_registry_of_other_clients_or_keys_is_another() -> None:
    swapped = IDENTITIES | {0: IDENTITIES[1], 1: IDENTITIES[0]}
    digests = {registry_digest(IDENTITIES, TEN), registry_digest(swapped, TEN), registry_digest(IDENTITIES, range(9))}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({0: bytes(32)}, "client 1 has no registered identity"),
        ({0: bytes(32), 1: bytes(33)}, "client 1 is not 32 bytes"),
        ({0: bytes(32), 1: bytes(32)}, "clients 0 and 1 have one identity"),
    ],
)
def test_a_registry_has_a_key_for_each(keys: dict[int, bytes], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
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


@every("named", [4, 6, 8, 9, 10, 50])
@every("told", [4, 6, 8, 9, 10, 50])
def test_a_client_takes_part_on_the_graph_of_its_policy_and_on_no_other(named: int, told: int) -> None:
    parameters = active_of(neighbours=told, threshold=min(told, 9), survivors=10)
    policy = policy_of(corrupt=1, partners=int(named < 9), neighbours=named)
    assert accepts(policy, parameters) == (named == told)
    if named != told:
        with pytest.raises(ParameterError, match=f"has {told} neighbours, and this client's policy is for {named}"):
            policy.check(parameters)


@pytest.mark.parametrize("named", [4, 9])
def test_a_number_that_is_named_holds_in_a_passive_session_too(named: int) -> None:
    for told in (4, 6, 9):
        parameters = session_of(neighbours=told, threshold=min(told, 6))
        assert accepts(policy_of(neighbours=named), parameters) == (named == told)


def test_who_expects_corrupt_clients_in_an_active_session_has_to_name_a_number() -> None:
    for neighbours in (8, 9):
        parameters = active_of(neighbours=neighbours, threshold=8, survivors=10)
        for corrupt in range(3):
            assert accepts(policy_of(corrupt=corrupt, partners=int(neighbours < 9)), parameters) == (corrupt == 0)
            assert accepts(policy_of(corrupt=corrupt, partners=int(neighbours < 9), neighbours=neighbours), parameters)
    with pytest.raises(ParameterError, match="sets no number of neighbours: set neighbours"):
        policy_of(corrupt=1, window=1).check(active_of(threshold=9, survivors=10))
    # A passive session's rule does not depend on the number of holders.
    policy_of(corrupt=1, window=1).check(session_of())


def test_nothing_is_sent_on_another_graph() -> None:
    """The constructor of `Client` raises the error, before there are any keys to send."""
    identities = [Identity.new() for _ in range(10)]
    public = {client: identity.public for client, identity in enumerate(identities)}
    told = {"neighbours": 9, "threshold": 9, "survivors": 10, "registry": registry_digest(public, tuple(range(10)))}
    for policy in (
        policy_of(corrupt=1, window=1, neighbours=6, identities=public),
        policy_of(corrupt=1, window=1, identities=public),
    ):
        with pytest.raises(ParameterError, match="neighbours"):
            Client(active_of(**told), 0, policy, identity=identities[0])
    policy = policy_of(corrupt=1, window=1, neighbours=9, identities=public)
    Client(active_of(**told), 0, policy, identity=identities[0]).advertise()


@pytest.mark.parametrize(
    ("clients", "corrupt", "dropout"), [(170, 0.25, 0.05), (300, 0.1, 0.1), (500, 0.1, 0.1), (1000, 0.1, 0.1)]
)
def test_a_graph_on_which_the_colluders_would_read_a_vector_is_refused(
    clients: int, corrupt: float, dropout: float
) -> None:
    """Where clients choose, c bounds the colluders among few neighbours. On a complete graph all colluders would hold shares:
    at the threshold required for c, all colluders and half of the honest clients suffice for each of two lists of survivors."""
    choice = choose(clients, corrupt=corrupt, dropout=dropout, active=True)
    identities = {client: client.to_bytes(32) for client in range(clients)}
    policy = Policy(choice.threshold, 2, choice.corrupt, choice.window, True, identities, neighbours=choice.neighbours)
    policy = replace(policy, partners=choice.partners, colluding=choice.colluding)
    own = _session(clients, choice.neighbours, choice.threshold, identities, choice.partners)
    policy.check(own)
    assert 2 * own.threshold > own.holders + choice.corrupt
    caught = 0
    for threshold in range(max((clients - 1 + choice.corrupt) // 2 + 1, choice.threshold), clients, 20):
        told = _session(clients, clients - 1, threshold, identities)
        assert not accepts(policy, told)
        assert not accepts(replace(policy, neighbours=None), told)
        assert accepts(replace(policy, neighbours=clients - 1), told), "nothing else would have refused it"
        caught += 2 * threshold <= told.holders + int(corrupt * clients)
    assert caught, "the attack would have succeeded at some of these thresholds"


def _session(
    clients: int, neighbours: int, threshold: int, identities: dict[int, bytes], partners: int = 0
) -> Parameters:
    invited = tuple(range(clients))
    return session_of(
        clients=invited,
        neighbours=neighbours,
        threshold=threshold,
        survivors=clients,
        active=True,
        partners=partners,
        registry=registry_digest(identities, invited),
    )
