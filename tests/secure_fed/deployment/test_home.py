"""The folders of a deployment: private, read strictly, and complete or absent. Founding refuses impossible settings by name."""

from __future__ import annotations

import json
import stat
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from privacy.errors import LedgerError
from privacy.ledger import Ledger
from protocols.keys import Identity
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.deployment import coordinator, home
from secure_fed.deployment.charter import LONGEST_NAME, MEMBERS, Charter, Member, fingerprint
from secure_fed.deployment.coordinator import agreed, found, notes
from secure_fed.deployment.home import Home, HomeError
from secure_fed.deployment.policy import Policy
from secure_fed.errors import ConfigError, DataError
from secure_fed.runs.hopeless import Probe
from tests.golden import refused
from tests.secure_fed.deployment.parties import rows_of, written

OF_COORDINATOR = fingerprint(Identity.new().public)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    train = tmp_path / "own.jsonl"
    train.write_text('{"text": "a", "label": "b"}\n')
    folder = tmp_path / "clinic"
    home.new_node(folder, name="clinic", train=[str(train)], coordinator=OF_COORDINATOR, units=1)
    return folder


def test_a_new_node_is_whole_and_private(node: Path) -> None:
    made = Home.load(node)
    assert (made.name, made.units, made.policy.coordinators) == ("clinic", 1, (OF_COORDINATOR,))
    card = home.read_card(node / home.CARD)
    assert (card.name, card.identity, card.examples) == ("clinic", made.identity.public, 1)
    assert stat.S_IMODE(node.stat().st_mode) == 0o700
    assert {name: stat.S_IMODE((node / name).stat().st_mode) for name in (home.IDENTITY, home.NODE)} == {
        home.IDENTITY: 0o600,
        home.NODE: 0o600,
    }
    assert made.identity.private.reveal().hex() not in (node / home.CARD).read_text()


def text_in(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(node: Path) -> None:
        text = (node / name).read_text()
        assert old in text
        (node / name).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda node: (node / home.IDENTITY).chmod(0o640), "mode 640, so that others can read it"),
        (lambda node: (node / home.IDENTITY).write_text("abc"), "is damaged"),
        (lambda node: (node / home.IDENTITY).unlink(), "cannot be read"),
        (lambda node: (node / home.NODE).unlink(), "cannot be read"),
        (lambda node: (node / home.NODE).write_text("name ="), "is not valid TOML"),
        (lambda node: (node.parent / "own.jsonl").unlink(), "which is not there"),
        (text_in(home.NODE, "most_epsilon", "most_epsilom"), "did you mean 'most_epsilon'"),
        (text_in(home.NODE, "[policy]", "[polity]"), "did you mean 'policy'"),
        (
            text_in(home.NODE, "privacy = true", 'privacy = "yes"'),
            "policy.privacy is 'yes', but it must be true or false",
        ),
        (text_in(home.NODE, "most_epsilon = 8.0", "most_epsilon = 0"), "must be above 0.0"),
        (text_in(home.NODE, "units = 1", "units = -1"), "must be at least 0"),
        (text_in(home.NODE, 'name = "clinic"', 'name = "a\\nb"'), r"is no name .*: give name in .*node\.toml anew"),
    ],
    ids=range(12),
)
def test_a_damaged_folder_is_one_sentence(node: Path, change: Callable[[Path], object], sentence: str) -> None:
    change(node)
    with pytest.raises(HomeError, match=sentence):
        Home.load(node)


def test_a_folder_that_holds_something_is_left_alone(node: Path) -> None:
    before = (node / home.IDENTITY).read_bytes()
    with pytest.raises(HomeError, match="is not empty"):
        home.new_node(node, name="x", train=[str(node.parent / "own.jsonl")], coordinator=OF_COORDINATOR)
    assert (node / home.IDENTITY).read_bytes() == before


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"train": ["nowhere.csv"]}, "is not there"),
        ({"coordinator": "abcd"}, "is not a fingerprint"),
        ({"name": " "}, "is no name"),
        ({"name": "a\nb"}, "is no name of one printable line"),
        ({"name": "a" * (LONGEST_NAME + 1)}, f"of 1 to {LONGEST_NAME} characters"),
        ({"name": "a  b"}, "with single spaces between words: give --name anew"),
    ],
)
def test_a_node_is_not_made_of_nonsense(tmp_path: Path, own: dict[str, object], sentence: str) -> None:
    usual = {"name": "x", "train": [str(tmp_path)], "coordinator": OF_COORDINATOR}
    with pytest.raises(HomeError, match=sentence):
        home.new_node(tmp_path / "new", **(usual | own))  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["own.jsonl", "own.csv", "own.jsonl.gz", "own.parquet", "train.csv"])
def test_a_node_is_not_made_of_data_without_an_example(tmp_path: Path, name: str) -> None:
    """Five cases: only blank lines, only a header, no bytes, no rows, and a folder whose only file has only a header."""
    file = tmp_path / name
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), file)
    else:
        file.write_bytes({".csv": b"text,label\n\n", ".jsonl": b"\n \n", ".gz": b""}[file.suffix])
    train = tmp_path if name == "train.csv" else file
    with pytest.raises(DataError, match=r"is empty: it holds no example; give --train a file with at least one"):
        home.new_node(tmp_path / "new", name="x", train=[str(train)], coordinator=OF_COORDINATOR)
    assert not (tmp_path / "new").exists()


def test_a_replaced_key_is_new_and_no_old_one_is_overwritten(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home.time, "strftime", lambda *_: "now")
    first, old = (node / home.IDENTITY).read_text(), Home.load(node).identity.public
    second = home.replace_key(node).identity.public
    assert second != old
    assert home.read_card(node / home.CARD).identity == second
    with pytest.raises(HomeError, match="wait a second"):
        home.replace_key(node)
    assert (node / f"{home.IDENTITY}.now").read_text() == first
    assert Home.load(node).identity.public == second


def test_no_instant_of_a_replacement_is_without_a_key(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Home.load(node).identity.public

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(home, "write_key", killed)
    with pytest.raises(KeyboardInterrupt):
        home.replace_key(node)
    assert Home.load(node).identity.public == old


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"name": "a"}',
        '{"name": "a", "identity": "00", "units": null}',
        '{"name": 1, "identity": "", "units": 0}',
        json.dumps({"name": "evil\x1b[8m", "identity": "ab" * 32, "units": None}),
        json.dumps({"name": f"clinic {fingerprint(bytes(32))}", "identity": "ab" * 32, "units": None}),
    ],
)
def test_a_damaged_card_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(HomeError, match="no card of a node"):
        home.read_card(tmp_path / "card.json")


def test_the_commands_say_what_they_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = tmp_path / "own.csv"
    train.write_text("text,label\na,b\n")
    assert main(["coordinator", "init", str(tmp_path / "coord")]) == 0
    printed = capsys.readouterr().out.strip()
    assert main(["node", "init", str(tmp_path / "n"), "--train", str(train), "--coordinator", printed]) == 0
    assert main(["node", "status", str(tmp_path / "n"), "--json"]) == 1
    status = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status["name"], status["running"], status["spent"]) == ("n", False, None)
    assert main(["node", "run", str(tmp_path / "n"), "--superlink", "nowhere"]) == 2
    assert "give HOST:PORT" in capsys.readouterr().err
    assert main(["coordinator", "init", str(tmp_path / "coord")]) == 2


def test_what_a_member_is_called_cannot_pass_for_another_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.new_folder(tmp_path / "coord", "coordinator init")
    key = home.write_key(tmp_path / "coord" / home.COORDINATOR_KEY)
    members = Member("coordinator", Identity.new().public), Member("clinic 9 units", Identity.new().public, 4)
    config = RunConfig().replace({("evaluation", "audit_fraction"): 0.0})
    charter = Charter("hospitals", "run", config, ("a", "b"), ("a", "b"), "model", members, key.public)
    (tmp_path / "coord" / home.CHARTER).write_bytes(charter.signed(key))
    (tmp_path / "coord" / home.COORDINATOR).write_text("[coordinator]\n")
    assert main(["coordinator", "show", str(tmp_path / "coord")]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"coordinator  {fingerprint(key.public)}",
        f"member       {fingerprint(members[0].identity)}  coordinator",
        f"member       {fingerprint(members[1].identity)}  4 units  clinic 9 units",
    ]


# Founding.

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
    config = RunConfig.from_dict({"data": {"train": "own.csv", "test": rows_for_tests(tmp_path)}, **private})
    folder, members = ready(tmp_path, 4)
    with pytest.raises(LedgerError, match="there is no ledger"):
        found(folder, config, members, "hospitals")
    Ledger.create(Path("budget.sqlite"), data_set="patients", epsilon=8.0, delta=1e-5)
    found(folder, config, members, "hospitals")
    monkeypatch.chdir(tmp_path)
    loaded = home.CoordinatorHome.load(folder)
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


def test_nodes_do_not_pay_for_noise_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe finds that four clinics that add noise for whole clinics train nothing but noise: the charter is not written."""
    monkeypatch.setattr(coordinator, "probe", lambda assembly: Probe("client", 40, True, 1.0, 0.1, 9.0, enough=99))
    folder, members = ready(tmp_path, 4)
    local = {"privacy": {"unit": "client", "epsilon": 8.0, "noise": "local"}, "training": {"steps": 1}}
    config = RunConfig.from_dict({"data": {"train": "own.csv", "test": rows_for_tests(tmp_path)}, **local})
    with refused(ConfigError, "privacy.even_if_hopeless"):
        found(folder, config, members, "hospitals")
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
        (4, {}, ["1 may collude", "dropout = 0.25 lets a round survive a loss", "secure_aggregation.active = false"]),
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


def test_founding_fills_the_members_of_a_policy_and_refuses_terms_under_which_no_round_can_run(tmp_path: Path) -> None:
    folder, members = ready(tmp_path, 4)
    with refused(ConfigError, "secure_aggregation.corrupt"):
        found(folder, of_masks(tmp_path, active=True, dropout=0.25), members, "hospitals")
    with refused(ConfigError, "federation.cohort"):
        found(folder, of_masks(tmp_path), members[:2], "hospitals")
    assert [path.name for path in folder.iterdir()] == [home.COORDINATOR_KEY], "before anything is written"
    charter = found(folder, of_masks(tmp_path, dropout=0.0), members[:3], "hospitals")
    text = (folder / home.MEMBERS_TOML).read_text()
    assert Policy(**tomllib.loads(text)).members == [*map(fingerprint, charter.identities.values())]
    assert all(f"# {one.name}\n" in text for one in members[:3])


def ready(tmp: Path, count: int) -> tuple[Path, list[Member]]:
    """A coordinator's folder, and members."""
    home.new_folder(tmp / "coordinator", "coordinator init")
    home.write_key(tmp / "coordinator" / home.COORDINATOR_KEY)
    return tmp / "coordinator", [Member(f"clinic {number}", Identity.new().public) for number in range(count)]


def rows_for_tests(tmp: Path) -> str:
    return str(written(tmp / "test.jsonl", rows_of(40, 5, "test")))


def of_masks(tmp: Path, **settings: Any) -> RunConfig:
    masks = {"secure_aggregation": {"enabled": True, **settings}, "federation": {"sampling": "schedule"}}
    return RunConfig.from_dict({"data": {"train": "own.csv", "test": rows_for_tests(tmp)}, **masks})
