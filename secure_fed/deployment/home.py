"""The folders of a deployment: a node's, and the coordinator's. Each is readable by its owner alone.

node           node.toml          data, model and policy, written by its owner
               identity.key       the private half of its identity
               card.json          what the coordinator needs of it: name, public key, declared number of units
               federations/       what it remembers of each, and its ledger
               journal.jsonl      what it was asked, and answered
coordinator    coordinator.toml   its test data, and what else is its own
               coordinator.key    the private half of its key
               charter.json       signed: who takes part, and in what
               run/               the run directory
"""

from __future__ import annotations

import difflib
import json
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from protocols.keys import Identity, Secret
from secure_fed.config import RunConfig
from secure_fed.deployment.charter import MOST_BYTES, Charter, Member
from secure_fed.deployment.policy import Policy
from secure_fed.errors import UsageError, plainly
from secure_fed.runs.durable import atomic_write

NODE, IDENTITY, CARD, FEDERATIONS = "node.toml", "identity.key", "card.json", "federations"
COORDINATOR, COORDINATOR_KEY, CHARTER = "coordinator.toml", "coordinator.key", "charter.json"
Section = TypeVar("Section")


class HomeError(UsageError):
    """A folder of a deployment that is missing, damaged, or open to others."""


@dataclass(frozen=True)
class NodeSection:
    """[node] of node.toml. units: the number of examples, or of persons, that the card declares; 0 for none."""

    name: str = ""
    train: str | list[str] = ""
    model: str = ""
    device: str = "cpu"
    units: int = 0


@dataclass(frozen=True)
class Home:
    """A node's folder, read and checked. train: its files. model: folder of the base model, "" for the charter's name of it."""

    folder: Path
    identity: Identity
    name: str
    train: tuple[Path, ...]
    policy: Policy
    model: str = ""
    device: str = "cpu"
    units: int = 0

    @classmethod
    def load(cls, folder: Path) -> Home:
        """The folder of `secure-fed node init`. HomeError, in one sentence, for any other."""
        tables = _toml(folder / NODE, "secure-fed node init")
        _known(tables, ("node", "policy"), folder / NODE)
        node = _section(NodeSection, tables.get("node", {}), folder / NODE, "node")
        named = [node.train] if isinstance(node.train, str) else node.train
        train = tuple((folder / Path(one).expanduser()).absolute() for one in named if one)
        if not train or (missing := [path for path in train if not path.exists()]):
            what = f"{missing[0]}, which is not there" if train else "nothing"
            raise HomeError(f"train in {folder / NODE} names {what}: name the file of this node's examples")
        policy = _section(Policy, tables.get("policy", {}), folder / NODE, "policy")
        identity = _key(folder / IDENTITY)
        model = node.model
        if model and not model.startswith("builtin/") and (folder / model).is_dir():
            model = str((folder / model).absolute())
        return cls(folder, identity, node.name, train, policy, model, node.device, node.units)

    def federation(self, digest: bytes) -> Path:
        """What this node remembers of the federation whose charter has this digest."""
        return self.folder / FEDERATIONS / digest.hex()[:32]

    @property
    def card(self) -> str:
        """The text of card.json."""
        return json.dumps(
            {"name": self.name, "identity": self.identity.public.hex(), "units": self.units or None}, indent=1
        )


@dataclass(frozen=True)
class CoordinatorSection:
    """[coordinator] of coordinator.toml. ledger: of the client unit, shared with other runs; empty: one for this run."""

    test: str | list[str] = ""
    model: str = ""
    device: str = "cpu"
    ledger: str = ""


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
        tables = _toml(folder / COORDINATOR, "secure-fed coordinator found")
        _known(tables, ("coordinator",), folder / COORDINATOR)
        own = _section(CoordinatorSection, tables.get("coordinator", {}), folder / COORDINATOR, "coordinator")
        identity = _key(folder / COORDINATOR_KEY)
        unread = plainly(HomeError, f"{folder / CHARTER} cannot be read", "found the federation first")
        with unread, open(folder / CHARTER, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        return cls(folder, identity, Charter.verified(content), own)

    @property
    def test(self) -> tuple[Path, ...]:
        named = [self.own.test] if isinstance(self.own.test, str) else self.own.test
        return tuple((self.folder / Path(one).expanduser()).absolute() for one in named if one)

    def configured(self, config: RunConfig) -> RunConfig:
        """The charter's settings with what is this machine's to say."""
        model = {("model", "name"): self.own.model} if self.own.model else {}
        ledger = {("privacy", "ledger"): self.own.ledger} if self.own.ledger else {}
        return config.replace({**model, **ledger, ("model", "device"): self.own.device})


def read_card(path: Path) -> Member:
    """The member that a card describes."""
    with plainly(HomeError, f"{path} cannot be read", "give the card.json of `secure-fed node init`"):
        content = path.read_text(encoding="utf-8")
    try:
        found = json.loads(content)
        units = found["units"]
        if set(found) != {"name", "identity", "units"} or not isinstance(found["name"], str) or not found["name"]:
            raise ValueError("it has other fields than name, identity and units")
        if units is not None and (type(units) is not int or units < 1):
            raise ValueError(f"units is {units!r}")
        identity = bytes.fromhex(found["identity"])
        if len(identity) != 32:
            raise ValueError("its identity is no public key of 32 bytes")
        return Member(found["name"], identity, units)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise HomeError(
            f"{path} is no card of a node: {error}; give the card.json of `secure-fed node init`"
        ) from error


def made(folder: Path, command: str) -> None:
    """Make a private folder that is new or empty."""
    with plainly(HomeError, f"{folder} cannot be made", f"give `{command}` another folder"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise HomeError(f"{folder} is not empty: give `{command}` a new folder")
        folder.chmod(0o700)


def write_key(path: Path) -> Identity:
    """A new key of the operating system's entropy, in a file that only its owner can read."""
    identity = Identity.new()
    atomic_write(path, identity.private.reveal().hex() + "\n", private=True)
    return identity


def load_coordinator_key(folder: Path) -> Identity:
    """The key of the coordinator whose folder this is."""
    return _key(folder / COORDINATOR_KEY)


def _key(path: Path) -> Identity:
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


def _toml(path: Path, command: str) -> dict[str, Any]:
    with plainly(HomeError, f"{path} cannot be read", f"give a folder that `{command}` has made"):
        content = path.read_bytes()
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise HomeError(f"{path} is not valid TOML: {error}") from error


def _known(found: Iterable[str], known: Iterable[str], place: Path, section: str = "") -> None:
    words = list(known)
    for name in found:
        if name not in words:
            near = difflib.get_close_matches(name, words, n=1, cutoff=0.4)
            meant = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(words)}"
            raise HomeError(f"{place} has {section}{name!r}, which there is not: {meant}")


def _section(kind: type[Section], table: Any, place: Path, section: str) -> Section:
    """A section's values, each of the type of its default."""
    if not isinstance(table, Mapping):
        raise HomeError(f"{place} has {section} = {table!r:.40}: write a section [{section}]")
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    _known(table, known, place, f"in [{section}] ")
    usual = kind()
    for name, value in table.items():
        default = getattr(usual, name)
        several = (str, list) if known[name].type == "str | list[str]" else (type(default),)
        kinds = (int, float) if type(default) is float else several
        if type(value) not in kinds or (isinstance(value, list) and not all(type(one) is str for one in value)):
            raise HomeError(f"{place} has {section}.{name} = {value!r:.40}, where a value such as {default!r} belongs")
    return kind(**table)
