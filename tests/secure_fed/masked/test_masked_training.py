"""Training with masked sums: under every privacy; with a server that may lie, or clients in one process, to the same bits.

A contribution that does not fit is left out. In a simulation a pair's key is computed once, and no key outlasts its session.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols import server as protocol
from protocols.errors import Aborted
from protocols.keys import Alone
from protocols.workers import OneProcess
from secure_fed.errors import TrainingError
from secure_fed.federation import Federation
from secure_fed.learning.training.local import Trained
from secure_fed.rounds.client import Client
from secure_fed.rounds.masked import wiring
from secure_fed.rounds.transport import Reply, Request
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import (
    MASKED,
    PRIVACY,
    SKETCH,
    WAYS,
    Interrupting,
    Losing,
    federation,
    flat,
    listen,
    one_round,
    scale,
)

# Weights.


def test_a_mean_is_weighted_by_examples_up_to_the_most_that_count() -> None:
    for most, weights in ((1000, [5, 8, 11, 7]), (6, [5, 6, 6, 6])):
        settings = {"federation.weighting": "examples", "secure_aggregation.most_examples": most}
        built = federation({**MASKED, **settings})
        heard = listen(built)
        seen = one_round(built)
        values = heard.values(0, "change")
        oracle = sum(weight * values[client] for client, weight in enumerate(weights)) / sum(weights)
        half = most * len(weights) / 2 / scale(4, 8.0)
        error = np.abs(seen.means["change"] - oracle).max()
        assert error <= 2 * half / sum(weights) + 1e-7  # the weights are rounded, too
        assert np.abs(seen.means["change"] - sum(values.values()) / 4).max() > 1000 * error


# Updates that are not finite, or too large.


def test_a_client_whose_update_is_not_finite_is_left_out_of_sum_and_weight() -> None:
    train = [wide_toys.examples(1, 5), wide_toys.dead(8), wide_toys.examples(3, 11), wide_toys.examples(4, 7)]
    for settings in ({}, SKETCH):
        masked = federation({**MASKED, **settings}, train=train)
        heard = listen(masked)
        seen = one_round(masked)
        for name, mean in seen.means.items():
            finite = [values for client, values in heard.values(0, name).items() if client != 1]
            assert not np.isfinite(heard.values(0, name)[1]).all()
            np.testing.assert_allclose(mean, np.mean(finite, 0), atol=1e-7)
    plain, masked = (one_round(federation(settings, train=train)).record for settings in ({}, MASKED))
    assert masked["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-5)


# Interrupted and resumed.


RESUMED: list[tuple[str, dict[str, Any]]] = [
    ("fra_then_ffa sketch", {"federation.vanishing": 0.25}),
    ("fedlora", {"secure_aggregation.active": True}),
]


@pytest.mark.parametrize(("way", "extra"), chosen(RESUMED, RESUMED[:1]), ids=str)
def test_a_run_that_is_interrupted_and_resumed_is_the_same_to_the_bit(
    way: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    settings = {
        **MASKED,
        **WAYS[way],
        **extra,
        "federation.rounds": 3,
        "federation.cohort": 4,
        "federation.server_optimizer": "mean" if "sketch" in way else "momentum",
        "method.personal": ["classifier"],
        **({"secure_aggregation.dropout": 0.25} if extra.get("federation.vanishing") else {}),
    }
    whole = federation(settings, sizes=(5, 8, 11, 7, 6, 9)).run()
    with pytest.raises(KeyboardInterrupt):
        federation(settings, sizes=(5, 8, 11, 7, 6, 9), callbacks=[Interrupting(2)]).run(tmp_path / "run")
    resumed = federation(settings, sizes=(5, 8, 11, 7, 6, 9)).run(tmp_path / "run", resume=True)
    assert toys.same(resumed.state.tensors, whole.state.tensors)
    assert wide_toys.without_time(resumed.records) == wide_toys.without_time(whole.records)


def test_a_federation_run_twice_starts_again() -> None:
    vanishing = {"federation.vanishing": 0.25, "secure_aggregation.dropout": 0.25}
    built = federation({**MASKED, **SKETCH, **vanishing, "federation.rounds": 2})
    first, second = built.run(), built.run()
    assert toys.same(first.state.tensors, second.state.tensors)
    assert wide_toys.without_time(first.records) == wide_toys.without_time(second.records)


ACTIVE = {**MASKED, "secure_aggregation.active": True}


# A contribution that cannot be encoded is left out without a name, or fails the run, according to federation.nonfinite.


def outgrown(built: Federation, clients: set[int], factor: float) -> None:
    """Multiplies the contributions of these clients by `factor`."""
    for client in built.assembly.clients:
        if client.index in clients:
            handle = client.handle

            def handled(request: Any, handle: Any = handle) -> Reply:
                reply: Reply = handle(request)
                return replace(reply, contribution=reply.contribution * factor)

            client.handle = handled  # type: ignore[method-assign]


@pytest.mark.parametrize("factor", chosen([1e6, math.inf, math.nan], [1e6]))
def test_what_does_not_fit_is_zeros_of_no_weight_and_is_counted_without_a_name(factor: float) -> None:
    built = federation({**MASKED, **ACTIVE, "federation.nonfinite": "skip"})
    outgrown(built, {1, 2}, factor)
    heard = listen(built)
    seen = one_round(built)
    values = heard.values(0, "change")
    np.testing.assert_allclose(seen.means["change"], (values[0] + values[3]) / 2, atol=1e-6)
    assert seen.record["masked"]["left_out"] == 2
    assert seen.record["masked"]["survivors"] == 4
    assert seen.record["rejected"] == []
    assert "client-" not in str(seen.record)
    result = built.run()
    assert [record["masked"]["left_out"] for record in result.records] == [2, 2, 2]
    assert np.isfinite(flat(result.state.tensors)).all()


@pytest.mark.parametrize("factor", [1e6, math.nan])
def test_a_run_that_is_to_fail_of_it_says_whose_it_was_and_what_to_set(factor: float) -> None:
    built = federation({**MASKED, **ACTIVE, "federation.nonfinite": "fail", "secure_aggregation.range": 7.0})
    outgrown(built, {1}, factor)
    with refused(TrainingError, hide=r"coordinate \d+ is [-\d.e+]+"):
        built.run()


def test_a_sum_that_everybody_is_left_out_of_is_an_error() -> None:
    built = federation({**MASKED, "federation.nonfinite": "skip"})
    outgrown(built, {0, 1, 2, 3}, math.nan)
    with refused(TrainingError):
        built.run()


# Against a lying server, and in one process: the same result.

CHOSEN = {**ACTIVE, "secure_aggregation.neighbours": 8, "secure_aggregation.corrupt": 0.0}


@pytest.mark.parametrize("settings", chosen([{}, SKETCH], [{}]), ids=["fedlora", "sketch"])
def test_the_result_is_that_of_a_server_that_is_trusted_to_keep_to_the_protocol(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And clients choose their neighbours anew in every sum."""
    graphs: list[Any] = []
    closing = protocol.Server.close

    def noting(self: Any) -> Any:
        sent = closing(self)
        if self.stage == "mask" and self.parameters.chosen:
            graphs.append(tuple(self._graph.holders(client) for client in range(12)))
        return sent

    monkeypatch.setattr(protocol.Server, "close", noting)
    usual = {**settings, "federation.rounds": 2}
    first, *others = (federation({**usual, **kind}, sizes=[3] * 12).run() for kind in (MASKED, ACTIVE, CHOSEN))
    assert all(toys.same(first.state.tensors, other.state.tensors) for other in others)
    assert len(set(graphs)) == len(graphs) == (4 if settings else 2)
    assert all(len(holders) == 8 for graph in graphs for holders in graph)


EIGHT = {"sizes": [4] * 8}
SOME = {"secure_aggregation.dropout": 0.25}


class Apart(Alone):
    """Agreements that each client computes itself, as on separate machines."""

    session = nullcontext


def test_a_run_is_the_same_to_the_bit_with_clients_that_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**MASKED, "secure_aggregation.active": True}
    together = one_round(federation(settings))
    monkeypatch.setattr(wiring, "OneProcess", Apart)
    apart = one_round(federation(settings))
    assert together.means.keys() == apart.means.keys()
    for name, mean in together.means.items():
        assert np.array_equal(mean, apart.means[name])


@pytest.mark.parametrize("lost", ["a few", "too many"])
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
    gone = {"a few": (2,), "too many": (0, 1, 2, 3, 4)}[lost]
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


@pytest.mark.parametrize("unit", chosen(["nothing", "central", "distributed", "local", "example"], ["central"]))
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
