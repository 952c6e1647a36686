"""Which units train and which are held out: fair coins for whole units, independent of the other units."""

from __future__ import annotations

import itertools
import json
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool import pool as holding
from secure_fed.learning.audit_pool.pool import FEWEST, AuditPool, hold_out, pool
from secure_fed.learning.data.fingerprint import content
from tests.cells import chosen
from tests.secure_fed import private_toys, toys

SIZES = (60, 80, 100)
CLIENT = {"privacy.unit": "client", "privacy.epsilon": 8.0, "privacy.delta": 1e-4, "federation.cohort": 10}
WIDE = {"evaluation.audit_fraction": 0.5}
HIDDEN = {"privacy.noise": "distributed", "privacy.hidden_cohort": True}


def numbered(sizes: tuple[int, ...] = SIZES) -> list[list[dict[str, Any]]]:
    """Clients whose examples all differ."""
    return [[toys.examples(1000 * client + i, 1)[0] for i in range(size)] for client, size in enumerate(sizes)]


def held(settings: dict[str, Any] | None = None, train: Any = None) -> AuditPool:
    return toys.federation(settings, train=train or numbered()).assembly.audit_pool


def test_members_train_and_the_others_are_gone() -> None:
    whole = numbered()
    federation = toys.federation(WIDE, train=whole)
    found = federation.assembly.audit_pool
    assert found.kind == "example"
    trained = {content(item) for client in federation.assembly.clients for item in client.examples}
    for unit, member in zip(found.units, found.members, strict=True):
        assert (content(unit.examples[0]) in trained) is bool(member)
    pooled = {content(unit.examples[0]) for unit in found.units}
    assert {content(item) for own in whole for item in own} - pooled <= trained  # outside the pool, all train


def test_the_order_of_what_trains_is_that_of_the_data() -> None:
    whole = numbered()
    federation = toys.federation(WIDE, train=whole)
    for client, own in zip(federation.assembly.clients, whole, strict=True):
        kept = [content(item) for item in client.examples]
        assert kept == [one for one in map(content, own) if one in set(kept)]


def test_a_unit_more_changes_nobody_elses_lot() -> None:
    whole = numbered()
    fewer = [whole[0][:20] + whole[0][21:], *whole[1:]]

    def lots(train: list[list[dict[str, Any]]]) -> dict[bytes, bool]:
        found = held(WIDE, train)
        return {content(unit.examples[0]): bool(is_in) for unit, is_in in zip(found.units, found.members, strict=True)}

    with_it, without = lots(whole), lots(fewer)
    gone = content(whole[0][20])
    assert {one: is_in for one, is_in in with_it.items() if one != gone} == without


def test_copies_share_their_lot_and_are_not_asked_about() -> None:
    whole = numbered()
    copied = [[*whole[0], *whole[1][:40]], whole[1], whole[2]]
    federation = toys.federation(WIDE, train=copied)
    twice = {content(item) for item in whole[1][:40]}
    assert not twice & {content(unit.examples[0]) for unit in federation.assembly.audit_pool.units}
    trained = [content(item) for client in federation.assembly.clients for item in client.examples]
    counts = [trained.count(one) for one in twice]
    assert set(counts) == {0, 2}
    assert len(federation.assembly.audit_pool.copies) == 2 * counts.count(0)
    gone = sum(map(len, copied)) - len(trained)
    assert f"{gone} of {sum(map(len, copied))} examples, chosen by coins, are not trained on" in " ".join(
        federation.notes
    )
    alone = held(WIDE, whole)
    for unit, member in zip(alone.units, alone.members, strict=True):
        assert (content(unit.examples[0]) in trained) is bool(member)  # an added copy changes no other coin


def test_coins_are_fair_and_differ_between_seeds() -> None:
    counts, shares = [], []
    for seed in range(15):
        found = held(WIDE | {"federation.seed": seed})
        counts.append(len(found.units))
        shares.append(float(found.members.mean()))
    assert len(set(shares)) > 5
    total = sum(counts)
    right = sum(count * share for count, share in zip(counts, shares, strict=True))
    assert abs(right - total / 2) < 4 * np.sqrt(total) / 2
    assert abs(total - 15 * 120) < 4 * np.sqrt(15 * 240) / 2  # half of 240 examples are in the pool


def test_with_privacy_for_clients_whole_clients_are_held_out() -> None:
    train = numbered((4,) * 60)
    federation = toys.federation(WIDE | CLIENT, train=train)
    found = federation.assembly.audit_pool
    assert found.kind == "client"
    out = {unit.name for unit, member in zip(found.units, found.members, strict=True) if not member}
    assert out
    names = [client.name for client in federation.assembly.clients]
    assert not out & set(names)
    assert len(names) == 60 - len(out)
    assert names == federation.assembly.server.names == federation.assembly.problem.facts["clients"]
    assert (federation.assembly.sampler.rate, federation.assembly.sampler.expected) == (
        10 / 60,
        10.0,
    )  # computed from all 60 clients, also those held out
    for unit in found.units:
        assert [content(item) for item in unit.examples] == [content(item) for item in train[int(unit.name[-2:])]]


def test_the_mean_is_over_the_cohort_that_was_asked_for_whoever_is_held_out() -> None:
    """The mean still divides by the cohort: a held-out client does not increase the share of any other client."""
    settings = {**WIDE, **private_toys.NOISE, "federation.cohort": 60}  # every place is drawn
    built = private_toys.federation(settings, 5, train=numbered((2,) * 60))
    stay = len(built.assembly.clients)
    assert 30 < stay < 60
    seen = private_toys.one_round(built)
    sent = [private_toys.dense(reply.contribution) for _, reply in seen.exchanges]
    total = {name: torch.stack([one[name] for one in sent]).sum(0) for name in sent[0]}
    noise = private_toys.noise(total, 0.1, 5, "sum", 0, "change")
    assert len(sent) == stay
    for name, mean in private_toys.dense(seen.mean).items():
        torch.testing.assert_close(mean, (total[name] + noise[name]) / 60, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(mean, (total[name] + noise[name]) / stay, rtol=1e-5, atol=1e-6)
    assert seen.noise_std == pytest.approx(0.1 / 60)


@pytest.mark.parametrize(("settings", "cohort"), chosen(itertools.product([{}, HIDDEN], [50, 60]), [({}, 50)]))
def test_masks_are_of_those_who_are_there(settings: dict[str, Any], cohort: int) -> None:
    """The cohort is larger than the number of clients that train: no round waits for a held-out client."""
    masks = {"secure_aggregation.enabled": True, "secure_aggregation.dropout": 0.2, "secure_aggregation.corrupt": 0.2}
    chosen = {**WIDE, **private_toys.NOISE, **masks, **settings, "federation.cohort": cohort, "federation.rounds": 1}
    built = private_toys.federation(chosen, 5, train=numbered((2,) * 60))
    assert built.assembly.masks is not None
    assert built.assembly.masks.invited == len(built.assembly.clients) < cohort
    result = built.run()
    assert result.summary["sampling_rate"] == pytest.approx(cohort / 60)
    assert result.summary["cohort"] == cohort


def test_if_the_coins_hold_everybody_out_it_is_said() -> None:
    settings = {"evaluation.audit_fraction": 1.0, "evaluation.audit_unit": "client"}

    def built(seed: int) -> Any:
        return toys.federation(
            settings | {"federation.seed": seed}, train=numbered((1,) * 10)
        ).assembly.audit_pool.members

    assert built(0).any()
    with pytest.raises(ConfigError, match=r"audit_fraction is 1, .*seed = 1194 hold out all 10 clients"):
        built(1194)
    for unit in ("example", "client"):
        chosen = toys.config({**settings, "evaluation.audit_unit": unit, "federation.seed": 1194})
        parts = toys.federation({"evaluation.audit_fraction": 0.0}, train=numbered((1,) * 10)).assembly.problem
        found = replace(pool(chosen, parts), members=np.zeros(10, dtype=bool))
        with (
            patch.object(holding, "pool", lambda config, parts, found=found: found),
            pytest.raises(ConfigError, match=f"10 {unit}s"),
        ):
            hold_out(chosen, parts)


def test_dealt_by_the_coins_is_what_the_federation_trains_on() -> None:
    for settings in (WIDE, WIDE | CLIENT):
        federation = toys.federation(settings, train=numbered((6,) * 40))
        dealt = federation.assembly.audit_pool.split(federation.assembly.audit_pool.members)
        assert dealt.names == federation.assembly.problem.names
        for own, client in zip(dealt.train, federation.assembly.clients, strict=True):
            assert [content(item) for item in own] == [content(item) for item in client.examples]
        everybody = federation.assembly.audit_pool.split(np.ones(len(federation.assembly.audit_pool.units), dtype=bool))
        assert [len(own) for own in everybody.train] == [6] * 40


def test_groups_stay_together() -> None:
    config = RunConfig().replace({("evaluation", "audit_fraction"): 0.5})
    federation = toys.federation(train=numbered((40, 40)))
    groups = [[f"patient {i // 4}" for i in range(40)]] * 2
    config = config.replace(
        {
            ("privacy", "unit"): "group",
            ("privacy", "epsilon"): 8.0,
            ("privacy", "group_column"): "patient",
        }
    )
    parts = replace(federation.assembly.problem, groups=groups, train=federation.assembly.audit_pool.train)
    found = pool(config, parts)
    assert found.kind == "group"
    assert {len(unit.examples) for unit in found.units} == {4}
    dealt = found.split(found.members)
    assert dealt.groups is not None
    for own, whose in zip(dealt.train, dealt.groups, strict=True):
        assert len(own) == len(whose)
        assert all(whose.count(group) == 4 for group in whose)


def test_too_few_units_all_train_and_the_reason_is_said() -> None:
    federation = toys.federation(sizes=(30, 30, 30))
    assert not federation.assembly.audit_pool.units
    assert f"fewer than {FEWEST}" in federation.assembly.audit_pool.why
    assert sum(len(client.examples) for client in federation.assembly.clients) == 90
    assert "audit_fraction is 0" in held({"evaluation.audit_fraction": 0.0}).why


def test_a_pool_is_never_larger_than_an_audit_can_read() -> None:
    train = [[{"x": torch.tensor([float(i), 0, 0, 0, 0, 0]), "labels": 0} for i in range(9000)]]
    found = held({"evaluation.audit_fraction": 1.0}, train)
    assert 1500 < len(found.units) <= 2000


def test_examples_without_a_content_are_said_to_have_none() -> None:
    class Opaque:
        pass

    train = [[{"x": torch.zeros(6), "labels": 0, "odd": Opaque()} for _ in range(200)]]
    found = held(None, train)
    assert not found.units
    assert "Opaque" in found.why


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": np.array([1, 2])}, {"a": np.array([1.0, 2.0])}),
        ({"a": torch.tensor([1, 2])}, {"a": torch.tensor([[1, 2]])}),
        ((1, "23"), (12, "3")),
        (["a", ["b"]], [["a"], "b"]),
        (True, 1),
        (None, "None"),
    ],
)
def test_contents_differ_where_examples_do(one: Any, other: Any) -> None:
    assert content(one) != content(other)
    assert content(one) == content(one)


@dataclass(frozen=True)
class Said:
    text: str
    spans: tuple[int, ...] = ()


def test_what_tasks_keep_beside_a_text_is_content_too() -> None:
    one = {"input_ids": np.arange(3), "sentence": Said("a", (1, 2))}
    assert content(one) == content({"input_ids": np.arange(3), "sentence": Said("a", (1, 2))})
    assert content(one) != content({"input_ids": np.arange(3), "sentence": Said("a", (1, 3))})


def test_names_of_columns_may_come_in_any_order() -> None:
    assert content({"a": 1, "b": torch.ones(2)}) == content({"b": np.ones(2, dtype=np.float32), "a": 1})


def test_the_coins_are_kept_with_the_run_for_its_owner(tmp_path: Path) -> None:
    federation = toys.federation(WIDE, train=numbered())
    federation.run(tmp_path / "run")
    file = tmp_path / "run" / "private" / "membership.json"
    kept = json.loads(file.read_text())
    assert [one["member"] for one in kept["units"]] == federation.assembly.audit_pool.members.tolist()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_resumed_run_has_the_same_members(tmp_path: Path) -> None:
    straight = toys.federation(WIDE, train=numbered()).run(tmp_path / "a")
    toys.federation(WIDE | {"federation.rounds": 1}, train=numbered()).run(tmp_path / "b")
    resumed = toys.federation(WIDE, train=numbered()).run(tmp_path / "b", resume=True)
    assert resumed.summary["membership"] == straight.summary["membership"]
    for name in straight.state.tensors:
        assert torch.equal(straight.state.tensors.tensor(name), resumed.state.tensors.tensor(name))


def test_canaries_need_somewhere_to_be() -> None:
    with pytest.raises(ConfigError, match="no units to plant"):
        toys.federation({"evaluation.canaries": "mislabelled"}, sizes=(5, 5))
    with pytest.raises(ConfigError, match="audit_fraction above 0"):
        toys.config({"evaluation.canaries": "mislabelled", "evaluation.audit_fraction": 0.0})
