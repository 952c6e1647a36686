"""Clients that vanish at every stage and in several ways, and rounds that lose too many clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.errors import Aborted
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
        [
            ("advertise", "passive"),
            ("share", "chosen"),
            ("mask", "chosen"),
            ("consistency", "active"),
            ("unmask", "passive"),
        ],
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


@pytest.mark.parametrize("stage", chosen(NAMES, ["mask", "unmask"]))
def test_who_vanishes_from_the_first_pass_is_in_neither_sum(stage: str) -> None:
    """A client lost at "unmask" is in the first sum alone: there is no second sum, and the round is lost."""
    built = federation({**MASKED, **SOME, **SKETCH}, sizes=EIGHT)
    heard = listen(built)
    seen = one_round(built, transport=Losing(built.assembly.transport, dict.fromkeys((0, 7), stage)))
    if stage == "unmask":
        assert seen.record["lost"].startswith("2 of 8 clients vanished between two passes")
        assert set(heard.replies) == {(0, "sketch")}
        return
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
class GivesUp:
    """A client that leaves at a stage, as a client does that finds too few clients left."""

    inner: Any
    stage: str

    def handle(self, ask: Any) -> Any:
        return None if ask.name == self.stage else self.inner.handle(ask)


@pytest.mark.parametrize("stage", chosen(NAMES, ["share", "unmask"]))
def test_a_client_that_gives_up_is_left_out(stage: str) -> None:
    built = federation({**MASKED, **SOME}, sizes=EIGHT)
    built.assembly.masks.clients[3] = GivesUp(built.assembly.masks.clients[3], stage)  # type: ignore[union-attr,index]
    heard = listen(built)
    seen = one_round(built)
    assert set(heard.replies[0, "change"]) == set(range(8)) - ({3} if stage != "unmask" else set())
    assert seen.record["masked"]["survivors"] == (8 if stage == "unmask" else 7)


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
@pytest.mark.parametrize("share", chosen([0.1, 0.25, 0.3, 0.49], [0.25, 0.49]))
@pytest.mark.parametrize("clients", chosen([4, 6, 7, 10, 15], [4, 10]))
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
    chosen([{}, MASKED, {**MASKED, **ACTIVE}, {**MASKED, **CHOSEN}, DISTRIBUTED, COINS], [MASKED, DISTRIBUTED, COINS]),
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


def test_a_private_run_that_aborted_has_paid_and_is_gone_on_with(tmp_path: Path) -> None:
    built = federation({**DISTRIBUTED, **SOME, **SKETCH}, sizes=EIGHT)
    inner = built.assembly.transport
    built.assembly = replace(built.assembly, transport=Losing(inner, dict.fromkeys(range(3), "mask")))
    with pytest.raises(Aborted):
        built.run(tmp_path / "run")
    assert private_toys.charged(tmp_path / "run") == 1
    again = federation({**DISTRIBUTED, **SOME, **SKETCH}, sizes=EIGHT)
    result, plan = again.run(tmp_path / "run", resume=True), again.assembly.protection.plan
    assert result.summary["releases"] == 7
    assert plan is not None
    assert result.summary["epsilon"] == plan.epsilon(8) > plan.epsilon(6)


def test_more_simulated_dropout_than_the_masks_bear_is_refused_beforehand() -> None:
    with refused(ConfigError, "federation.vanishing"):
        federation({**MASKED, "federation.vanishing": 0.2, "secure_aggregation.dropout": 0.1}, sizes=EIGHT)
