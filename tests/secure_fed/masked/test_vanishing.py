"""Clients that vanish at every stage and in several ways, and rounds that lose too many clients."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.errors import Aborted
from secure_fed.commands import cli
from secure_fed.errors import ConfigError
from secure_fed.rounds.masked import wiring
from secure_fed.rounds.transport import Recording, Vanishing
from tests.cells import chosen
from tests.secure_fed import private_toys, toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import DISTRIBUTED, MASKED, SKETCH, Losing, federation, listen, one_round

EIGHT = [4] * 8
SOME = {"secure_aggregation.dropout": 0.25}
ACTIVE = {"secure_aggregation.active": True}
CHOSEN = {
    **ACTIVE,
    **{"secure_aggregation.neighbours": 10, "secure_aggregation.corrupt": 0.0, "secure_aggregation.dropout": 0.2},
}
KINDS: dict[str, dict[str, Any]] = {"passive": {}, "active": ACTIVE, "chosen": CHOSEN}
NAMES = ("advertise", "share", "mask", "unmask")


@pytest.mark.parametrize(
    ("stage", "kind"),
    chosen(
        itertools.product([*NAMES, "consistency"], KINDS),
        [*((stage, "passive") for stage in NAMES), ("consistency", "active"), ("mask", "chosen"), ("unmask", "chosen")],
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


@pytest.mark.parametrize("stage", NAMES)
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
    chosen(
        itertools.product(["advertise", "share", "mask"], KINDS),
        [("advertise", "passive"), ("share", "active"), ("mask", "passive"), ("mask", "chosen")],
    ),
)
def test_with_one_too_many_gone_there_is_no_sum(stage: str, kind: str) -> None:
    many = 12 if kind == "chosen" else 8
    built = federation({**MASKED, **SOME, **KINDS[kind]}, sizes=[4] * many)
    heard = listen(built)
    with pytest.raises(Aborted, match=r"fewer than .*secure_aggregation\.dropout"):
        one_round(built, transport=Losing(built.assembly.transport, dict.fromkeys((1, 2, 5), stage)))
    assert len(heard.replies.get((0, "change"), ())) == (many - 3 if stage == "mask" else 0)


def test_with_fewer_than_the_threshold_left_to_open_there_is_no_sum() -> None:
    built = federation({**MASKED, **SOME}, sizes=EIGHT)
    threshold = built.assembly.masks.sums.terms.choice(8).threshold  # type: ignore[union-attr]
    gone = dict.fromkeys(range(8 - threshold), "unmask")
    with pytest.raises(Aborted):
        one_round(built, transport=Losing(built.assembly.transport, gone))


class GivesUp:
    """A client that leaves at a stage, as a client does that finds too few clients left."""

    def __init__(self, inner: Any, stage: str) -> None:
        self.inner, self.stage = inner, stage

    def handle(self, ask: Any) -> Any:
        return None if ask.name == self.stage else self.inner.handle(ask)


@pytest.mark.parametrize("stage", NAMES)
def test_a_client_that_gives_up_is_left_out(stage: str) -> None:
    built = federation({**MASKED, **SOME}, sizes=EIGHT)
    built.assembly.masks.clients[3] = GivesUp(built.assembly.masks.clients[3], stage)  # type: ignore[union-attr,index]
    heard = listen(built)
    seen = one_round(built)
    assert set(heard.replies[0, "change"]) == set(range(8)) - ({3} if stage != "unmask" else set())
    assert seen.record["masked"]["survivors"] == (8 if stage == "unmask" else 7)


def test_a_message_that_is_none_leaves_its_sender_out() -> None:
    class Garbling:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def exchange(self, requests: Any) -> Any:
            for reply in self.inner.exchange(requests):
                ask = requests[reply.client]
                yield replace(reply, message=b"\0" * 99) if (reply.client, ask.name) == (2, "share") else reply

    built = federation({**MASKED, **SOME}, sizes=EIGHT)
    heard = listen(built)
    seen = one_round(built, transport=Garbling(built.assembly.transport))
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
    chosen([{}, MASKED, {**MASKED, **ACTIVE}, {**MASKED, **CHOSEN}, DISTRIBUTED], [MASKED, DISTRIBUTED]),
    ids=str,
)
@pytest.mark.parametrize(
    "way", [pytest.param({}, id="fedlora", marks=pytest.mark.nightly), pytest.param(SKETCH, id="sketch")]
)
def test_rounds_go_on_without_those_who_vanish(way: dict[str, Any], masks: dict[str, Any]) -> None:
    settings = {**(SOME if masks else {}), **masks, **way, "federation.vanishing": 0.25, "federation.rounds": 6}
    many = 12 if masks.get("secure_aggregation.neighbours") else 8
    built = federation(settings | {"federation.vanishing": 0.17 if many == 12 else 0.25}, sizes=[4] * many)
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    result = built.run()
    asked = [{reply.client for ask, reply in recording.exchanges if ask.round == round_} for round_ in range(6)]
    assert result.state.tensors.is_finite()
    if not masks:
        assert [len(one) for one in asked] == [6] * 6
        assert len({frozenset(one) for one in asked}) > 1
        return
    assert {ask.name for ask, _ in recording.exchanges} >= set(NAMES)
    assert min(record["masked"]["survivors"] for record in result.records) == many - 2


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


def test_in_the_open_the_mean_is_of_those_who_stayed() -> None:
    built = federation({"federation.vanishing": 0.25}, sizes=EIGHT)
    heard = listen(built)
    seen = one_round(built)
    assert len(heard.replies[0, "change"]) == 6
    np.testing.assert_allclose(seen.means["change"], np.mean(list(heard.values(0, "change").values()), 0), atol=1e-7)


# Aborted runs, and resuming them.


def test_a_run_that_aborted_is_gone_on_with(tmp_path: Path) -> None:
    settings = {**MASKED, **SOME, "federation.rounds": 4}
    whole = federation(settings, sizes=EIGHT).run()
    built = federation(settings, sizes=EIGHT)

    class Weak:
        """Loses too many clients in the third round."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def exchange(self, requests: Any) -> Any:
            left = {one: ask for one, ask in requests.items() if ask.round != 2 or ask.name != "unmask" or one > 5}
            return self.inner.exchange(left)

    built.assembly = replace(built.assembly, transport=Weak(built.assembly.transport))
    with pytest.raises(Aborted) as caught:
        built.run(tmp_path / "run")
    assert caught.value.exit_code == 1
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
    result = federation({**DISTRIBUTED, **SOME, **SKETCH}, sizes=EIGHT).run(tmp_path / "run", resume=True)
    assert result.summary["releases"] == 7
    plan = federation({**DISTRIBUTED, **SOME, **SKETCH}, sizes=EIGHT).assembly.protection.plan
    assert plan is not None
    assert result.summary["epsilon"] == plan.epsilon(8) > plan.epsilon(6)


def test_more_simulated_dropout_than_the_masks_bear_is_refused_beforehand() -> None:
    with pytest.raises(
        ConfigError, match=r"federation\.vanishing is 0\.2, above secure_aggregation\.dropout = 0\.1: .*raise"
    ):
        federation({**MASKED, "federation.vanishing": 0.2, "secure_aggregation.dropout": 0.1}, sizes=EIGHT)


def test_the_command_line_says_it_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "Vanishing", lambda inner, share, *rest: Vanishing(inner, 0.5, *rest))
    run = tmp_path / "run"
    settings = {
        "data.examples": "60",
        "data.test_examples": "20",
        "federation.clients": "10",
        "federation.rounds": "1",
        "federation.vanishing": "0.1",
        "secure_aggregation.enabled": "true",
        "training.steps": "1",
        "training.batch_size": "2",
    }
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    for resume in ([], ["--resume"]):
        status = cli.main(
            ["train", *sets, "--out", str(run), *resume] if not resume else ["train", "--out", str(run), *resume]
        )
        said = capsys.readouterr().err
        assert status == 1
        assert "Traceback" not in said
        assert "secure-fed: " in said
        assert "secure_aggregation.dropout" in said
