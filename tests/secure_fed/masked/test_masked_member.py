"""A client in a masked sum, and a server that requests more than the run's configuration allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocols.errors import ProtocolError
from secure_fed.errors import SecureFedError, TrainingError
from secure_fed.rounds.transport import Recording
from tests.golden import refused
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import (
    CLIPPED,
    DISTRIBUTED,
    HIDDEN,
    LR,
    MASKED,
    SKETCH,
    federation,
    listen,
    one_round,
    recorder,
)

TEN = [4] * 10
ACTIVE = {"secure_aggregation.active": True}


def _gather(built: Any, asked: list[int], transport: Any = None, **changed: Any) -> Any:
    """One pass of the first round with these clients as contributors; `changed` replaces fields of the request."""
    server = built.assembly.server
    request = server.request(
        built.assembly.initial,
        server.plan(built.assembly.initial),
        server.plan(built.assembly.initial).passes[0],
        LR,
        {},
    )
    layout = server.layout(built.assembly.initial, request.pass_name)
    return built.assembly.masks.sums.gather(
        asked, replace(request, **changed), layout, transport or built.assembly.transport
    )


# Requests that clients refuse.


@pytest.mark.parametrize(
    "settings", [{**MASKED, **ACTIVE}, DISTRIBUTED, HIDDEN], ids=["active", "distributed", "hidden"]
)
def test_a_session_of_fewer_than_the_run_invites_is_refused(settings: dict[str, Any]) -> None:
    """A session of three of ten clients could be the victim and two colluding clients."""
    built = federation({"federation.cohort": 10, **settings}, sizes=TEN)
    heard = listen(built)
    with pytest.raises((ProtocolError, SecureFedError)):
        _gather(built, [0, 1, 2])
    assert heard.replies == {}


def test_a_session_of_more_than_the_run_invites_is_refused() -> None:
    built = federation({**MASKED, **ACTIVE, "federation.cohort": 5}, sizes=TEN)
    heard = listen(built)
    with pytest.raises((ProtocolError, SecureFedError)):
        _gather(built, list(range(10)))
    assert heard.replies == {}


def test_a_client_refuses_stages_of_a_sum_that_it_is_not_in_or_that_is_over() -> None:
    built = federation(MASKED)
    recording = Recording(built.assembly.transport)
    one_round(built, transport=recording)
    stages = [ask for ask, reply in recording.exchanges if reply.client == 0]
    assert [stage.name for stage in stages] == ["advertise", "share", "mask", "unmask"]
    fresh, done = (one.assembly.masks.clients[0] for one in (federation(MASKED), built))  # type: ignore[union-attr]
    for stage in stages[1:]:
        with refused(TrainingError):
            fresh.handle(stage)
        with refused(ProtocolError):
            done.handle(stage)


# What a client sends.


def test_who_makes_up_the_number_sends_zeros_under_its_masks() -> None:
    built = federation({**MASKED, **CLIPPED, "federation.cohort": 4}, sizes=TEN)
    heard = listen(built)
    gathered = _gather(built, [7])
    values = heard.values(0, "change")
    assert list(values) == [7]
    np.testing.assert_allclose(wide_toys.flat(gathered.total.total()), values[7], atol=1e-6)
    assert gathered.received == [7]
    assert gathered.spent.survivors == len(TEN), "a public number"


def test_the_sum_of_a_cohort_of_nobody_is_zero() -> None:
    built = federation({**MASKED, **CLIPPED, "federation.cohort": 4}, sizes=TEN)
    heard = listen(built)
    gathered = _gather(built, [])
    assert heard.replies == {}
    assert not wide_toys.flat(gathered.total.total()).any()
    assert gathered.total.weight == 0


def test_a_closed_sum_takes_nothing_more() -> None:
    built = federation(MASKED)
    gathered = _gather(built, [0, 1, 2, 3])
    with refused(TrainingError):
        gathered.total.add(gathered.total.total())


def test_no_two_sums_of_a_run_or_of_two_runs_are_one_session() -> None:
    sessions = []
    for _ in range(2):
        built = federation({**MASKED, **SKETCH, "federation.rounds": 2})
        recording = recorder(built)
        built.run()
        sessions += [ask.parameters.session for ask, reply in recording.exchanges if reply.client == 0]
    assert len(set(sessions)) == 2 * 2 * 2
    assert len(sessions) == 4 * 2 * 2 * 2
