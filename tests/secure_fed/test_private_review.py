"""Ways around the guarantee that a review found. Each is closed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from privacy.errors import BudgetExhausted
from privacy.filters import Cost
from privacy.ledger import Ledger
from secure_fed.errors import RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.rounds.client import Client
from secure_fed.tensors.tensors import Tensors
from tests.privacy.ledger_child import UNIT
from tests.secure_fed import toys
from tests.secure_fed.private_toys import EXAMPLE, NOISE, federation

DROPOUT = {"method.dropout": 0.5}


def sent(chosen: Federation, client: Client) -> Tensors:
    """The client's contribution, before any noise."""
    request = chosen.assembly.server.request(
        chosen.assembly.initial, chosen.assembly.server.plan(chosen.assembly.initial), "change", 0.05, {}
    )
    return client.handle(request).contribution


def test_what_a_client_draws_in_training_is_secret_where_it_is_private() -> None:
    """Draws from the seed and the client's position would change for every client behind one that leaves."""
    private, public = federation({**NOISE, **DROPOUT}), toys.federation(DROPOUT)
    assert not toys.same(sent(private, private.assembly.clients[0]), sent(private, private.assembly.clients[0]))
    assert toys.same(sent(public, public.assembly.clients[0]), sent(public, public.assembly.clients[0]))


@pytest.mark.parametrize("settings", [NOISE, {**EXAMPLE, "privacy.noise_multiplier": 1.0}])
def test_injected_entropy_makes_training_repeatable(settings: dict[str, object]) -> None:
    one, two = (federation({**settings, **DROPOUT, "federation.rounds": 1}, seed=3).run() for _ in range(2))
    assert toys.same(one.state.tensors, two.state.tensors)


def test_two_that_take_themselves_for_one_run_do_not_exceed_its_limit(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l.sqlite", data_set="wards", epsilon=1.0, delta=1e-5)
    ledger.reserve("run", Cost(1.0, 1e-5), data_digest="d", unit=UNIT, terms={})
    ledger.charge("run", "", 1, {}, limit=1)
    before = ledger.head
    with pytest.raises(BudgetExhausted, match="1 releases in all"):
        Ledger.open(tmp_path / "l.sqlite").charge("run", "", 1, {}, limit=1)
    assert Ledger.open(tmp_path / "l.sqlite").head == before


def test_a_copied_run_with_a_ledger_of_its_own_is_not_gone_on_with(tmp_path: Path) -> None:
    chosen = {**NOISE, "federation.rounds": 1}
    federation(chosen).run(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(RunDirectoryError, match=r"was moved or copied"):
        federation(chosen).run(tmp_path / "copy", resume=True)
