"""The folders of a deployment: a node's, and the coordinator's. Each is readable by its owner alone.

node           node.toml          data, model and policy, written by its owner
               identity.key       the private half of its identity
               card.json          for the coordinator: name, public key, declared number of units
               ledger.sqlite      the budget of its data, over all federations
               federations/       its state in each federation, and the federation's charter
               journal.jsonl      the requests that it received, and its answers
               strangers.jsonl    the same for envelopes that no coordinator named in node.toml signed
coordinator    coordinator.toml   its test data and other settings of its own
               coordinator.key    the private half of its key
               charter.json       signed: the members, and the terms of the run
               members.toml       their fingerprints, for the owners to compare and to put into their policies
               run/               the run directory
               ended.json         how the latest process that conducted the run ended: its exit status, and a sentence
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
import tomllib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from protocols.keys import Identity, Secret
from secure_fed.config import PrivacyConfig, RunConfig
from secure_fed.config.run_config import nearest
from secure_fed.config.setting import coerced, key
from secure_fed.deployment.charter import MOST_BYTES, Charter, Member, shown_name
from secure_fed.deployment.policy import Policy
from secure_fed.errors import ConfigError, UsageError, plainly
from secure_fed.learning.data.files import require_an_example
from secure_fed.runs.durable import atomic_write, owners_alone

NODE, IDENTITY, CARD, FEDERATIONS = "node.toml", "identity.key", "card.json", "federations"
LEDGER = "ledger.sqlite"
JOURNAL, STRANGERS = "journal.jsonl", "strangers.jsonl"
COORDINATOR, COORDINATOR_KEY, CHARTER = "coordinator.toml", "coordinator.key", "charter.json"
MEMBERS_TOML = "members.toml"
RUN, BEGUN = "run", "begun"  # the run directory, and the number of rounds begun
ENDED = "ended.json"
BUDGET = ("ledger", "data_set", "unit_name", "ledger_heads")  # of [privacy], and kept on the coordinator's machine
_BUDGET_FILES = ("ledger", "ledger_heads")
_FINGERPRINT = re.compile("[0-9a-f]{4}(-[0-9a-f]{4}){9}")
_MOST = 10_000_000  # bytes of a journal, before it is renamed: ".1" is appended to its name
_SENTENCE = 4000  # characters of a line in it, above the longest sentences of errors
_NAME = 100  # characters of a name in it, above the longest name of a federation or of a kind of message
Section = TypeVar("Section")


class HomeError(UsageError):
    """A folder of a deployment that is missing, damaged, or open to others."""


@dataclass(frozen=True)
class NodeSection:
    """[node] of node.toml."""

    name: str = key("", "this node's name in federations")
    train: tuple[str, ...] = key((), "the files of this node's examples; they never leave this machine")
    non_members: tuple[str, ...] = key(
        (),
        "files of rows of the same kind, on which this node never trains: how well the final model tells them from train",
    )
    model: str = key("", "a folder with the base model; needed if the model is not found under the name in the charter")
    device: str = key("cpu", "where the model computes: cpu, cuda ...")
    trust_remote_code: bool = key(False, "run the code that the base model brings along; no charter decides this")
    device_map: str = key("", "as model.device_map: auto, balanced or sequential; empty: all of the model on device")
    max_memory: tuple[str, ...] = key((), "as model.max_memory: the most of the model on each device")
    units: int = key(0, "how many examples or persons the data have, for federations that protect these", at_least=0)
    local: str = key(
        "", "FILE.py:NAME of a function of yours that trains here in place of the charter's steps; no charter names one"
    )


@dataclass(frozen=True)
class Home:
    """A node's folder, read and checked. train, non_members: its files. model: the settings of [model] on this machine.
    local: the name of the owner's function, or "".
    """

    folder: Path
    identity: Identity
    name: str
    train: tuple[Path, ...]
    policy: Policy
    model: Mapping[tuple[str, str], Any]
    units: int = 0
    local: str = ""
    non_members: tuple[Path, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Home:
        """The folder of `secure-fed node init`. HomeError, in one sentence, for any other."""
        tables = _read_toml(folder / NODE, "secure-fed node init", ("node", "policy"))
        node = _section_of(NodeSection, tables["node"], folder / NODE, "node")
        require_name(node.name, f"name in {folder / NODE}")
        train = tuple(placed(folder, one, f"train in {folder / NODE}") for one in node.train)
        if not train or (missing := [path for path in train if not path.exists()]):
            what = f"{missing[0]}, which is not there" if train else "nothing"
            raise HomeError(f"train in {folder / NODE} names {what}: name the file of this node's examples")
        non_members = tuple(placed(folder, one, f"non_members in {folder / NODE}") for one in node.non_members)
        if missing := [path for path in non_members if not path.exists()]:
            raise HomeError(f"non_members in {folder / NODE} names {missing[0]}, which is not there: correct it")
        policy = _section_of(Policy, tables["policy"], folder / NODE, "policy")
        identity = read_key(folder / IDENTITY)
        if node.model and not node.model.startswith("builtin/") and (folder / node.model).is_dir():
            node = replace(node, model=str((folder / node.model).absolute()))
        model = settings_of_model(node)
        return cls(folder, identity, node.name, train, policy, model, node.units, node.local, non_members)

    def federation(self, digest: bytes) -> Path:
        """The folder of this node's state in the federation whose charter has this digest."""
        return self.folder / FEDERATIONS / digest.hex()[:32]

    @property
    def card(self) -> str:
        """The text of card.json."""
        return json.dumps(
            {"name": self.name, "identity": self.identity.public.hex(), "units": self.units or None}, indent=1
        )


@dataclass(frozen=True)
class CoordinatorSection:
    """[coordinator] of coordinator.toml."""

    test: tuple[str, ...] = key((), "the files of the coordinator's test set")
    model: str = key("", "a folder with the base model; needed if the model is not found under the name in the charter")
    device: str = key("cpu", "where the model computes: cpu, cuda ...")
    trust_remote_code: bool = key(False, "run the code that the base model brings along; no charter decides this")
    device_map: str = key("", "as model.device_map: auto, balanced or sequential; empty: all of the model on device")
    max_memory: tuple[str, ...] = key((), "as model.max_memory: the most of the model on each device")
    ledger: str = key("", "a ledger that runs share, where clients are protected; empty: one for this run")
    data_set: str = key("", "as privacy.data_set: the name of that ledger's data set")
    unit_name: str = key("", "as privacy.unit_name: the unit's name in that ledger")
    ledger_heads: str = key("", "as privacy.ledger_heads: the file with the newest heads of ledgers")


@dataclass(frozen=True)
class CoordinatorHome:
    """The coordinator's folder, read and checked."""

    folder: Path
    identity: Identity
    charter: Charter
    own: CoordinatorSection

    @classmethod
    def load(cls, folder: Path) -> CoordinatorHome:
        """The folder after `secure-fed coordinator found`. HomeError, in one sentence, for any other."""
        tables = _read_toml(folder / COORDINATOR, "secure-fed coordinator found", ("coordinator",))
        own = _section_of(CoordinatorSection, tables["coordinator"], folder / COORDINATOR, "coordinator")
        return cls(folder, read_key(folder / COORDINATOR_KEY), read_charter(folder / CHARTER), own)

    @property
    def test(self) -> tuple[Path, ...]:
        return tuple(placed(self.folder, one, f"test in {self.folder / COORDINATOR}") for one in self.own.test)

    def configured(self, config: RunConfig) -> RunConfig:
        """The charter's settings with this machine's own. Files with relative paths are in the coordinator's folder."""
        values = budget_of(self.own, self.folder, str(self.folder / COORDINATOR))
        budget = {("privacy", name): value for name, value in values.items() if value}
        return config.replace(settings_of_model(self.own) | budget)


def settings_of_model(own: NodeSection | CoordinatorSection) -> dict[tuple[str, str], Any]:
    """The settings of [model] on one machine, whose own file may name a folder; without one the charter's name stays."""
    place = {("model", "name"): own.model, ("model", "revision"): ""} if own.model else {}
    names = ("device", "trust_remote_code", "device_map", "max_memory")
    return place | {("model", name): getattr(own, name) for name in names}


def budget_of(own: CoordinatorSection | PrivacyConfig, folder: Path, where: str) -> dict[str, str]:
    """The settings of BUDGET, with absolute paths: a relative one is in this folder. where: how errors name their place."""
    values: dict[str, str] = {name: getattr(own, name) for name in BUDGET}
    files = {name: str(placed(folder, values[name], f"{name} in {where}")) for name in _BUDGET_FILES if values[name]}
    return values | files


def new_node(folder: Path, *, name: str, train: Sequence[str], coordinator: str, units: int = 0) -> Home:
    """Make a node's folder, with a new identity, the default policy for this coordinator, and its card."""
    if missing := [one for one in train if not Path(one).exists()]:
        raise HomeError(f"{missing[0]} is not there: name the file of this node's examples with --train")
    if not _FINGERPRINT.fullmatch(coordinator):
        raise HomeError(f"{coordinator!r:.80} is not a fingerprint: `secure-fed coordinator init` prints one")
    if units < 0:
        raise HomeError(f"--units is {units}: give a number of at least 0")
    require_name(name)
    for one in train:
        require_an_example(Path(one), "--train")
    new_folder(folder, "secure-fed node init")
    write_key(folder / IDENTITY)
    node, policy = NodeSection(name, tuple(train), units=units), Policy(coordinators=(coordinator,))
    atomic_write(folder / NODE, _node_toml(node, policy), private=True)
    home = Home.load(folder)
    write_card(home)
    return home


def require_name(name: str, setting: str = "--name") -> None:
    """HomeError for a name that people cannot compare on a screen."""
    try:
        shown_name(name)
    except ValueError as error:
        raise HomeError(f"{error}: give {setting} anew") from error


def write_card(home: Home) -> Path:
    """Write card.json anew."""
    atomic_write(home.folder / CARD, home.card + "\n")
    return home.folder / CARD


def replace_key(folder: Path) -> Home:
    """Give a node a new identity. The old key is kept, renamed with the time of its replacement.

    The node has a complete key at every instant, and no earlier key is overwritten.
    """
    old = folder / IDENTITY
    Home.load(folder)  # raises before anything changes
    aside = old.with_name(f"{IDENTITY}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    with plainly(HomeError, f"{aside} cannot be made", "wait a second, or make the folder writable"):
        os.link(old, aside)
    write_key(old)
    home = Home.load(folder)
    write_card(home)
    return home


def _node_toml(node: NodeSection, policy: Policy) -> str:
    lines = ["# A node of secure-fed. Its policy is what this node lets others ask of it."]
    for title, section in (("node", node), ("policy", policy)):
        lines += ["", f"[{title}]"]
        for one in fields(section):
            lines += [f"# {one.metadata['doc']}", f"{one.name} = {json.dumps(getattr(section, one.name))}"]
    return "\n".join(lines) + "\n"


def read_card(path: Path) -> Member:
    """The member that a card describes."""
    with plainly(HomeError, f"{path} cannot be read", "give the card.json of `secure-fed node init`"):
        content = path.read_text(encoding="utf-8")
    try:
        found = json.loads(content)
        units = found["units"]
        if set(found) != {"name", "identity", "units"}:
            raise ValueError("it has other fields than name, identity and units")
        if units is not None and (type(units) is not int or units < 1):
            raise ValueError(f"units is {units!r}")
        identity = bytes.fromhex(found["identity"])
        if len(identity) != 32:
            raise ValueError("its identity is no public key of 32 bytes")
        return Member(shown_name(found["name"]), identity, units)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise HomeError(
            f"{path} is no card of a node: {error}; give the card.json of `secure-fed node init`"
        ) from error


def read_charter(path: Path) -> Charter:
    """The signed charter in a file."""
    unread = plainly(HomeError, f"{path} cannot be read", "give the charter.json of `secure-fed coordinator found`")
    with unread, open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    return Charter.verified(content)


def new_folder(folder: Path, command: str) -> None:
    """Make a private folder; it must be new or empty."""
    with plainly(HomeError, f"{folder} cannot be made", f"give `{command}` another folder"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise HomeError(f"{folder} is not empty: give `{command}` a new folder")
        folder.chmod(0o700)


def write_key(path: Path) -> Identity:
    """A new key from the operating system's entropy, in a file that only its owner can read."""
    identity = Identity.new()
    atomic_write(path, identity.private.reveal().hex() + "\n", private=True)
    return identity


def read_key(path: Path) -> Identity:
    """The private key in a file that nobody else can read."""
    with plainly(HomeError, f"the key {path} cannot be read", "restore it, or make a new folder"):
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(opened) as file:
            mode = stat.S_IMODE(os.fstat(opened).st_mode)
            text = file.read(100).strip()
    if mode & 0o077:
        raise HomeError(f"the key {path} has mode {mode:o}, so that others can read it: `chmod 600` it, or replace it")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise HomeError(f"the key {path} is damaged: restore it, or make a new folder")
    return Identity.from_secret(Secret(key))


def require_apart(paths: Iterable[Path], group: int) -> None:
    """HomeError if one of these files or folders can be read by the users of this group, or by all users.

    A file is read by whom its mode admits, if the modes of all folders above let him in. (Access lists are not looked at.)
    """
    for path in paths:
        with plainly(HomeError, f"{path} cannot be read", "restore it"):
            first, *above = (one.stat() for one in (path.resolve(), *path.resolve().parents))
        reads = 5 if stat.S_ISDIR(first.st_mode) else 4  # who may enter a folder reads the files whose names he knows
        if _bits(first, group) & reads and all(_bits(one, group) & 1 for one in above):
            error = f"{path} can be read by the group {group} or by all users, and the SuperNode, which runs the code that its "
            error += "SuperLink sends, is one of them: `chmod go-rwx` it, or a folder above"
            raise HomeError(error).about("--group", group, "a group that cannot read the node's folder and data")


def _bits(found: os.stat_result, group: int) -> int:
    """The permissions (4: read, 2: write, 1: enter) of a user of this group who does not own the file."""
    return (found.st_mode >> 3 if found.st_gid == group else found.st_mode) & 7


def placed(folder: Path, path: str, setting: str) -> Path:
    """The absolute path that is meant: a relative one is in this folder, and ~ is the user's. HomeError for no user's ~."""
    with plainly(HomeError, f"{setting} = {path!r:.200} names no place on this machine", f"correct {setting}"):
        return (folder / Path(path).expanduser()).absolute()


def _read_toml(path: Path, command: str, sections: Sequence[str]) -> dict[str, Any]:
    """The tables of a file of these sections; a missing one is empty. command: it has made the file's folder."""
    with plainly(HomeError, f"{path} cannot be read", f"give a folder that `{command}` has made"):
        content = path.read_bytes()
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise HomeError(f"{path} is not valid TOML: {error}") from error
    _require_known(tables, sections, path)
    return {section: {} for section in sections} | tables


def _require_known(found: Iterable[str], known: Iterable[str], place: Path, section: str = "") -> None:
    for name in found:
        if name not in (words := list(known)):
            raise HomeError(f"{place} has the unknown name {section}{name!r}: {nearest(name, words)}")


def _section_of(kind: type[Section], table: Any, place: Path, section: str) -> Section:
    """A section's values, each checked against its declared type."""
    if not isinstance(table, Mapping):
        raise HomeError(f"{place} has {section} = {table!r:.40}: write a section [{section}]")
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    _require_known(table, known, place, f"in [{section}] ")
    try:
        return kind(**{name: coerced(f"{section}.{name}", known[name], value) for name, value in table.items()})
    except ConfigError as error:
        raise HomeError(f"{place}: {error}") from error


@dataclass(frozen=True)
class Journal:
    """A node's journal for its owner: a line for every request that the node answers or refuses, with the outcome.

    It contains no contribution and no key.

    Anybody on the network can send a node as many envelopes as he likes. Those that no coordinator named by the owner signed
    have a file of their own, so that they cannot push the lines about a federation out of the journal.
    """

    folder: Path

    def note(self, asked: str, federation: str, sentence: str, *, refused: bool, known: bool = True) -> None:
        """Add a line, of bounded length whatever was asked. Failure to write the journal stops nothing.

        known: a coordinator that the owner named has signed the envelope.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        names = {"federation": federation[:_NAME], "asked": asked[:_NAME]}
        line = {"time": now, **names, "refused": refused, "what": sentence[:_SENTENCE]}
        path = self.folder / (JOURNAL if known else STRANGERS)
        with suppress(OSError):
            if path.exists() and path.stat().st_size > _MOST:
                os.replace(path, path.with_name(f"{path.name}.1"))
            with open(path, "a", encoding="utf-8", opener=owners_alone) as file:
                file.write(json.dumps(line) + "\n")

    def last(self, count: int, *, refused: bool = False, known: bool = True) -> list[dict[str, Any]]:
        """The newest lines, the oldest of them first; only refusals if `refused`. known: as in `note`."""
        name = JOURNAL if known else STRANGERS
        kept: deque[dict[str, Any]] = deque(maxlen=count)
        for path in (self.folder / f"{name}.1", self.folder / name):
            with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                for text in file:
                    with suppress(ValueError):
                        line = json.loads(text)
                        if isinstance(line, dict) and (line.get("refused") or not refused):
                            kept.append(line)
        return list(kept)
