"""Settings that a federation on many machines cannot have are refused, by name, when it is founded."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy.errors import LedgerError
from privacy.ledger import Ledger
from protocols.keys import Identity
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.deployment import home
from secure_fed.deployment.charter import MEMBERS, Charter, Member, fingerprint
from secure_fed.deployment.coordinator import agreed, found, notes
from secure_fed.deployment.policy import Policy
from secure_fed.errors import ConfigError
from tests.golden import refused
from tests.secure_fed.deployment.parties import rows_of, written

CARDS = [Member(f"clinic {number}", bytes([number] * 32)) for number in range(4)]
USUAL: dict[str, dict[str, Any]] = {"data": {"train": "own.csv", "test": "test.csv"}}


def test_the_paths_of_files_stay_out_of_a_charter() -> None:
    terms = agreed(RunConfig.from_dict(USUAL), CARDS)
    assert (terms.data.train, terms.data.test, terms.privacy.ledger) == (MEMBERS, "", "")


def test_a_named_budget_stays_on_the_coordinators_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared ledger, and the names in it, are in coordinator.toml, and the coordinator's run has them, wherever it starts."""
    own = {"ledger": "budget.sqlite", "data_set": "patients", "unit_name": "hospital", "ledger_heads": "heads.sqlite"}
    (tmp_path / "founded here").mkdir()
    monkeypatch.chdir(tmp_path / "founded here")
    private = {"privacy": {"unit": "client", "epsilon": 8.0, "noise": "local", "even_if_hopeless": True, **own}}
    test = written(tmp_path / "test.jsonl", rows_of(40, 5, "test"))
    config = RunConfig.from_dict({"data": {"train": "own.csv", "test": str(test)}, **private})
    home.new_folder(tmp_path / "coordinator", "coordinator init")
    home.write_key(tmp_path / "coordinator" / home.COORDINATOR_KEY)
    members = [Member(f"clinic {number}", Identity.new().public) for number in range(4)]
    with pytest.raises(LedgerError, match="there is no ledger"):
        found(tmp_path / "coordinator", config, members, "hospitals")
    Ledger.create(Path("budget.sqlite"), data_set="patients", epsilon=8.0, delta=1e-5)
    found(tmp_path / "coordinator", config, members, "hospitals")
    monkeypatch.chdir(tmp_path)
    loaded = home.CoordinatorHome.load(tmp_path / "coordinator")
    assert {getattr(loaded.charter.config.privacy, name) for name in own} == {""}
    there = loaded.configured(loaded.charter.config).privacy
    files = {name: str(tmp_path / "founded here" / own[name]) for name in ("ledger", "ledger_heads")}
    assert {name: getattr(there, name) for name in own} == {**own, **files}
    written_by_hand = replace(loaded, own=replace(loaded.own, ledger="budget.sqlite"))
    privacy = written_by_hand.configured(loaded.charter.config).privacy
    assert privacy.ledger == str(tmp_path / "coordinator" / "budget.sqlite"), "as test in coordinator.toml"


@pytest.mark.parametrize(
    "tables",
    [
        {"federation": {"sampling": "poisson"}},
        {"federation": {"vanishing": 0.1}},
        {"federation": {"clients": 5}},
        {"evaluation": {"per_client": True}},
        {"evaluation": {"canaries": "mislabelled"}},
        {"evaluation": {"diagnostics": ["drift"]}},
        {"evaluation": {"non_members": "others.csv"}},
        {"evaluation": {"patience": 2}, "method": {"name": "fedlora", "personal": ["classifier"]}},
        {"method": {"name": "fedlora", "ranks": [f"clinic {number}=2" for number in range(3)]}},
        {"privacy": {"unit": "example", "epsilon": 8.0}},
        {"federation": {"sampling": "fixed", "cohort": 2}, "privacy": {"unit": "client", "epsilon": 8.0}},
    ],
    ids=str,
)
def test_what_needs_all_data_in_one_place_is_refused(tables: dict[str, dict[str, Any]]) -> None:
    section, values = next(iter(tables.items()))
    names = list(values)
    with pytest.raises(ConfigError) as refused:
        agreed(RunConfig.from_dict(USUAL | tables), CARDS)
    assert refused.value.setting in {f"{section}.{name}" for name in names}


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"privacy": {"unit": "client", "epsilon": 8.0, "noise": "local"}},
        {
            "privacy": {"unit": "client", "epsilon": 8.0, "noise": "distributed"},
            "secure_aggregation": {"enabled": True},
        },
    ],
    ids=str,
)
def test_a_fixed_cohort_that_anybody_may_see_is_kept(tables: dict[str, dict[str, Any]]) -> None:
    fixed = {"federation": {"sampling": "fixed", "cohort": 2}}
    assert agreed(RunConfig.from_dict(USUAL | fixed | tables), CARDS).federation.sampling == "fixed"


def test_nodes_do_not_pay_for_noise_alone(tmp_path: Path) -> None:
    """Four clinics that add noise for whole clinics train nothing but noise: the charter is not written."""
    test = written(tmp_path / "test.jsonl", rows_of(40, 5, "test"))
    folder = tmp_path / "coordinator"
    home.new_folder(folder, "coordinator init")
    home.write_key(folder / home.COORDINATOR_KEY)
    members = [Member(f"clinic {number}", Identity.new().public) for number in range(4)]
    config = RunConfig.from_dict(
        {
            "data": {"train": "own.csv", "test": str(test)},
            "training": {"steps": 1},
            "privacy": {"unit": "client", "epsilon": 8.0, "noise": "local"},
        }
    )
    with pytest.raises(ConfigError) as refused:
        found(folder, config, members, "hospitals")
    assert (refused.value.setting, refused.value.exit_code) == ("privacy.even_if_hopeless", 2)
    assert sorted(path.name for path in folder.iterdir()) == [home.COORDINATOR_KEY]
    found(folder, config.replace({("privacy", "even_if_hopeless"): True}), members, "hospitals")
    assert (folder / home.CHARTER).exists()


def masked(members: int, **settings: Any) -> Charter:
    """A charter of masks alone."""
    table = {"secure_aggregation": {"enabled": True, **settings}, "federation": {"sampling": "schedule"}}
    config = RunConfig.from_dict(table).replace({("evaluation", "audit_fraction"): 0.0})
    own = tuple(Member(f"clinic {number}", Identity.new().public) for number in range(members))
    return Charter("hospitals", "run", config, ("a", "b"), ("a", "b"), "model", own, Identity.new().public)


@pytest.mark.parametrize(
    ("members", "settings", "said"),
    [
        (3, {"active": True}, ["1 may collude", "only more members can change that"]),
        (4, {"active": True}, ["1 may collude", "only more members can change that, or active = false"]),
        (4, {}, ["1 may collude", "dropout = 0.25 lets a round survive a loss", "active = true asks for it"]),
        (4, {"dropout": 0.25}, ["and 1 may vanish", "active = true asks for it"]),
        (10, {"active": True}, ["of a round's 10 members 1 may collude with the coordinator, and 1 may vanish"]),
    ],
)
def test_founding_says_what_a_small_federation_withstands(members: int, settings: Any, said: list[str]) -> None:
    found = [*notes(masked(members, **settings))]
    privacy = found.pop()
    assert "privacy = true asks for it" in privacy
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


def test_the_page_has_the_table_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", "sizes"]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") == 7
    page = Path(__file__).resolve().parents[3] / "docs" / "deployment.md"
    assert table in page.read_text(encoding="utf-8")


def test_founding_fills_the_members_of_a_policy(tmp_path: Path) -> None:
    folder, members = ready(tmp_path, 3)
    charter = found(folder, of_masks(tmp_path, dropout=0.0), members, "hospitals")
    listed = tomllib.loads((folder / home.MEMBERS_TOML).read_text())
    policy = Policy(members=tuple(listed["members"]))
    assert policy.members == tuple(map(fingerprint, charter.identities.values()))
    assert all(f"# {one.name}\n" in (folder / home.MEMBERS_TOML).read_text() for one in members)


def test_terms_under_which_no_round_can_run_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder, members = ready(tmp_path, 4)
    with refused(ConfigError, "secure_aggregation.corrupt"):
        found(folder, of_masks(tmp_path, active=True, dropout=0.25), members, "hospitals")
    with refused(ConfigError, "federation.cohort"):
        found(folder, of_masks(tmp_path), members[:2], "hospitals")
    assert [path.name for path in folder.iterdir()] == [home.COORDINATOR_KEY]


def ready(tmp: Path, count: int) -> tuple[Path, list[Member]]:
    """A coordinator's folder, and members."""
    home.new_folder(tmp / "coordinator", "coordinator init")
    home.write_key(tmp / "coordinator" / home.COORDINATOR_KEY)
    return tmp / "coordinator", [Member(f"clinic {number}", Identity.new().public) for number in range(count)]


def of_masks(tmp: Path, **settings: Any) -> RunConfig:
    test = written(tmp / "test.jsonl", rows_of(40, 5, "test"))
    masks = {"secure_aggregation": {"enabled": True, **settings}, "federation": {"sampling": "schedule"}}
    return RunConfig.from_dict({"data": {"train": "own.csv", "test": str(test)}, **masks})
