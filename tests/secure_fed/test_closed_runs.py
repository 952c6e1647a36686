"""`secure-fed budget close` gives a run's reservation back if, and only if, the ledger shows that the run made no release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from privacy import ledger_file
from privacy.errors import PlanError
from privacy.filters import Cost
from privacy.ledger import Account, Ledger
from secure_fed.commands.cli import main
from secure_fed.deployment.home import LEDGER
from secure_fed.errors import RunDirectoryError, TrainingError
from secure_fed.private import wrap
from secure_fed.rounds import client as clients
from secure_fed.rounds.client import Client
from secure_fed.runs import durable
from secure_fed.runs.budget import RunBudget
from tests.cells import chosen
from tests.golden import refused
from tests.privacy.ledger_child import UNIT
from tests.secure_fed.conftest import Refuses
from tests.secure_fed.deployment.test_deployed_run import EXAMPLE as STEPS
from tests.secure_fed.deployment.test_deployed_run import deployed
from tests.secure_fed.own_loop.loops import BUDGET, loader, network, train
from tests.secure_fed.private_toys import EXAMPLE, NOISE, federation

RUN = "run-[0-9a-f]{8}"  # the names of runs


class Killed(BaseException):
    """Stands in for a kill."""


@pytest.fixture
def book(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "wards.sqlite", data_set="wards", epsilon=1e6, delta=0.9)


def run_of(book: Ledger) -> str:
    """The name of the only run that has reserved."""
    (name,) = {row.run for row in book.rows() if row.kind == "reserve"}
    return name


def closed(book: Ledger, run: str) -> int:
    return main(["budget", "close", str(book.path), run])


def spent(path: Path) -> float:
    return Ledger.open(path).spent().epsilon


@contextmanager
def killed_at(instant: int) -> Iterator[list[str]]:
    """Raise Killed at this instant between two durable writes, counted from 0. Yields the instants passed."""
    passed: list[str] = []

    def crash_point(name: str) -> None:
        if len(passed) == instant:
            raise Killed
        passed.append(name)

    with patch.object(durable, "crash_point", crash_point), patch.object(ledger_file, "crash_point", crash_point):
        yield passed


@contextmanager
def trainings(unit: str) -> Iterator[list[str]]:
    """The trainings of clients that have begun, noted after the charge for them."""
    begun: list[str] = []
    where, name = (Client, "_start") if unit == "client" else (clients, "PrivateSteps")
    whole = getattr(where, name)

    def noted(*given: Any) -> Any:
        begun.append(name)
        return whole(*given)

    with patch.object(where, name, noted):
        yield begun


@pytest.mark.parametrize("unit", chosen(["client", "example"], ["client"]))
def test_a_run_killed_at_any_instant_gets_nothing_back_that_a_client_trained_for(tmp_path: Path, unit: str) -> None:
    settings = {**(NOISE if unit == "client" else {**EXAMPLE, "privacy.noise_multiplier": 1.0}), "federation.rounds": 1}
    ledger, statuses = tmp_path / "wards.sqlite", list[int]()
    built = federation({**settings, "privacy.ledger": str(ledger)})

    def fresh() -> None:
        for file in tmp_path.glob("wards.sqlite*"):
            file.unlink()
        Ledger.create(ledger, data_set="wards", epsilon=1e6, delta=0.9)

    fresh()
    with killed_at(-1) as passed:
        built.run(tmp_path / "whole")
    for instant in range(passed.index("budget.json:replaced"), len(passed)):
        fresh()
        with trainings(unit) as trained, killed_at(instant) as passed, suppress(Killed):
            built.run(tmp_path / f"run-{instant}")
        reserved = spent(ledger)
        assert reserved > 0 or not trained
        if not reserved:
            continue
        book = Ledger.open(ledger)
        statuses.append(closed(book, run_of(book)))
        if statuses[-1]:
            assert spent(ledger) == reserved
        else:
            assert not trained, f"{passed[-1]}: a client has trained"
            assert spent(ledger) == 0.0
            with refused(RunDirectoryError, worded=False):
                built.run(tmp_path / f"run-{instant}", resume=True)
        if trained:
            break
    assert set(statuses) == {0, 2}


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_run_that_is_closed_while_it_goes_on_releases_nothing(tmp_path: Path, book: Ledger, unit: str) -> None:
    settings = NOISE if unit == "client" else {**EXAMPLE, "privacy.noise_multiplier": 1.0}
    built = federation({**settings, "privacy.ledger": str(book.path)})
    name = "charge" if unit == "client" else "allowance"
    pays = getattr(RunBudget, name)

    def after_closing(self: RunBudget, *given: Any) -> Any:
        assert closed(book, run_of(book)) == 0
        return pays(self, *given)

    with (
        patch.object(RunBudget, name, after_closing),
        trainings(unit) as trained,
        refused(PlanError, hide=RUN),
    ):
        built.run(tmp_path / "run")
    assert not trained
    assert spent(book.path) == 0.0


def test_a_loop_of_the_user_that_has_made_no_step_is_closed(book: Ledger) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = wrap(model, optimizer, loader(), BUDGET, ledger=str(book.path), unit_name="note")
    with patch.object(Account, "charge", side_effect=Killed), pytest.raises(Killed):
        train(private)
    assert spent(book.path) > 0
    assert closed(book, run_of(book)) == 0
    assert spent(book.path) == 0.0


def test_what_has_charged_or_is_unknown_is_not_closed(tmp_path: Path, book: Ledger, refuses: Refuses) -> None:
    """Nor a reservation of which the ledger may lack charges: a node's, or an earlier version's."""
    federation({**NOISE, "federation.rounds": 1, "privacy.ledger": str(book.path)}).run(tmp_path / "run")
    other = Ledger.create(tmp_path / "node.sqlite", data_set="wards", epsilon=1e6, delta=0.9)
    other.reserve("node", Cost(3.0, 1e-6), data_digest="d", unit=UNIT, terms={"releases": 3})
    for kept, name in ((book, run_of(book)), (book, "another"), (other, "node")):
        before = kept.path.read_bytes()
        refuses("budget", "close", kept.path, name, hide=RUN)
        assert kept.path.read_bytes() == before


def test_a_coordinator_whose_members_never_came_gets_its_reservation_back(tmp_path: Path, book: Ledger) -> None:
    party = deployed(tmp_path, {"privacy": {"unit": "client", "epsilon": 8.0, "ledger": str(book.path)}})
    party.carrier.deaf = set(party.carrier.nodes_)
    with refused(TrainingError, hide=r"\d+ s\b"):
        party.conduct()
    assert spent(book.path) > 7
    assert closed(book, run_of(book)) == 0
    assert spent(book.path) == 0.0
    party.carrier.deaf = set()
    with refused(RunDirectoryError, hide=RUN):
        party.conduct()
    assert not [home for home in party.homes if (home / LEDGER).exists()], "no member was asked for a round"


def test_a_coordinator_whose_members_charge_their_own_steps_gets_nothing_back(
    tmp_path: Path, book: Ledger, refuses: Refuses
) -> None:
    """Its ledger has no charge at any time: the steps are charged in the nodes' ledgers."""
    party = deployed(tmp_path, {"privacy": {**STEPS["privacy"], "ledger": str(book.path)}})
    party.carrier.deaf = set(party.carrier.nodes_)
    with refused(TrainingError, hide=r"\d+ s\b"):
        party.conduct()
    reserved, run = spent(book.path), run_of(book)
    assert reserved > 7
    refuses("budget", "close", book.path, run, hide=RUN)
    assert spent(book.path) == reserved
