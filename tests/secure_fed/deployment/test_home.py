"""The folders of a deployment: private, read strictly, and either complete or absent."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from protocols.keys import Identity
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.deployment import home
from secure_fed.deployment.charter import LONGEST_NAME, Charter, Member, fingerprint
from secure_fed.deployment.home import Home, HomeError
from secure_fed.errors import DataError

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


def test_a_replaced_key_is_new_and_the_old_one_stays(node: Path) -> None:
    old = Home.load(node).identity.public
    replaced = home.replace_key(node)
    assert replaced.identity.public != old
    assert home.read_card(node / home.CARD).identity == replaced.identity.public
    assert len(list(node.glob(f"{home.IDENTITY}.*"))) == 1


def test_no_instant_of_a_replacement_is_without_a_key(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Home.load(node).identity.public

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(home, "write_key", killed)
    with pytest.raises(KeyboardInterrupt):
        home.replace_key(node)
    assert Home.load(node).identity.public == old


def test_a_key_that_was_put_aside_is_not_overwritten(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home.time, "strftime", lambda *_: "now")
    first = (node / home.IDENTITY).read_text()
    second = home.replace_key(node).identity.public
    with pytest.raises(HomeError, match="wait a second"):
        home.replace_key(node)
    assert (node / f"{home.IDENTITY}.now").read_text() == first
    assert Home.load(node).identity.public == second


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
