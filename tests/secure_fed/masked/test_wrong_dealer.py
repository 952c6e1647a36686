"""A client that deals wrong shares: the round is lost, and the run goes on without that client and names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from protocols.errors import Aborted
from protocols.wire import Shares
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.masked.wide_toys import (
    CLIPPED,
    DISTRIBUTED,
    MASKED,
    SKETCH,
    Interrupting,
    federation,
    listen,
    one_round,
    recorder,
)

EIGHT = [4] * 8
SOME = {"secure_aggregation.dropout": 0.25}
ACTIVE = {"secure_aggregation.active": True}


@dataclass
class Misdealing:
    """A transport that makes these clients publish, in every sum, a commitment that does not fit the seed they deal."""

    inner: Any
    clients: frozenset[int]

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        for reply in self.inner.exchange(requests):
            ask = requests[reply.client]
            if ask.name == "share" and reply.client in self.clients:
                shares = Shares.from_bytes(reply.message, ask.parameters, reply.client)
                lied = replace(shares, commitment=bytes(32)).to_bytes(ask.parameters, reply.client)
                reply = replace(reply, message=lied)
            yield reply


def misdealing(settings: dict[str, Any], *clients: int) -> Any:
    built = federation({**SOME, **settings}, sizes=EIGHT)
    built.assembly = replace(built.assembly, transport=Misdealing(built.assembly.transport, frozenset(clients)))
    return built


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(MASKED, id="passive", marks=pytest.mark.nightly),
        pytest.param({**MASKED, **ACTIVE}, id="active"),
        pytest.param({**MASKED, **SKETCH}, id="sketch", marks=pytest.mark.nightly),
    ],
)
def test_a_run_goes_on_without_the_dealer_and_names_it(kind: dict[str, Any]) -> None:
    built = misdealing(kind, 5)
    recording = recorder(built)
    result = built.run()
    lost, *others = result.records
    assert lost["caught"] == {"client-5": "dealt wrong shares"}
    assert lost["lost"] == "a client dealt shares that do not fit what it published, and is left out from now on"
    assert [record["masked"]["survivors"] for record in others] == [7, 7]
    assert not any("lost" in record or "caught" in record for record in others)
    assert {reply.client for ask, reply in recording.exchanges if ask.round > 0} == set(range(8)) - {5}
    said = result.summary["secure_aggregation"]
    assert (said["rounds_lost"], said["caught"]) == (1, {"client-5": "dealt wrong shares"})


def test_a_lost_round_moves_nothing_and_is_not_made_again_under_its_number() -> None:
    built = misdealing(MASKED, 5)
    heard = listen(built)
    seen = one_round(built, transport=built.assembly.transport)
    assert set(heard.replies[0, "change"]) == set(range(8)), (
        "everybody had trained: a second sum of the round would tell"
    )
    assert toys.same(seen.after.tensors, built.assembly.initial.tensors)
    assert seen.after.round == 1
    assert seen.record["masked"]["survivors"] is None


def test_each_dealer_costs_a_round_until_too_few_are_left() -> None:
    result = misdealing(MASKED, 1, 6).run()
    assert [record.get("caught", {}) for record in result.records[:2]] == [
        {"client-1": "dealt wrong shares"},
        {"client-6": "dealt wrong shares"},
    ]
    assert [record["masked"]["survivors"] for record in result.records[2:]] == [6]
    with refused(Aborted):
        misdealing({**MASKED, "federation.rounds": 4}, 1, 3, 6).run()


@pytest.mark.parametrize(
    "kind", [MASKED, pytest.param(DISTRIBUTED, marks=pytest.mark.nightly)], ids=["open", "private"]
)
def test_a_resumed_run_does_not_readmit_the_dealer(kind: dict[str, Any], tmp_path: Path) -> None:
    first = misdealing(kind, 5)
    first.callbacks.append(Interrupting(2))
    with pytest.raises(KeyboardInterrupt):
        first.run(tmp_path / "run")
    result = misdealing(kind, 5).run(tmp_path / "run", resume=True)
    assert [bool(record.get("lost")) for record in result.records] == [True, False, False]
    assert result.whole["secure_aggregation"]["caught"] == {"client-5": "dealt wrong shares"}


@pytest.mark.parametrize("way", chosen([{}, SKETCH], [SKETCH]), ids=["one pass", "two passes"])
def test_what_a_lost_round_charged_stays_charged_and_no_more_sums_are_made_than_planned(
    way: dict[str, Any], tmp_path: Path
) -> None:
    built = misdealing({**DISTRIBUTED, **way}, 5)
    said = built.run(tmp_path / "run").whole
    passes = 2 if way else 1
    assert said["releases"] == private_toys.charged(tmp_path / "run") == 3 * passes - (passes - 1)
    assert said["epsilon"] <= built.assembly.protection.plan.epsilon()
    assert said["privacy"]["realised"]["survivors"] == 7


def test_where_the_cohort_is_secret_a_lost_round_names_nobody() -> None:
    settings = {**MASKED, **CLIPPED, "federation.cohort": 6}
    result = misdealing({**settings, "federation.rounds": 2}, 0, 1, 2, 3, 4, 5).run()
    assert any("lost" in record for record in result.records)
    assert "client-" not in str(result.records)
    assert result.whole["secure_aggregation"]["caught"] == {}
