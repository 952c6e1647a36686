"""Clients that vanish at every stage, rounds that lose too many, and clients that deal wrong shares.

A wrong dealer costs a round; the run names it and goes on without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.errors import Aborted
from protocols.wire import Shares
from secure_fed.errors import ConfigError
from secure_fed.rounds.transport import Vanishing
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import (
    CLIPPED,
    DISTRIBUTED,
    MASKED,
    SKETCH,
    Interrupting,
    Losing,
    federation,
    listen,
    one_round,
    recorder,
)

EIGHT = [4] * 8
SOME = {"secure_aggregation.dropout": 0.25}
ACTIVE = {"secure_aggregation.active": True}
CHOSEN = {
    **ACTIVE,
    **{"secure_aggregation.neighbours": 10, "secure_aggregation.corrupt": 0.0, "secure_aggregation.dropout": 0.2},
}
COINS = {**MASKED, **CLIPPED, "federation.cohort": 4, "secure_aggregation.corrupt": 0.05}  # a secret cohort
KINDS: dict[str, dict[str, Any]] = {"passive": {}, "active": ACTIVE, "chosen": CHOSEN}
NAMES = ("advertise", "share", "mask", "unmask")


@pytest.mark.parametrize(
    ("stage", "kind"),
    chosen(
        itertools.product([*NAMES, "consistency"], KINDS),
        [("share", "chosen"), ("consistency", "active"), ("unmask", "passive")],
    ),
)
def test_the_sum_is_that_of_those_whose_vectors_came(stage: str, kind: str) -> None:
    many = 12 if kind == "chosen" else 8
    built = federation({**MASKED, **SOME, **KINDS[kind]}, sizes=[4] * many)
    lost = Losing(built.assembly.transport, dict.fromkeys((2, 5), stage))
    heard = listen(built)
    seen = one_round(built, transport=lost)
    is_there = stage in NAMES or (stage == "consistency" and kind != "passive")
    assert lost.lost == ({2, 5} if is_there else set())
    before = is_there and stage in ("advertise", "share", "mask")
    stayed = set(range(many)) - ({2, 5} if before else set())
    values = heard.values(0, "change")
    assert set(values) == stayed
    np.testing.assert_allclose(seen.means["change"], np.mean(list(values.values()), 0), atol=1e-7)
    assert seen.record["masked"]["survivors"] == len(stayed)
    assert seen.record["cohort"] == many
    assert seen.record["rejected"] == []


@pytest.mark.parametrize("stage", chosen(["advertise", "share", "mask"], ["mask"]))
def test_who_vanishes_from_the_first_pass_is_in_neither_sum(stage: str) -> None:
    """`test_declared.py` has a client that is in the first sum alone."""
    built = federation({**MASKED, **SOME, **SKETCH}, sizes=EIGHT)
    heard = listen(built)
    seen = one_round(built, transport=Losing(built.assembly.transport, dict.fromkeys((0, 7), stage)))
    first, second = (set(heard.replies[0, name]) for name in ("sketch", "change"))
    assert first == second == set(range(1, 7))
    np.testing.assert_allclose(seen.means["change"], np.mean(list(heard.values(0, "change").values()), 0), atol=1e-7)
    assert seen.record["masked"]["survivors"] == 6


@pytest.mark.parametrize(
    ("stage", "kind"),
    chosen(itertools.product(["advertise", "share", "mask"], KINDS), [("share", "active"), ("mask", "passive")]),
)
def test_with_one_too_many_gone_there_is_no_sum(stage: str, kind: str) -> None:
    many = 12 if kind == "chosen" else 8
    built = federation({**MASKED, **SOME, **KINDS[kind]}, sizes=[4] * many)
    heard = listen(built)
    with refused(Aborted):
        one_round(built, transport=Losing(built.assembly.transport, dict.fromkeys((1, 2, 5), stage)))
    assert len(heard.replies.get((0, "change"), ())) == (many - 3 if stage == "mask" else 0)


@dataclass
class Changing:
    """A transport that passes on `lie(client, ask, reply)`, if it is a reply, in place of each reply."""

    inner: Any
    lie: Callable[[int, Any, Any], Any]

    def exchange(self, requests: Any) -> Any:
        for reply in self.inner.exchange(requests):
            if (found := self.lie(reply.client, requests[reply.client], reply)) is not None:
                yield found


def test_a_message_that_is_none_leaves_its_sender_out() -> None:
    def garbled(client: int, ask: Any, reply: Any) -> Any:
        return replace(reply, message=b"\0" * 99) if (client, ask.name) == (2, "share") else reply

    built = federation({**MASKED, **SOME}, sizes=EIGHT)
    heard = listen(built)
    seen = one_round(built, transport=Changing(built.assembly.transport, garbled))
    assert 2 not in heard.replies[0, "change"]
    assert seen.record["rejected"] == ["client-2"]
    np.testing.assert_allclose(seen.means["change"], np.mean(list(heard.values(0, "change").values()), 0), atol=1e-7)


# federation.vanishing.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "clients"), chosen(itertools.product((0.1, 0.25, 0.49), (4, 7, 15)), [(0.25, 4), (0.49, 7)])
)
def test_as_many_vanish_as_may(share: float, clients: int) -> None:
    """Every round finishes if federation.vanishing is at most secure_aggregation.dropout."""
    settings = {
        **MASKED,
        "federation.vanishing": share,
        "secure_aggregation.dropout": share,
        "secure_aggregation.corrupt": 0.0,
        "federation.rounds": 4,
    }
    survivors = [record["masked"]["survivors"] for record in federation(settings, sizes=[2] * clients).run().records]
    assert min(survivors) >= clients - int(share * clients)
    assert max(survivors) <= clients


@pytest.mark.slow
@pytest.mark.parametrize(
    "masks",
    chosen([{}, MASKED, {**MASKED, **ACTIVE}, {**MASKED, **CHOSEN}, DISTRIBUTED, COINS], [DISTRIBUTED]),
    ids=str,
)
@pytest.mark.parametrize(
    "way", [pytest.param({}, id="fedlora", marks=pytest.mark.nightly), pytest.param(SKETCH, id="sketch")]
)
def test_rounds_go_on_without_those_who_vanish(way: dict[str, Any], masks: dict[str, Any]) -> None:
    settings = {**(SOME if masks else {}), **masks, **way, "federation.vanishing": 0.25, "federation.rounds": 4}
    many = 12 if masks.get("secure_aggregation.neighbours") else 8
    built = federation(settings | {"federation.vanishing": 0.17 if many == 12 else 0.25}, sizes=[4] * many)
    recording = recorder(built)
    result = built.run()
    asked = [{reply.client for ask, reply in recording.exchanges if ask.round == round_} for round_ in range(4)]
    assert result.state.tensors.is_finite()
    if not masks:
        assert [len(one) for one in asked] == [6] * 4
        assert len({frozenset(one) for one in asked}) > 1
        return
    assert {ask.name for ask, _ in recording.exchanges} >= set(NAMES)
    survivors = [record["masked"]["survivors"] for record in result.records]
    assert set(survivors) == {None} if "federation.cohort" in masks else min(survivors) == many - 2


def test_who_vanishes_is_drawn_from_the_seed_and_at_every_stage() -> None:
    class Nothing:
        def exchange(self, requests: Any) -> Any:
            return iter(sorted(requests))

    def gone(seed: int) -> list[list[int]]:
        vanishing = Vanishing(Nothing(), 0.3, 4, seed)
        found = []
        for round_ in range(60):
            ask = type("Ask", (), {"round": round_})()
            found += [list(vanishing.exchange(dict.fromkeys(range(10), ask))) for _ in range(4)]
        return found

    assert gone(1) == gone(1)
    assert gone(1) != gone(2)
    stayed = gone(1)
    assert {len(one) for one in stayed[3::4]} == {7}
    assert {len(one) for one in stayed[::4]} >= {8, 9, 10}
    assert {client for one in stayed[3::4] for client in set(range(10)) - set(one)} == set(range(10))


# Aborted runs, and resuming them.


def test_a_run_that_aborted_is_gone_on_with(tmp_path: Path) -> None:
    settings = {**MASKED, **SOME}
    whole = federation(settings, sizes=EIGHT).run()
    built = federation(settings, sizes=EIGHT)

    def weak(client: int, ask: Any, reply: Any) -> Any:
        return None if ask.round == 1 and ask.name == "unmask" and client < 6 else reply

    built.assembly = replace(built.assembly, transport=Changing(built.assembly.transport, weak))
    with refused(Aborted):
        built.run(tmp_path / "run")
    result = federation(settings, sizes=EIGHT).run(tmp_path / "run", resume=True)
    assert toys.same(result.state.tensors, whole.state.tensors)
    assert wide_toys.without_time(result.records) == wide_toys.without_time(whole.records)


def test_more_simulated_dropout_than_the_masks_bear_is_refused_beforehand() -> None:
    with refused(ConfigError, "federation.vanishing"):
        federation({**MASKED, "federation.vanishing": 0.2, "secure_aggregation.dropout": 0.1}, sizes=EIGHT)


# Wrong shares.


def misdealing(settings: dict[str, Any], *clients: int) -> Any:
    """A federation in which these clients publish, in every sum, a commitment that does not fit the seed they deal."""

    def lied(client: int, ask: Any, reply: Any) -> Any:
        if ask.name != "share" or client not in clients:
            return reply
        shares = Shares.from_bytes(reply.message, ask.parameters, client)
        return replace(reply, message=replace(shares, commitment=bytes(32)).to_bytes(ask.parameters, client))

    built = federation({**SOME, **settings}, sizes=EIGHT)
    built.assembly = replace(built.assembly, transport=Changing(built.assembly.transport, lied))
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
