"""A policy is computed for one number of neighbours: a server free to choose it would choose a graph with more colluders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocols.client import Client
from protocols.errors import ParameterError
from protocols.keys import Identity, registry_digest
from protocols.parameters import Parameters, Policy
from protocols.thresholds import choose
from tests.cells import every
from tests.protocols.test_policy import accepts, active_of, policy_of, session_of


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
