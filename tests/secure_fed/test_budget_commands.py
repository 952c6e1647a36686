"""`secure-fed budget`: its output, its errors and its exit status."""

from __future__ import annotations

import json
import math
import sqlite3
import tomllib
from argparse import Namespace
from collections.abc import Callable
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
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.methods.method import Card
from secure_fed.report.formatting import size
from secure_fed.rounds.cohort import cohort_sampler
from secure_fed.rounds.protection import protect
from secure_fed.runs.budget import heads_at
from tests.cells import chosen, every
from tests.privacy.ledger_child import UNIT

LARGE = ("--delta", "1e-6", "--rounds", "1", "--clients", "1000", "--cohort", "100")
SMALL = ("--delta", "1e-5", "--rounds", "5", "--clients", "20", "--cohort", "2")
Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Told:
    """Runs `secure-fed budget`; returns its exit status, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(["budget", *map(str, arguments)])
        except SystemExit as end:
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.mark.nightly
@pytest.mark.slow
def test_a_plan_as_json_says_what_accounting_says(told: Told) -> None:
    status, out, _ = told("plan", "--noise-multiplier", "2", *SMALL, "--dim", "100", "--clip-norm", "0.5", "--json")
    facts = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    assert facts["epsilon"] == accounting.epsilon(accounting.poisson_sampled(0.1, 2.0), 5, 1e-5)
    assert facts["epsilon_participants"] == accounting.epsilon(accounting.unamplified(2.0), 5, 1e-5)
    assert (facts["sampling_rate"], facts["noise_std"], facts["noise_norm"]) == (0.1, 0.5, 5.0)
    assert facts["outlook"] == "long"
    assert {other["epsilon"] for other in facts["alternatives"]} == {1.0, 3.0, 8.0}
    assert {other["cohort"] for other in facts["alternatives"]} == {1, 2, 4, 8}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_target_is_turned_into_noise(told: Told) -> None:
    status, out, _ = told("plan", "--epsilon", "5", *SMALL, "--sampling", "fixed", "--json")
    facts = json.loads(out)
    assert status == 0
    assert 4.95 < facts["epsilon"] <= 5.0
    release = accounting.sampled_without_replacement(20, 2, facts["noise_multiplier"])
    assert facts["epsilon"] == accounting.epsilon(release, 5, 1e-5)
    assert {other["epsilon"] for other in facts["alternatives"]} == {1.0, 3.0, 5.0, 8.0}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "setting", "dim", "word", "cohorts"),
    chosen(
        [
            ("2", SMALL, "100", "long", (1, 2, 4, 8)),
            ("1", LARGE, "10", "fine", (50, 100, 200, 400)),
            ("1", LARGE, "1000", "hard", (50, 100, 200, 400)),
        ],
        [("2", SMALL, "100", "long", (1, 2, 4, 8))],  # another test computes the same costs
    ),
)
def test_a_plan_says_in_words_whether_there_is_hope(
    told: Told, noise: str, setting: tuple[str, ...], dim: str, word: str, cohorts: tuple[int, ...]
) -> None:
    status, out, _ = told("plan", "--noise-multiplier", noise, *setting, "--dim", dim)
    assert status == 0
    assert f"{word}: the noise of a round is" in out
    assert "raw mean" in out
    assert "coarse grid" in out
    assert all(f" {cohort} " in out for cohort in cohorts)


def test_without_a_size_nothing_is_said_of_the_whole(told: Told) -> None:
    _, out, _ = told("plan", "--noise-multiplier", "1", *SMALL)
    assert "0.5 a coordinate" in out
    assert "longer" not in out
    assert "shorter" not in out
    assert "Length" not in out
    assert out.count("->") == 1
    assert 'sampling = "schedule"' in out


def test_the_ways_are_compared_and_one_is_recommended(told: Told) -> None:
    ways = json.loads(told("plan", "--noise-multiplier", "1", *SMALL, "--dim", "9", "--json")[1])["ways"]
    names = {"sampling", "noise", "correlation", "noise_multiplier", "epsilon", "holds_against", "final_noise"}
    assert all(names < set(way) for way in ways)
    assert [(way["sampling"], way["noise"], way["correlation"], len(way["holds_against"])) for way in ways] == [
        ("coins", "central", "none", 1),
        ("schedule", "central", "none", 2),
        ("schedule", "central", "banded", 2),
        ("coins", "distributed", "none", 3),
        ("schedule", "local", "none", 3),
    ], "two clients cannot be masked, twenty can"
    assert [way["final_noise"] * 3 / (2 * 5) for way in ways] == pytest.approx([way["noise_share"] for way in ways])
    assert sum(way["recommended"] for way in ways) == 1
    assert [way["bytes_up_a_round"] is not None for way in ways] == [False, False, False, True, False]


def test_the_plan_says_what_everybody_sends_by_coins_of_their_own(told: Told) -> None:
    plan = ["plan", "--noise-multiplier", "1", *SMALL, "--dim", "24000"]
    (sent,) = (
        way["bytes_up_a_round"] for way in json.loads(told(*plan, "--json")[1])["ways"] if way["bytes_up_a_round"]
    )
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--epsilon", "3", *SMALL[:-1], "21"), "cohort is 21, of 20 clients"),
        (("--epsilon", "0", *SMALL), "epsilon is 0; it must be a finite number above 0"),
        (("--epsilon", "-1", *SMALL), "epsilon is -1; it must be"),
        (("--noise-multiplier", "0", *SMALL), "noise multiplier is 0"),
        (("--noise-multiplier", "nan", *SMALL), "noise multiplier is nan"),
        (("--noise-multiplier", "1", "--delta", "2", *SMALL[2:]), "delta is 2"),
        (("--noise-multiplier", "1", *SMALL, "--clip-norm", "0"), "clip_norm is 0"),
        (("--noise-multiplier", "1", *SMALL, "--corrupt", "0.5"), "0.5 is no share of clients"),
        (("--noise-multiplier", "1", *SMALL, "--dropout", "nan"), "nan is no share of clients"),
        (("--noise-multiplier", "1", "--epsilon", "1", *SMALL), "not allowed with"),
        (SMALL, "one of the arguments --epsilon --noise-multiplier is required"),
        (("--epsilon", "3"), "--delta"),
    ],
)
def test_bad_plans_end_with_two_and_a_sentence(told: Told, arguments: tuple[str, ...], says: str) -> None:
    status, out, err = told("plan", *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


@pytest.fixture
def ledger(tmp_path: Path, told: Told) -> Path:
    path = tmp_path / "notes.ledger"
    status, out, err = told("create", path, "--data-set", "discharge notes", "--epsilon", "8", "--delta", "1e-5")
    assert status == 0, err
    assert "discharge notes" in out
    return path


def test_a_new_ledger_is_empty_and_all_is_left(ledger: Path, told: Told) -> None:
    status, out, _ = told("show", ledger, "--json")
    facts = json.loads(out)
    assert status == 0
    assert (facts["data_set"], facts["composition"], facts["runs"]) == ("discharge notes", "basic", [])
    assert facts["limit"] == facts["left"] == {"epsilon": 8.0, "delta": 1e-5}
    assert facts["spent"] == {"epsilon": 0.0, "delta": 0.0}
    assert "no run has reserved anything" in told("show", ledger)[1]


def test_a_ledger_is_shown_with_what_runs_hold_and_made(ledger: Path, told: Told) -> None:
    kept = Ledger.open(ledger)
    for run, epsilon, charges in (("first", 3.0, (("", 2), ("", 1))), ("second", 1.5, (("a", 4), ("b", 1)))):
        kept.reserve(run, Cost(epsilon, 1e-6), data_digest="d", unit=UNIT, terms={})
        for who, releases in charges:
            kept.charge(run, who, releases, {})
    facts: dict[str, Any] = json.loads(told("show", ledger, "--json")[1])
    assert [(run["run"], run["epsilon"], run["releases"]) for run in facts["runs"]] == [
        ("first", 3.0, 3),
        ("second", 1.5, 5),
    ]
    assert facts["runs"][1]["by"] == {"a": 4, "b": 1}
    assert facts["spent"]["epsilon"] == 4.5
    assert facts["left"] == {"epsilon": 3.5, "delta": pytest.approx(8e-6)}
    kept.reserve("third", Cost(2.0, 1e-6), data_digest="d", unit=UNIT, terms={})
    kept.close("third")
    after = json.loads(told("show", ledger, "--json")[1])
    assert (after["spent"], after["left"]) == (facts["spent"], facts["left"])
    assert [bool(run["closed"]) for run in after["runs"]] == [False, False, True]
    out = told("show", ledger)[1]
    assert "given back" in out
    assert all(text in out for text in ("first", "second", "4.5", "3.5", facts["runs"][0]["time"]))


def test_units_and_what_was_declared_the_same_are_shown_and_stay_in_the_chain(ledger: Path, told: Told) -> None:
    kept = Ledger.open(ledger)
    kept.reserve("first", Cost(1.0, 1e-6), data_digest="d", unit=UNIT, terms={})
    grown = replace(UNIT, name="patient 2027", members="more rows")
    refusal = "costs of unit 'patient 2027' do not add up .*`secure-fed budget same .* patient 'patient 2027'"
    with pytest.raises(LedgerError, match=refusal):
        kept.reserve("second", Cost(1.0, 1e-6), data_digest="d", unit=grown, terms={})
    assert told("same", ledger, "patient", "patient 2027")[:2] == (
        0,
        f"{ledger}: patient and patient 2027 are one unit, as you say; costs of runs on either add up\n",
    )
    kept.reserve("second", Cost(1.0, 1e-6), data_digest="d", unit=grown, terms={})
    facts = json.loads(told("show", ledger, "--json")[1])
    assert [(unit["name"], unit["kind"], unit["neighbours"]) for unit in facts["units"]] == [
        ("patient", "group", "add-remove"),
        ("patient 2027", "group", "add-remove"),
    ]
    assert [statement["units"] for statement in facts["same"]] == [["patient", "patient 2027"]]
    assert [run["unit"] for run in facts["runs"]] == ["patient", "patient 2027"]
    assert f"declared one unit: patient and patient 2027 ({facts['same'][0]['time']})" in told("show", ledger)[1]
    assert UNIT.members not in json.dumps(facts), "a digest that was not keyed would confirm guesses"


def test_heads_are_in_the_users_folder_for_state_unless_another_place_is_chosen(
    ledger: Path, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("patient", "patient"), "as the same unit already"),
        (
            ("pateint", "doctor"),
            "knows neither unit 'pateint' nor 'doctor': name at least one of its units: 'patient'",
        ),
        (("patient", ""), "a unit cannot be called ''"),
        (("patient", "a\nb"), "printable"),
        (("patient",), "required: NAME"),
    ],
)
def test_a_statement_about_no_unit_is_refused_and_not_written(
    ledger: Path, told: Told, names: tuple[str, ...], says: str
) -> None:
    kept = Ledger.open(ledger)
    kept.reserve("first", Cost(1.0, 1e-6), data_digest="d", unit=UNIT, terms={})
    before = ledger.read_bytes()
    status, out, err = told("same", ledger, *names)
    assert (status, out) == (2, "")
    assert says in err
    assert ledger.read_bytes() == before


def test_a_run_that_extends_is_shown_once_with_what_it_holds_now(ledger: Path, told: Told) -> None:
    kept = Ledger.open(ledger)
    kept.reserve("only", Cost(1.0, 1e-6), data_digest="d", unit=UNIT, terms={})
    kept.extend("only", Cost(2.0, 1e-6))
    facts = json.loads(told("show", ledger, "--json")[1])
    assert [(run["run"], run["epsilon"]) for run in facts["runs"]] == [("only", 2.0)]


def test_a_ledger_without_limits_says_so(tmp_path: Path, told: Told) -> None:
    Ledger.create(tmp_path / "free", data_set="demo", epsilon=None, delta=None)
    assert "no limit" in told("show", tmp_path / "free")[1]
    assert json.loads(told("show", tmp_path / "free", "--json")[1])["left"] == {"epsilon": None, "delta": None}


def test_what_is_no_ledger_is_refused(tmp_path: Path, ledger: Path, told: Told) -> None:
    (tmp_path / "text").write_text("not a ledger", encoding="utf-8")
    for asked in (("show", tmp_path / "none"), ("show", tmp_path / "text")):
        status, out, err = told(*asked)
        assert (status, out) == (2, ""), err
        assert "Traceback" not in err
    assert not (tmp_path / "none").exists()
    assert told("create", ledger, "--data-set", "other", "--epsilon", "1", "--delta", "1e-5")[0] == 2
    assert told("create", tmp_path / "new", "--data-set", "d", "--epsilon", "-1", "--delta", "1e-5")[0] == 2
    assert json.loads(told("show", ledger, "--json")[1])["data_set"] == "discharge notes"


def test_an_edited_ledger_is_refused(ledger: Path, told: Told) -> None:
    with closing(sqlite3.connect(ledger)) as connection, connection:
        guard = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'never_updated'").fetchone()[0]
        connection.execute("DROP TRIGGER never_updated")
        changed = connection.execute("UPDATE chain SET body = replace(body, '8.0', '80.0')").rowcount
        connection.execute(guard)
    assert changed == 1
    status, out, err = told("show", ledger, "--json")
    assert (status, out) == (2, "")
    assert "row 1" in err


def test_a_ledger_by_renyi_privacy_is_made_and_shown(tmp_path: Path, told: Told) -> None:
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


LOOP = ("--unit", "example", "--examples", "2000", "--batch-size", "100", "--delta", "1e-5")


def test_a_plan_of_an_own_loop_is_that_of_dp_sgd(told: Told) -> None:
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
    assert f"{facts['epsilon']:.4g} against readers of the models" in out


def test_a_plan_says_which_options_its_unit_takes(told: Told) -> None:
    for given, says in (
        (
            (*LOOP, "--epochs", "3", "--rounds", "5"),
            "--rounds is 5, and has no effect with --unit example; leave it out",
        ),
        ((*LOOP[:4], *LOOP[6:], "--epochs", "3"), "--batch-size is not given, and a plan with --unit example needs it"),
        ((*SMALL, "--epochs", "3"), "--epochs is 3, and has no effect with --unit client"),
        ((*SMALL, "--pooling", "mean"), "--pooling is mean, and has no effect without --model; give both"),
        ((*SMALL, "--task", "causal_lm"), "--task is causal_lm, and has no effect without --model; give both"),
        (SMALL[:2], "--rounds is not given, and a plan with --unit client needs it"),
        ((*LOOP, "--epochs", "3", "--steps", "5"), "epochs and steps are (3, 5); give one of them"),
    ):
        status, out, err = told("plan", "--epsilon", "8", *given)
        assert (status, out) == (2, "")
        assert says in err
