"""In a simulation a pair's key is computed once for both clients: the run is the same, and no key outlasts its session."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from protocols.errors import Aborted
from protocols.keys import Alone
from protocols.workers import OneProcess
from secure_fed.learning.training.local import Trained
from secure_fed.rounds.client import Client
from secure_fed.rounds.masked import wiring
from secure_fed.rounds.transport import Request
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed.masked.wide_toys import MASKED, PRIVACY, SKETCH, Losing, federation, one_round

EIGHT = {"sizes": [4] * 8}
SOME = {"secure_aggregation.dropout": 0.25}


class Apart(Alone):
    """Agreements that each client computes itself, as on separate machines."""

    session = nullcontext


@pytest.mark.parametrize("active", [False, True])
def test_a_run_is_the_same_to_the_bit_with_clients_that_share_nothing(
    active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**MASKED, "secure_aggregation.active": active}
    together = one_round(federation(settings))
    monkeypatch.setattr(wiring, "OneProcess", Apart)
    apart = one_round(federation(settings))
    assert together.means.keys() == apart.means.keys()
    for name, mean in together.means.items():
        assert np.array_equal(mean, apart.means[name])


@pytest.mark.parametrize("lost", ["nobody", "a few", "too many"])
def test_nothing_is_kept_between_two_sums(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds after a successful sum and after an aborted session."""
    made: list[OneProcess] = []
    during: list[int] = []

    class Noted(OneProcess):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def masks(self, *asked: object) -> object:
            during.append(self.waiting)
            return super().masks(*asked)

    monkeypatch.setattr(wiring, "OneProcess", Noted)
    built = federation({**MASKED, **SOME, **SKETCH}, **EIGHT)
    gone = {"nobody": (), "a few": (2,), "too many": (0, 1, 2, 3, 4)}[lost]
    transport = Losing(built.assembly.transport, dict.fromkeys(gone, "mask"))
    with refused(Aborted) if lost == "too many" else nullcontext():
        one_round(built, transport=transport)
    (together,) = made
    assert max(during) > 0
    assert together.waiting == 0


@pytest.mark.parametrize("active", chosen([False, True], [True]))
def test_a_run_is_the_same_to_the_bit_with_clients_in_processes(active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"training.together": None, "federation.vanishing": 0.25}
    settings = {**MASKED, "secure_aggregation.active": active, **common, **SOME}
    together = one_round(federation(settings, **EIGHT))
    monkeypatch.setattr(wiring, "_WORTH_WORKERS", 0)
    monkeypatch.setattr(wiring, "cores", lambda: 2)
    built = federation(settings, **EIGHT)
    assert built.assembly.masks is not None
    assert built.assembly.masks.workers is not None
    apart = one_round(built)
    assert together.record["masked"]["survivors"] == apart.record["masked"]["survivors"] < 8
    assert together.means.keys() == apart.means.keys()
    for name, mean in together.means.items():
        assert np.array_equal(mean, apart.means[name])


@pytest.mark.parametrize(
    "unit", chosen(["nothing", "central", "distributed", "local", "example"], ["central", "example"])
)
def test_what_was_trained_ahead_is_what_is_masked(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client trains twice: the masked sum's request finds the training done ahead."""
    taken: list[bool] = []
    asked = Client._taken

    def noted(self: Client, request: Request) -> Trained | None:
        found = asked(self, request)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Client, "_taken", noted)
    federation({**PRIVACY[unit], **MASKED, "training.together": None, "federation.rounds": 1}).run()
    assert taken == [True] * len(taken) != []
