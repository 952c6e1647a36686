"""Digests of a division of rows into units: equal if and only if two divisions have the same neighbouring data sets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fed.config import DataConfig, RunConfig
from secure_fed.learning import tasks
from secure_fed.learning.data import fingerprint, partition, sources
from secure_fed.learning.data.rows import Rows
from secure_fed.runs.budget import unit_name

# Few texts and few units, so that equal divisions are common.
divided = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=6)
Divided = list[tuple[str, int, int]]


def blocks(rows: Divided) -> list[list[int]]:
    return [[index for index, row in enumerate(rows) if row[2] == unit] for unit in range(3)]


def digest(rows: Divided) -> str:
    columns = Rows(tuple(row[0] for row in rows), tuple(row[1] for row in rows), ("no", "yes"))
    return fingerprint.of_units(columns, blocks(rows))


def naive(rows: Divided) -> Any:
    """The multiset of units, each a multiset of rows."""
    bags = (frozenset(Counter(rows[index][:2] for index in block).items()) for block in blocks(rows) if block)
    return Counter(bags)


@settings(max_examples=60)
@given(divided, divided)
def test_digests_are_equal_where_the_units_are(one: Divided, other: Divided) -> None:
    assert (digest(one) == digest(other)) == (naive(one) == naive(other))


@settings(max_examples=40)
@given(divided, st.randoms(use_true_random=False), st.permutations(range(3)))
def test_neither_order_nor_the_names_of_units_count(rows: Divided, rng: Any, names: list[int]) -> None:
    renamed = [(text, label, names[unit]) for text, label, unit in rows]
    rng.shuffle(renamed)
    assert digest(renamed) == digest(rows)


@pytest.fixture
def ward(tmp_path: Path) -> Path:
    """A data file of eight patients with two notes each, at four sites, with two doctors."""
    rows = [{"text": f"note {n}", "label": "ab"[n % 2], "patient": f"p{n % 8}"} for n in range(16)]
    rows = [row | {"doctor": f"d{n % 2}", "site": f"s{n % 4}"} for n, row in enumerate(rows)]
    path = tmp_path / "ward.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def unit(data: Path, **more: Any) -> tuple[str, str]:
    """The unit's name in a ledger, and its digest."""
    usual = {"data.train": str(data), "data.test": str(data), "privacy.noise_multiplier": 1.0, "federation.clients": 2}
    chosen = {**usual, **{name.replace("__", "."): value for name, value in more.items()}}
    config = RunConfig().replace({tuple(name.split(".", 1)): value for name, value in chosen.items()})  # type: ignore[misc]
    asked = {"person": config.privacy.person_column, "unit": config.privacy.unit}
    source = sources.load(config.data, tasks.build(config.data), seed=config.federation.seed, **asked)
    units = partition.units(config, source, partition.divide(config, source))
    return unit_name(config), fingerprint.of_units(*units)


def test_units_are_told_apart_by_their_rows_and_not_by_who_holds_them(ward: Path, tmp_path: Path) -> None:
    def person(column: str, **more: Any) -> tuple[str, str]:
        return unit(ward, privacy__unit="person", privacy__person_column=column, **more)

    sites = {"data__client": "site", "federation__clients": None}
    patients = person("patient")
    assert patients[0] == "patient"
    assert patients == person("patient", federation__seed=5), "whichever client holds a patient"
    assert patients == person("patient", **sites)
    clients = unit(ward, privacy__unit="client", **sites)
    assert clients == unit(ward, privacy__unit="client", federation__seed=5, **sites)
    assert clients[0] == "site"
    drawn = [unit(ward, privacy__unit="client", federation__seed=seed) for seed in (0, 5)]
    assert [name for name, _ in drawn] == ["client"] * 2
    examples = unit(ward, privacy__unit="example")
    assert examples == unit(ward, privacy__unit="example", federation__seed=5)
    different = [patients, person("doctor"), clients, *drawn, examples]
    assert len({digest for _, digest in different}) == len(different)
    assert unit(ward, privacy__unit="client", privacy__ledger="l", privacy__unit_name="ward", **sites)[0] == "ward"
    with ward.open("a") as file:
        file.write('{"text": "one more", "label": "a", "patient": "p0", "doctor": "d0", "site": "s0"}\n')
    assert person("patient")[1] != patients[1]


@pytest.mark.parametrize("protected", ["client", "person", "example"])
def test_another_seed_holds_out_other_rows_and_makes_no_other_units(ward: Path, protected: str) -> None:
    more: dict[str, Any] = {"data__test": "", "data__test_fraction": 0.5, "privacy__unit": protected}
    if protected == "client":
        more |= {"data__client": "site", "federation__clients": None}
    if protected == "person":
        more |= {"privacy__person_column": "patient"}
    seeds = (0, 2, 4)
    own = DataConfig(train=str(ward), client=more.get("data__client", ""), test_fraction=0.5)
    asked = {"person": more.get("privacy__person_column", ""), "unit": protected}
    loaded = (sources.load(own, tasks.build(own), seed=seed, **asked) for seed in seeds)
    assert len({one.train.text for one in loaded}) > 1
    held_out = {unit(ward, federation__seed=seed, **more) for seed in seeds}
    del more["data__test"], more["data__test_fraction"]
    assert held_out == {unit(ward, **more)}, "nor does a test set of its own"
