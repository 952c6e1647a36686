"""`secure-fed budget`: its output, its errors and its exit status."""

from __future__ import annotations

import json
import math
import sqlite3
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy import accounting
from privacy.errors import LedgerError
from privacy.filters import Cost
from privacy.forecast import Possible, Setting, recommended
from privacy.ledger import Ledger
from privacy.plan import Target
from protocols.simulate import Simulation, simulate
from secure_fed.commands.budget_plan import noise_shares, settings_of
from secure_fed.config import RunConfig
from secure_fed.methods.method import Card
from secure_fed.report.formatting import size
from secure_fed.rounds.cohort import cohort_sampler
from secure_fed.rounds.protection import protect
from secure_fed.runs.budget import heads_at
from tests import accounts
from tests.cells import chosen, every
from tests.golden import golden, refused
from tests.privacy.ledger_child import UNIT
from tests.secure_fed.conftest import Ran, Refuses

SMALL = ("--delta", "1e-5", "--rounds", "5", "--clients", "20", "--cohort", "2")
LOOP = ("--unit", "example", "--examples", "2000", "--batch-size", "100", "--delta", "1e-5")


@pytest.fixture
def told(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """Runs `secure-fed budget`, whose epsilons are on a coarse grid whatever else is loaded."""
    monkeypatch.setenv("COLUMNS", "200")
    with accounts.coarse():
        yield lambda *arguments: ran("budget", *arguments)


@pytest.mark.nightly
def test_a_target_for_cohorts_of_fixed_size_is_turned_into_noise(told: Ran) -> None:
    facts = json.loads(told("plan", "--epsilon", "5", *SMALL, "--sampling", "fixed", "--json")[1])
    assert 4.95 < facts["epsilon"] <= 5.0
    release = accounting.sampled_without_replacement(20, 2, facts["noise_multiplier"])
    assert facts["epsilon"] == accounting.epsilon(release, 5, 1e-5)
    assert {other["epsilon"] for other in facts["alternatives"]} == {1.0, 3.0, 5.0, 8.0}


@pytest.mark.parametrize("named", chosen(["with_a_size", "without_a_size"], ["with_a_size"]))
def test_a_plan_in_words(told: Ran, named: str) -> None:
    dim = ("--dim", "100") if named == "with_a_size" else ()
    golden(f"secure_fed/budget_plan/{named}.txt", told("plan", "--noise-multiplier", "1", *SMALL, *dim)[1])


def test_the_ways_are_compared_with_what_everybody_sends_and_one_is_recommended(told: Ran) -> None:
    plan = ["plan", "--noise-multiplier", "1", *SMALL, "--dim", "24000"]
    ways = json.loads(told(*plan, "--json")[1])["ways"]
    names = {"sampling", "noise", "correlation", "noise_multiplier", "epsilon", "holds_against", "final_noise"}
    assert all(names < set(way) for way in ways)
    assert [(way["sampling"], way["noise"], way["correlation"], len(way["holds_against"])) for way in ways] == [
        ("coins", "central", "none", 1),
        ("schedule", "central", "none", 2),
        ("schedule", "central", "banded", 2),
        ("coins", "distributed", "none", 3),
        ("schedule", "local", "none", 3),
    ], "two clients cannot be masked, twenty can"
    final = [way["final_noise"] * math.sqrt(24_000) / (2 * 5) for way in ways]
    assert final == pytest.approx([way["noise_share"] for way in ways])
    assert sum(way["recommended"] for way in ways) == 1
    *without, sent, last = [way["bytes_up_a_round"] for way in ways]
    assert [*without, last] == [None] * 4
    measured = sum(stage.bytes_up for stage in simulate(Simulation(clients=20, dim=24_000)).stages)
    assert sent == pytest.approx(measured, rel=0.02)
    assert f"each of the 20 clients sends about {size(sent)} in every round" in " ".join(told(*plan)[1].split())


@every(
    "cohort, dim, noise, correlation",
    [(6, 1, "distributed", "none"), (6, 1000, "central", "banded"), (2, 1, "central", "banded")],  # two: no masks
)
def test_the_recommended_settings_make_the_noise_that_was_promised(
    cohort: int, dim: int, noise: str, correlation: str
) -> None:
    setting = Setting(clients=20, cohort=cohort, rounds=5, delta=1e-5, dim=dim)
    asked = Namespace(epsilon=8.0, noise_multiplier=None, momentum=0.7, corrupt=0.2, dropout=0.1, clip_norm=None)
    possible = Possible(noise_shares(cohort, 0.2, 0.1), momentum=0.7)
    way = recommended(setting, Target(8.0, None, 1e-5), possible)
    assert (way.sampling, way.noise, way.correlation) == ("schedule", noise, correlation)

    pasted = tomllib.loads(settings_of(setting, way, asked))
    assert "clip_norm" not in pasted["privacy"]  # a run chooses a better clip norm by itself
    config = RunConfig.from_dict(pasted | {"method": {"name": "ffa_lora"}})
    names = [*"abcdefghijklmnopqrst"]
    built = protect(config, Card("toy", "", "", True), names, [5] * 20, cohort_sampler(config, 20), passes=1)
    assert built.plan is not None
    assert (built.plan.noise_multiplier, built.plan.epsilon()) == (way.noise_multiplier, way.epsilon)
    assert built.plan.correlation.band == way.band
    assert (built.shares is not None) == (noise == "distributed")
    if built.shares is not None:
        final = built.shares.std(1.0, dim, cohort) * math.sqrt(5)
        assert final == pytest.approx(way.final_noise, rel=1e-3)


BAD_PLANS = """
--epsilon 3 SMALL --cohort 21
--epsilon 0 SMALL
--epsilon -1 SMALL
--noise-multiplier 0 SMALL
--noise-multiplier nan SMALL
--noise-multiplier 1e300 SMALL
--epsilon 8 SMALL --rounds 99999999999
--epsilon 8 SMALL --momentum nan
--epsilon 8 SMALL --momentum 1
--noise-multiplier 1 SMALL --delta 2
--noise-multiplier 1 SMALL --clip-norm 0
--noise-multiplier 1 SMALL --corrupt 0.5
--noise-multiplier 1 SMALL --dropout nan
--noise-multiplier 1 --epsilon 1 SMALL
SMALL
--epsilon 3
--epsilon 8 LOOP --epochs 3 --rounds 5
--epsilon 8 --unit example --examples 2000 --delta 1e-5 --epochs 3
--epsilon 8 SMALL --epochs 3
--epsilon 8 SMALL --pooling mean
--epsilon 8 SMALL --task causal_lm
--epsilon 8 --delta 1e-5
--epsilon 8 LOOP --epochs 3 --steps 5
--epsilon 8 LOOP --epochs 3 --persons 50
--epsilon 8 --delta 1e-5 --unit person --examples 50 --batch-size 10 --steps 5
--epsilon 8 --delta 1e-5 --unit person --batch-size 10 --steps 5
"""


@every("line", BAD_PLANS.strip().splitlines())
def test_bad_plans_end_with_two_and_a_sentence(refuses: Refuses, line: str) -> None:
    refuses("budget", "plan", *line.replace("SMALL", " ".join(SMALL)).replace("LOOP", " ".join(LOOP)).split())


@pytest.fixture
def ledger(tmp_path: Path, told: Ran) -> Path:
    path = tmp_path / "notes.ledger"
    status, out, err = told("create", path, "--data-set", "discharge notes", "--epsilon", "8", "--delta", "1e-5")
    assert status == 0, err
    assert "discharge notes" in out
    return path


def test_a_new_ledger_is_empty_and_all_or_without_limits_anything_is_left(
    ledger: Path, told: Ran, tmp_path: Path
) -> None:
    status, out, _ = told("show", ledger, "--json")
    facts = json.loads(out)
    assert status == 0
    assert (facts["data_set"], facts["composition"], facts["runs"]) == ("discharge notes", "basic", [])
    assert facts["limit"] == facts["left"] == {"epsilon": 8.0, "delta": 1e-5}
    assert facts["spent"] == {"epsilon": 0.0, "delta": 0.0}
    assert "no run has reserved anything" in told("show", ledger)[1]
    Ledger.create(tmp_path / "free", data_set="demo", epsilon=None, delta=None)
    assert "no limit" in told("show", tmp_path / "free")[1]
    assert json.loads(told("show", tmp_path / "free", "--json")[1])["left"] == {"epsilon": None, "delta": None}


def test_a_ledger_is_shown_with_what_runs_hold_and_made(ledger: Path, told: Ran) -> None:
    kept = Ledger.open(ledger)
    for run, epsilon, charges in (("first", 3.0, (("", 2), ("", 1))), ("second", 1.5, (("a", 4), ("b", 1)))):
        kept.reserve(run, Cost(epsilon, 1e-6), data_digest="d", unit=UNIT, terms={})
        for who, releases in charges:
            kept.charge(run, who, releases, {})
    facts: dict[str, Any] = json.loads(told("show", ledger, "--json")[1])
    assert [(run["run"], run["epsilon"], run["releases"]) for run in facts["runs"]] == [
        ("first", 3.0, 3),
        ("second", 1.5, 4),
    ], "as a result counts: where each client is charged, those of the client with the most"
    assert facts["runs"][1]["by"] == {"a": 4, "b": 1}
    assert facts["spent"]["epsilon"] == 4.5
    assert facts["left"] == {"epsilon": 3.5, "delta": pytest.approx(8e-6)}
    kept.reserve("third", Cost(2.0, 1e-6), data_digest="d", unit=UNIT, terms={})
    kept.close("third")
    kept.extend("second", Cost(2.0, 1e-6))
    after = json.loads(told("show", ledger, "--json")[1])
    assert (after["spent"]["epsilon"], after["left"]["epsilon"]) == (5.0, 3.0)
    assert [run["epsilon"] for run in after["runs"]] == [3.0, 2.0, 2.0], "what a run holds now, once"
    assert [bool(run["closed"]) for run in after["runs"]] == [False, False, True]
    out = told("show", ledger)[1]
    assert "given back" in out
    assert all(text in out for text in ("first", "second", facts["runs"][0]["time"]))


def test_units_and_what_was_declared_the_same_are_shown_and_stay_in_the_chain(ledger: Path, told: Ran) -> None:
    kept = Ledger.open(ledger)
    kept.reserve("first", Cost(1.0, 1e-6), data_digest="d", unit=UNIT, terms={})
    grown = replace(UNIT, name="patient 2027", members="more rows")
    with refused(LedgerError):
        kept.reserve("second", Cost(1.0, 1e-6), data_digest="d", unit=grown, terms={})
    assert told("same", ledger, "patient", "patient 2027")[:2] == (
        0,
        f"{ledger}: patient and patient 2027 are one unit, as you say; costs of runs on either add up\n",
    )
    kept.reserve("second", Cost(1.0, 1e-6), data_digest="d", unit=grown, terms={})
    facts = json.loads(told("show", ledger, "--json")[1])
    assert [(unit["name"], unit["kind"], unit["neighbours"]) for unit in facts["units"]] == [
        ("patient", "person", "add-remove"),
        ("patient 2027", "person", "add-remove"),
    ]
    assert [statement["units"] for statement in facts["same"]] == [["patient", "patient 2027"]]
    assert [run["unit"] for run in facts["runs"]] == ["patient", "patient 2027"]
    assert f"declared one unit: patient and patient 2027 ({facts['same'][0]['time']})" in told("show", ledger)[1]
    assert UNIT.members not in json.dumps(facts), "a digest that was not keyed would confirm guesses"


def test_heads_are_in_the_users_folder_for_state_unless_another_place_is_chosen(
    ledger: Path, told: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for state, folder in ((str(tmp_path / "state"), tmp_path / "state"), ("here", tmp_path / "home/.local/state")):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert heads_at("").path == folder / "secure-fed" / "ledgers.sqlite"
    chosen = tmp_path / "chosen.sqlite"
    kept = Ledger.open(ledger, heads=heads_at(chosen))
    older = ledger.read_bytes()
    kept.reserve("first", Cost(1.0, 1e-6), data_digest="d", unit=UNIT, terms={})
    ledger.write_bytes(older)
    assert told("show", ledger, "--heads", chosen)[0] == 2
    assert told("same", ledger, "a", "b", "--heads", chosen)[0] == 2
    assert told("show", ledger)[0] == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["chosen.sqlite", "notes.ledger"], (
        "looking leaves nothing"
    )


def test_a_statement_about_no_unit_is_refused_and_not_written(ledger: Path, refuses: Refuses) -> None:
    Ledger.open(ledger).reserve("first", Cost(1.0, 1e-6), data_digest="d", unit=UNIT, terms={})
    before = ledger.read_bytes()
    for names in (("patient", "patient"), ("pateint", "doctor"), ("patient", ""), ("patient", "a\nb"), ("patient",)):
        refuses("budget", "same", ledger, *names)
    assert ledger.read_bytes() == before


def test_what_is_no_ledger_or_an_edited_one_is_refused(tmp_path: Path, ledger: Path, refuses: Refuses) -> None:
    (tmp_path / "text").write_text("not a ledger", encoding="utf-8")
    refuses("budget", "show", tmp_path / "none")
    refuses("budget", "show", tmp_path / "text", hide=r"\(.*?\)")
    assert not (tmp_path / "none").exists()
    refuses("budget", "create", ledger, "--data-set", "other", "--epsilon", "1", "--delta", "1e-5")
    refuses("budget", "create", tmp_path / "new", "--data-set", "d", "--epsilon", "-1", "--delta", "1e-5")
    assert Ledger.open(ledger).data_set == "discharge notes"
    with closing(sqlite3.connect(ledger)) as connection, connection:
        guard = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'never_updated'").fetchone()[0]
        connection.execute("DROP TRIGGER never_updated")
        changed = connection.execute("UPDATE chain SET body = replace(body, '8.0', '80.0')").rowcount
        connection.execute(guard)
    assert changed == 1
    refuses("budget", "show", ledger, "--json")


def test_a_ledger_by_renyi_privacy_is_made_and_shown(tmp_path: Path, told: Ran) -> None:
    path = tmp_path / "rdp"
    made = told("create", path, "--data-set", "d", "--epsilon", "8", "--delta", "1e-5", "--composition", "rdp")
    assert made[0] == 0
    kept = Ledger.open(path)
    release = accounting.poisson_sampled(0.01, 1.0)
    cost = Cost(accounting.epsilon(release, 100, 1e-5), 1e-5, accounting.rdp(release, 100, kept.orders))
    kept.reserve("run", cost, data_digest="d", unit=UNIT, terms={})
    facts = json.loads(told("show", path, "--json")[1])
    assert facts["composition"] == "rdp"
    assert 0 < facts["spent"]["epsilon"] < 8
    assert facts["left"]["epsilon"] == pytest.approx(8 - facts["spent"]["epsilon"])


def test_a_plan_of_an_own_loop_is_that_of_dp_sgd(told: Ran) -> None:
    status, out, _ = told("plan", *LOOP, "--epochs", "3", "--epsilon", "8", "--json")
    facts = json.loads(out)
    assert status == 0
    assert (facts["steps"], facts["steps_an_epoch"], facts["sampling_rate"]) == (60, 20, 0.05)
    release = accounting.poisson_sampled(0.05, facts["noise_multiplier"])
    assert accounting.epsilon(release, 60, 1e-5) == pytest.approx(facts["epsilon"])
    assert 7.9 < facts["epsilon"] <= 8
    assert facts["sensitivity"] == pytest.approx(1.01)
    assert facts["noise_std"] == pytest.approx(1.01 * facts["noise_multiplier"] / 100)
    status, out, _ = told("plan", *LOOP, "--steps", "60", "--noise-multiplier", facts["noise_multiplier"])
    assert status == 0
    assert f"{facts['epsilon']:.4g} against whoever gets the model" in out


def test_a_plan_for_persons_is_that_of_a_clients_steps_and_counts_a_person_of_two_clients(told: Ran) -> None:
    persons = ("--unit", "person", "--persons", "400", "--batch-size", "100", "--epochs", "5", "--delta", "1e-5")
    facts = json.loads(told("plan", *persons, "--epsilon", "8", "--clip-norm", "0.5", "--json")[1])
    assert (facts["persons"], facts["steps"], facts["sampling_rate"]) == (400, 20, 0.25)
    release = accounting.poisson_sampled(0.25, facts["noise_multiplier"])
    assert accounting.epsilon(release, 20, 1e-5) == pytest.approx(facts["epsilon"])
    assert 7.9 < facts["epsilon"] <= 8
    assert facts["epsilon_at_two_clients"] == pytest.approx(accounting.epsilon(release, 40, 1e-5))
    assert facts["noise_std"] == pytest.approx(0.5 * facts["noise_multiplier"] / 100)
    golden("secure_fed/budget_plan/persons.txt", told("plan", *persons, "--epsilon", "8")[1])
