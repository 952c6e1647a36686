"""Federations of many registered clients, of which only the drawn ones are built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed.errors import ConfigError
from secure_fed.learning import problem
from secure_fed.rounds.client import Registered
from tests.contracts.runs import KilledAfter, KilledError
from tests.golden import refused
from tests.secure_fed import toys

torch.set_num_threads(1)

CLIENTS = 40


class OnDemand(Sequence[Any]):
    """Builds a client's examples on access, and notes the client's index."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return CLIENTS

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return toys.examples(index, 2 + index % 3)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "MANY", CLIENTS)


def settings(unit: str, **more: Any) -> dict[str, Any]:
    private = {"privacy.unit": unit, "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-6, "evaluation.dummies": 0}
    usual = {"federation.cohort": 4, "evaluation.audit_fraction": 0.0}
    return {**usual, **(private if unit != "none" else {}), **more}


def test_results_are_those_of_the_same_clients_in_a_list() -> None:
    whole = [toys.examples(index, 2 + index % 3) for index in range(CLIENTS)]
    results = [toys.federation(settings("none"), train=train).run() for train in (OnDemand(), whole)]
    assert toys.same(results[0].state.tensors, results[1].state.tensors)
    assert toys.without_time(results[0].records) == toys.without_time(results[1].records)


def test_units_to_hold_out_are_not_to_be_had_of_clients_that_do_not_exist_yet() -> None:
    with refused(ConfigError, "evaluation.audit_fraction"):
        toys.federation({"federation.cohort": 4, "evaluation.audit_fraction": 0.5}, train=OnDemand())
    with refused(ConfigError, "evaluation.canaries"):
        toys.federation({"federation.cohort": 4, "evaluation.canaries": "mislabelled"}, train=OnDemand())


@pytest.mark.parametrize("unit", ["none", "client"])
def test_only_drawn_clients_are_asked_for_and_none_is_kept(unit: str) -> None:
    train = OnDemand()
    federation = toys.federation(settings(unit), train=train)
    assert set(train.asked) <= {0}  # the first client's examples may be inspected at the start
    train.asked.clear()
    federation.run()
    clients = federation.assembly.clients
    assert isinstance(clients, Registered)
    assert len(clients) == CLIENTS
    assert clients.made == []
    assert len(set(train.asked)) < CLIENTS
    if unit == "none":
        assert sorted(train.asked) == sorted(
            one for round_ in range(3) for one in federation.assembly.server.draw(round_)
        )


def test_personal_tensors_stay_with_their_client_through_a_kill(tmp_path: Path) -> None:
    chosen = settings("none", **{"method.personal": ["classifier"], "federation.rounds": 4})
    whole, resumed = (toys.federation(chosen, train=OnDemand()) for _ in range(2))
    kept_of_all = whole.run().state
    with pytest.raises(KilledError):
        toys.federation(chosen, train=OnDemand(), callbacks=[KilledAfter(2)]).run(tmp_path / "run")
    assert toys.same(resumed.run(tmp_path / "run", resume=True).state.tensors, kept_of_all.tensors)
    own, other = resumed.assembly.clients, whole.assembly.clients
    assert isinstance(own, Registered)
    assert isinstance(other, Registered)
    assert [client.index for client in own.made] == [client.index for client in other.made] != []
    assert all(toys.same(own[one.index].personal, one.personal) for one in other.made)


def test_a_client_is_one_object_until_it_is_let_go() -> None:
    clients = toys.federation(settings("none"), train=OnDemand()).assembly.clients
    assert isinstance(clients, Registered)
    first, last = clients[3], clients[-1]
    assert clients[3] is first
    assert clients[CLIENTS - 1] is last
    last.kept = first.personal | {"own": torch.ones(1)}
    clients.let_go()
    assert clients.made == [last]
    assert clients[3] is not first
    with pytest.raises(IndexError):
        clients[CLIENTS]
