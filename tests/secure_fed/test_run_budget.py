"""Runs and the ledgers they pay from: reservations, refusals that leave no files behind, and digests of units.

Two divisions of rows into units have equal digests if and only if they have the same neighbouring data sets.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, default_collate

from privacy.errors import BudgetExhausted, LedgerError
from privacy.ledger import Ledger
from secure_fed.config import DataConfig, RunConfig
from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.learning import tasks
from secure_fed.learning.data import fingerprint, partition, sources
from secure_fed.learning.data.rows import Rows
from secure_fed.runs.budget import unit_name
from tests.contracts.runs import KilledAfter, KilledError
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.conftest import Ran
from tests.secure_fed.private_toys import EXAMPLE, NOISE, charges, federation

pytestmark = pytest.mark.usefixtures("never_drawn")

EPSILON = 7.2079947054028235  # three rounds of NOISE at z = 0.9, with all clients in every round
Z = {**NOISE, "privacy.noise_multiplier": 0.9}
ONE = {**Z, "federation.rounds": 1}


def made(
    path: Path, epsilon: float | None = 20.0, delta: float | None = 0.1, of: dict[str, Any] = Z, **options: Any
) -> dict[str, Any]:
    """Creates a ledger and returns the settings of a run that pays from it."""
    Ledger.create(path, data_set="wards", epsilon=epsilon, delta=delta, **options)
    return {**of, "privacy.ledger": str(path)}


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# A ledger of its own.


def test_a_run_without_a_ledger_has_one_of_its_own(tmp_path: Path) -> None:
    said = federation({**Z, "privacy.epsilon": 8.0}).run(tmp_path / "run").summary
    ledger = private_toys.own_ledger(tmp_path / "run")
    assert (ledger.epsilon, ledger.delta, ledger.data_set) == (8.0, 1e-3, "run")
    assert charges(ledger) == [("", 1)] * 3
    assert said["epsilon"] == said["epsilon_cumulative"] == ledger.spent().epsilon == pytest.approx(EPSILON)
    assert said["privacy"]["ledger"] == str(tmp_path / "run" / "private" / "budget.sqlite")
    again = federation({**Z, "privacy.epsilon": 8.0}).run(tmp_path / "again").summary
    assert again["epsilon_cumulative"] == said["epsilon"], "so a demonstration can be repeated"


def test_a_run_that_keeps_nothing_leaves_no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = federation(ONE).run().summary
    assert (said["releases"], said["run_dir"]) == (1, None)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_or_missing_note_or_ledger_of_a_run_is_refused(tmp_path: Path) -> None:
    federation(ONE).run(tmp_path / "run")
    ledger = private_toys.own_ledger(tmp_path / "run")
    assert (ledger.epsilon, ledger.delta) == (None, None), "no limit without a target"
    note = tmp_path / "run" / "private" / "budget.json"
    kept = note.read_text()
    built = federation(ONE)
    for text in ("", "{}", '{"run": 7}', "[]", '{"run": "x", "ledger": "y", "head": {"row": 1}}', None):
        note.unlink() if text is None else note.write_text(text)
        with refused(RunDirectoryError) as error:
            built.run(tmp_path / "run", resume=True)
        assert error.value.exit_code == 2
    note.write_text(kept)
    note.with_suffix(".sqlite").unlink()
    with refused(LedgerError):
        built.run(tmp_path / "run", resume=True)


# A ledger that runs share.


def test_two_runs_add_up(tmp_path: Path) -> None:
    settings = made(tmp_path / "wards.sqlite")
    first = federation(settings).run(tmp_path / "first").summary
    second = federation({**settings, "federation.seed": 1}).run(tmp_path / "second").summary
    assert first["epsilon"] == second["epsilon"] == pytest.approx(EPSILON)
    assert first["epsilon_cumulative"] == pytest.approx(EPSILON)
    assert second["epsilon_cumulative"] == pytest.approx(2 * EPSILON)
    assert second["privacy"]["data_set"] == "wards"
    assert (second["privacy"]["budget_epsilon"], second["privacy"]["budget_delta"]) == (20.0, 0.1)
    ledger = Ledger.open(tmp_path / "wards.sqlite")
    reserved = [row for row in ledger.rows() if row.kind == "reserve"]
    assert len({row.run for row in reserved}) == 2
    assert all(ledger.charged(row.run) == {"": 3} for row in reserved)
    assert {"releases": 3, "noise_multiplier": 0.9}.items() <= reserved[0].body["terms"].items()
    assert not (tmp_path / "first" / "private" / "budget.sqlite").exists()
    with refused(BudgetExhausted):
        federation(settings).run(tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_the_same_name_of_a_folder_is_another_run_and_renyi_ledgers_are_given_what_they_add_up(tmp_path: Path) -> None:
    settings = made(tmp_path / "wards.sqlite", epsilon=30.0, delta=1e-3, of=ONE, composition="rdp")
    said = [federation(settings).run(tmp_path / where / "run").summary for where in ("a", "b")]
    assert len({row.run for row in Ledger.open(tmp_path / "wards.sqlite").rows() if row.kind == "reserve"}) == 2
    assert said[1]["epsilon_cumulative"] < 2 * said[0]["epsilon_cumulative"], "Renyi privacy composes better"


# Refusals, which leave no files behind.


@pytest.mark.parametrize(("delta", "fits"), [(0.9e-3, 0), (1e-3, 1)])
def test_delta_is_budgeted_too(delta: float, fits: int, tmp_path: Path) -> None:
    """Where a limit is used up, no setting is advised."""
    settings = made(tmp_path / "wards.sqlite", delta=delta, of=ONE)
    for number in range(fits):
        federation(settings).run(tmp_path / str(number))
    with refused(BudgetExhausted):
        federation(settings).run(tmp_path / "run")


def test_a_plan_above_what_is_left_is_refused(tmp_path: Path) -> None:
    settings = made(tmp_path / "wards.sqlite", epsilon=6.0, of=ONE)
    federation(settings).run(tmp_path / "first")
    before = everything(tmp_path)
    with refused(BudgetExhausted):
        federation(settings).run(tmp_path / "second")
    with refused(BudgetExhausted):  # a ledger with room for nothing stops nothing
        federation({**settings, "privacy.on_exhausted": "stop"}).run(tmp_path / "second")
    with refused(LedgerError):
        federation({**settings, "privacy.data_set": "clinics"}).run(tmp_path / "second")
    assert everything(tmp_path) == before


def test_a_ledger_that_is_missing_is_no_fresh_budget(tmp_path: Path) -> None:
    missing = {**Z, "privacy.ledger": str(tmp_path / "new.sqlite"), "privacy.data_set": "wards"}
    with refused(LedgerError) as error:
        federation(missing).run(tmp_path / "run")
    assert error.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_neither_units_nor_neighbours_are_mixed_in_one_ledger(tmp_path: Path) -> None:
    """Naming the data set does not help: it declares equal rows, not the unit that an epsilon protects."""
    settings = made(tmp_path / "wards.sqlite", epsilon=None, delta=None, of=ONE) | {"privacy.data_set": "wards"}
    federation(settings).run(tmp_path / "first")
    before = everything(tmp_path)
    shared = {name: settings[name] for name in ("privacy.ledger", "privacy.data_set", "federation.rounds")}
    named, fixed, rows = {"privacy.unit_name": "ward"}, {"federation.sampling": "fixed"}, (5, 9, 10)
    for other, sizes in (
        ({**EXAMPLE, **shared, "privacy.noise_multiplier": 1.0}, (5, 8, 11)),
        ({**settings, **fixed}, (5, 8, 11)),
        (settings, rows),
        ({**settings, **named}, rows),
    ):
        with refused(LedgerError):
            federation(other, sizes=sizes).run(tmp_path / "second")
    assert everything(tmp_path) == before
    Ledger.open(tmp_path / "wards.sqlite").declare_same("client", "ward")
    federation({**settings, **named}, sizes=rows).run(tmp_path / "second")
    with refused(LedgerError):
        federation({**settings, **named, **fixed}, sizes=rows).run(tmp_path / "third")


def test_objects_dealt_to_others_are_other_units(tmp_path: Path) -> None:
    """The same rows are those of eight patients, then of eight doctors, four each. A change of order alone is accepted."""
    settings = made(tmp_path / "wards.sqlite", epsilon=None, delta=None, of=ONE)
    rows = toys.examples(1, 32)
    patients, doctors = [rows[own::8] for own in range(8)], [rows[start : start + 4] for start in range(0, 32, 4)]
    federation(settings, train=patients).run(tmp_path / "first")
    with refused(LedgerError):
        federation(settings, train=doctors).run(tmp_path / "second")
    federation(settings, train=[own[::-1] for own in reversed(patients)]).run(tmp_path / "second")


def test_a_run_is_not_resumed_on_the_data_of_others(tmp_path: Path) -> None:
    """Also where only the ledger's digest tells them apart, as of data sets of torch."""
    settings = made(tmp_path / "wards.sqlite", of=ONE)
    mine, others = ([Subset(toys.examples(seed + client, 4), range(4)) for client in range(3)] for seed in (1, 50))
    with pytest.raises(KilledError):
        federation(settings, train=mine, callbacks=[KilledAfter(1)]).run(tmp_path / "run")
    with refused(LedgerError):
        federation(settings, train=others).run(tmp_path / "run", resume=True)
    federation(settings, train=mine).run(tmp_path / "run", resume=True)


class Opaque:
    """An example whose content cannot be read from outside."""

    def __init__(self, item: toys.Item) -> None:
        self.item = item


def test_objects_without_content_need_a_name_for_their_unit(tmp_path: Path) -> None:
    settings = made(tmp_path / "wards.sqlite", of=ONE)
    own: dict[str, Any] = {
        "train": [[Opaque(item) for item in toys.examples(client, 4)] for client in range(3)],
        "test": [Opaque(item) for item in toys.examples(9, 4)],
        "collate": lambda items: default_collate([one.item for one in items]),
    }
    with refused(ConfigError, "privacy.unit_name"):
        federation(settings, **own)
    for name in "ab":
        federation({**settings, "privacy.unit_name": "patient"}, **own).run(tmp_path / name)


def test_an_older_copy_of_a_ledger_is_noticed_by_a_run_that_starts_anew(tmp_path: Path) -> None:
    heads = tmp_path / "elsewhere" / "heads.sqlite"
    settings = made(tmp_path / "wards.sqlite", of=ONE) | {"privacy.ledger_heads": str(heads)}
    federation(settings).run(tmp_path / "first")
    older = (tmp_path / "wards.sqlite").read_bytes()
    federation(settings).run(tmp_path / "second")
    (tmp_path / "wards.sqlite").write_bytes(older)
    before = everything(tmp_path)
    with refused(LedgerError) as error:
        federation(settings).run(tmp_path / "third")
    assert error.value.exit_code == 2
    assert everything(tmp_path) == before
    other = {**settings, "privacy.ledger_heads": str(tmp_path / "other.sqlite")}
    federation(other).run(tmp_path / "third")  # a file of heads that has never seen the ledger cannot tell


def test_a_run_may_stop_when_the_ledger_is_spent(tmp_path: Path) -> None:
    settings = made(tmp_path / "wards.sqlite", epsilon=8.0) | {"privacy.on_exhausted": "stop", "evaluation.every": 5}
    result = federation({**settings, "federation.rounds": 6}).run(tmp_path / "run")
    said = result.summary
    assert said["rounds"] == said["releases"] == len(result.records) == 3
    assert said["epsilon"] == said["epsilon_cumulative"] == pytest.approx(EPSILON)
    assert "after 3 of 6 rounds" in said["ended_early"]
    assert said["accuracy"] is not None, "the last state is measured, though nobody knew that it would be the last"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["ended_early"] == said["ended_early"]
    again = federation({**settings, "federation.rounds": 6}).run(tmp_path / "run", resume=True).summary
    assert (again["rounds"], again["releases"], again["epsilon"]) == (3, 3, said["epsilon"])
    with refused(BudgetExhausted):
        federation({**settings, "federation.rounds": 6}).run(tmp_path / "second")


@pytest.mark.slow
def test_exit_codes_and_what_is_left(ran: Ran, small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """Six sites train for one short round, or are refused and leave no file behind."""
    usual = {
        **{"model.name": small_model, "data.train": small_data / "train.jsonl", "data.client": "site"},
        **{"data.test": small_data / "test.jsonl", "federation.rounds": 1, "federation.cohort": 6},
        **{"training.steps": 1, "privacy.unit": "client", "privacy.noise_multiplier": 0.9, "privacy.delta": 1e-3},
        "privacy.ledger": tmp_path / "sites.sqlite",
    }

    def train(out: str = "run", **more: object) -> tuple[int, str, str]:
        settings = usual | {name.replace("__", "."): value for name, value in more.items()}
        sets = [f"--set={name}={value}" for name, value in settings.items()]
        return ran("train", "--json", "--out", tmp_path / out, *sets)

    def refuses(status: int, words: str, **more: object) -> None:
        before = everything(tmp_path)
        ended, _, error = train("second", **more)
        assert (ended, words in error.splitlines()[-1]) == (status, True), error
        assert everything(tmp_path) == before

    refuses(2, "there is no ledger")
    Ledger.create(tmp_path / "sites.sqlite", data_set="clinics", epsilon=5.0, delta=0.01)
    status, out, _ = train()
    assert status == 0
    assert 5 / 2 < json.loads(out)["epsilon"] == json.loads(out)["epsilon_cumulative"] < 5
    refuses(3, "has spent epsilon")
    refuses(2, "is the ledger of data set", privacy__data_set="wards")
    refuses(2, "no reservation for the data of run", data__train=small_data / "test.jsonl")
    refuses(3, "above privacy.epsilon = 1", privacy__epsilon=1, privacy__ledger="")


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
