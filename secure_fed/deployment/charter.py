"""The charter of a federation on many machines: one signed file with everything that all parties must agree on.

    {"charter": {...}, "signature": "..."}

The coordinator signs it with its Ed25519 key, and a node takes part only in federations whose coordinator its owner has named
(`policy`). So neither a carrier of the messages nor another coordinator can add a member, replace a key, lower a threshold or
change a setting. The digest of the charter names the federation in everything that the parties sign later.

A charter may come from a coordinator that lies, so every node refuses what founding refuses:

- settings with which a federation cannot run on separate machines (`faults`);
- the settings of each machine alone (`LOCAL`): paths, and names of local files. Each party keeps its own in `node.toml` or
  `coordinator.toml`. A charter that sets one could name a file on the node's machine, which the node would read or write. The
  base model's name may be a folder; the owner's policy lists the admitted names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from protocols.errors import ParameterError
from protocols.keys import Identity, registry_digest, verify
from protocols.thresholds import colluding, surviving
from secure_fed import __version__
from secure_fed.config import RunConfig
from secure_fed.errors import SecureFedError, UsageError
from secure_fed.learning.data.chats import is_template
from secure_fed.rounds.cohort import cohort_size

MOST_BYTES = 16_000_000  # some 100,000 members
SCHEMA = 1
LONGEST_NAME = 48  # below the length of a fingerprint, so that no name can contain a forged one
LONGEST_CLASS = 1000  # characters of the name of a class
MEMBERS = "the files of each member"  # data.train of a charter, which contains no path
_PURPOSE = "charter"


class CharterError(UsageError):
    """A charter that cannot be read, is not signed by the coordinator it names, or is of another version."""


@dataclass(frozen=True)
class Member:
    """A member of a federation. identity: its public key. examples: its declared number of examples or persons, if any."""

    name: str
    identity: bytes
    examples: int | None = None


@dataclass(frozen=True)
class Charter:
    """The terms of one run of a federation.

    run: a unique identifier of the run. config: its settings, without those of one machine alone (`LOCAL`).
    labels, label_names: the classes as written in the data, and their names. model_digest: of the base model before a method
    changes it. members: in the order of their numbers. coordinator: its public key.
    """

    name: str
    run: str
    config: RunConfig
    labels: tuple[int | str, ...]
    label_names: tuple[str, ...]
    model_digest: str
    members: tuple[Member, ...]
    coordinator: bytes
    version: str = __version__

    def __post_init__(self) -> None:
        for called in (self.name, *(member.name for member in self.members)):
            try:
                shown_name(called)
            except ValueError as error:
                raise CharterError(
                    f"{error}: rename the federation (--name) or the member (name in node.toml)"
                ) from error
        for called in self.label_names:
            if not called.strip() or len(called) > LONGEST_CLASS:
                raise CharterError(
                    f"{called!r:.60} has {len(called):,} characters, and the name of a class has 1 to {LONGEST_CLASS:,}: "
                    "rename it in the members' data and in data.test, or set data.label to another column"
                )
        if sets := local_fault(self.config):
            raise CharterError(f"the charter of {self.name!r} cannot be used: {sets}")
        for one in faults(self.config):
            raise CharterError(
                f"the charter of {self.name!r} cannot be used: {one.setting} = {one.value!r:.80} {one.why}; it must be "
                f"{one.limit}"
            )
        (name, count), *_ = Counter(member.name for member in self.members).most_common(1) or [("", 0)]
        if count > 1:
            raise CharterError(
                f"{count} members of the federation are called {name!r}: their owners give each another name, in node.toml "
                "and card.json"
            )
        try:
            registry_digest(self.identities, range(len(self.members)))
        except ParameterError as error:
            raise CharterError(f"the members' keys are not usable: {error.what}") from error

    @property
    def identities(self) -> dict[int, bytes]:
        """The public key of every member, by its number."""
        return {number: member.identity for number, member in enumerate(self.members)}

    @cached_property
    def digest(self) -> bytes:
        """(32,) SHA-256 of the canonical text."""
        return hashlib.sha256(self._canonical).digest()

    def number(self, identity: bytes) -> int:
        """The number of the member with this key. CharterError if there is none."""
        for number, member in enumerate(self.members):
            if member.identity == identity:
                return number
        raise CharterError(
            f"this node's identity {fingerprint(identity)} is not among the {len(self.members)} members of the federation "
            f"{self.name!r}: send its card.json to the coordinator, which founds the federation again"
        )

    def described(self) -> Iterator[str]:
        """The terms in lines for people, then all parties with their fingerprints."""
        config, members = self.config, len(self.members)
        privacy, masks, cohort = config.privacy, config.secure_aggregation, cohort_size(config, members)
        promise = "no guarantee"
        if privacy.unit != "none":
            noise = f"noise {privacy.noise}" if privacy.unit == "client" else "noise in each member's steps"
            promise = f"{privacy.unit}s protected, epsilon {privacy.epsilon} and delta {privacy.delta:g}, {noise}"
        yield f"{self.name}: {config.method.name} of {config.model.name}, {config.federation.rounds} rounds, {promise}"
        hidden = "no masks: the coordinator sees each contribution"
        if masks.enabled:
            active, corrupt = "active" if masks.active else "not active", colluding(cohort, masks.corrupt)
            least = surviving(cohort, masks.dropout)
            hidden = f"masks {active}, for at most {corrupt} colluding members; a sum has at least {least}"
        yield f"a round has {cohort} of {members} members; {hidden}"
        yield f"coordinator  {fingerprint(self.coordinator)}"
        # The name, which its owner chooses, comes last: it cannot imitate the fields before it.
        for member in self.members:
            units = "" if member.examples is None else f"{member.examples} units  "
            yield f"member       {fingerprint(member.identity)}  {units}{member.name}"

    @property
    def text(self) -> str:
        """The charter without its signature, as one JSON object."""
        return self._canonical.decode()

    def signed(self, coordinator: Identity) -> bytes:
        """The signed file. The key must be the coordinator's."""
        if coordinator.public != self.coordinator:
            raise CharterError("the charter names another coordinator than the one that signs it")
        signature = coordinator.sign(_PURPOSE, self.digest, b"")
        return json.dumps({"charter": self._fields(), "signature": signature.hex()}, indent=1).encode() + b"\n"

    @classmethod
    def verified(cls, content: bytes) -> Charter:
        """The charter in a file that is signed by the coordinator that it names. CharterError for anything else."""
        outer = _object(content)
        if set(outer) != {"charter", "signature"}:
            raise CharterError("the charter is damaged: it is not one object with its signature")
        charter = cls._of_fields(outer["charter"])
        try:
            signature = bytes.fromhex(outer["signature"])
        except (TypeError, ValueError):
            signature = b""
        if not verify(charter.coordinator, signature, _PURPOSE, charter.digest, b""):
            raise CharterError(
                f"the charter of {charter.name!r} is not signed by the coordinator {fingerprint(charter.coordinator)} that it "
                "names: somebody changed it"
            )
        return charter

    @cached_property
    def _canonical(self) -> bytes:
        return json.dumps(self._fields(), sort_keys=True, separators=(",", ":")).encode()

    def _fields(self) -> dict[str, Any]:
        members = [{"name": one.name, "identity": one.identity.hex(), "examples": one.examples} for one in self.members]
        return {
            "schema": SCHEMA,
            "name": self.name,
            "run": self.run,
            "version": self.version,
            "config": self.config.to_dict(),
            "labels": list(self.labels),
            "label_names": list(self.label_names),
            "model_digest": self.model_digest,
            "members": members,
            "coordinator": self.coordinator.hex(),
        }

    @classmethod
    def _of_fields(cls, fields: Any) -> Charter:
        if not isinstance(fields, Mapping):
            raise CharterError("the charter is damaged: it is not an object")
        if fields.get("version") != __version__ or fields.get("schema") != SCHEMA:
            raise CharterError(
                f"the charter is of secure-fed {fields.get('version')!s:.40}, and this is {__version__}: all parties of a "
                "federation run one version"
            )
        if set(fields) != {"schema", *(one.name for one in dataclasses.fields(cls))}:
            raise CharterError("the charter is damaged: its fields are not those of this version")
        try:
            return cls(
                name=_text(fields["name"]),
                run=_text(fields["run"]),
                version=_text(fields["version"]),
                config=RunConfig.from_dict(fields["config"]),
                labels=tuple(_label(value) for value in _list(fields["labels"])),
                label_names=tuple(_text(name) for name in _list(fields["label_names"])),
                model_digest=_text(fields["model_digest"]),
                members=tuple(map(_member, _list(fields["members"]))),
                coordinator=_key(fields["coordinator"]),
            )
        except SecureFedError as error:
            raise CharterError(f"the charter cannot be used: {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise CharterError(f"the charter is damaged: {error}") from error


def fingerprint(public: bytes) -> str:
    """A public key for comparison by people: the first 20 bytes of its SHA-256, in groups of four hexadecimal digits."""
    text = hashlib.sha256(b"secure-fed identity" + public).hexdigest()[:40]
    return "-".join(text[at : at + 4] for at in range(0, 40, 4))


def _object(content: bytes) -> dict[str, Any]:
    if len(content) > MOST_BYTES:
        raise CharterError(f"the charter has {len(content):,} bytes, above {MOST_BYTES:,}")
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise CharterError(f"the charter is damaged: {error}") from error
    if not isinstance(found, dict):
        raise CharterError("the charter is damaged: it is not an object")
    return found


def _member(fields: Any) -> Member:
    if not isinstance(fields, dict) or set(fields) != {"name", "identity", "examples"}:
        raise ValueError("a member is not a name, an identity and a number of examples")
    count = fields["examples"]
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(f"a member has {count!r:.40} examples")
    return Member(_text(fields["name"]), _key(fields["identity"]), count)


def shown_name(value: Any) -> str:
    """A name that people read beside a fingerprint. ValueError if it could be mistaken for other lines or another name."""
    fits = isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()
    if not fits or value != " ".join(value.split()):
        raise ValueError(
            f"{value!r:.60} is no name of one printable line of 1 to {LONGEST_NAME} characters with single spaces between words"
        )
    return str(value)


def _text(value: Any) -> str:
    """A text of the charter. Like `_label`, `_list` and `_key` it raises ValueError for anything else."""
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_CLASS:
        raise ValueError(f"{value!r:.40} is no name")
    return value


def _label(value: Any) -> int | str:
    if type(value) not in (int, str):
        raise ValueError(f"{value!r:.40} is no label")
    return value  # type: ignore[no-any-return]


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is no list")
    return value


def _key(value: Any) -> bytes:
    key = bytes.fromhex(value)
    if len(key) != 32:
        raise ValueError(f"a public key has 32 bytes, and this one {len(key)}")
    return key


_ADMITTED: dict[str, tuple[tuple[object, ...], str]] = {
    "federation.sampling": (
        ("schedule", "fixed", "auto"),
        "draws clients in secret, and whoever runs or watches the machines sees the draw",
    ),
    "federation.vanishing": ((0.0,), "makes clients of a simulation vanish"),
    "evaluation.per_client": ((False,), "needs the members' examples in one place"),
    "evaluation.non_members": (("",), "is each node's own: its owner sets non_members in node.toml"),
    "evaluation.canaries": (("none",), "needs the members' examples in one place"),
    "evaluation.diagnostics": (((), ("variation",)), "needs the members' tensors in one place"),
    "method.ranks_column": (("",), "is a column of files that only members have: use method.ranks"),
    "evaluation.audit_fraction": ((0.0,), "needs the members' examples in one place"),
    "privacy.on_exhausted": (
        ("refuse",),
        "plans fewer rounds than federation.rounds, and a member pays for the planned ones",
    ),
}

# Beside method.personal: the coordinator has no whole model.
_PERSONAL: dict[str, tuple[tuple[object, ...], str]] = {
    f"evaluation.{name}": ((None,), "measures a whole model, which with method.personal only nodes have")
    for name in ("patience", "target_accuracy")
}


class Fault(NamedTuple):
    """A setting with a value that is not admitted, the admitted values in words, and the reason."""

    setting: str
    value: Any
    limit: str
    why: str


def faults(config: RunConfig) -> Iterator[Fault]:
    """The settings with which a federation cannot run on separate machines."""
    for setting, (admitted, why) in (_ADMITTED | (_PERSONAL if config.method.personal else {})).items():
        section, name = setting.split(".")
        value = getattr(getattr(config, section), name)
        if value not in admitted:
            words = ("nothing" if one in ("", None, ()) else repr(one) for one in admitted)
            yield Fault(setting, value, " or ".join(words), why)


# The settings of each machine alone, with the values that a charter may have.
LOCAL: dict[tuple[str, str], tuple[object, ...]] = {
    ("data", "train"): (MEMBERS, ""),
    ("data", "test"): ("",),
    ("data", "name"): ("builtin/notes",),  # the default, which names no data where data.train is set
    ("model", "device"): ("cpu",),
    ("model", "trust_remote_code"): (False,),  # or a charter could run code on every node
    ("model", "device_map"): ("",),
    ("model", "max_memory"): ((),),
    ("privacy", "ledger"): ("",),
    ("privacy", "data_set"): ("",),
    ("privacy", "unit_name"): ("",),
    ("privacy", "ledger_heads"): ("",),
}


def neutral() -> dict[tuple[str, str], object]:
    """The values by which founding replaces those of the coordinator's machine."""
    return {setting: admitted[0] for setting, admitted in LOCAL.items() if setting != ("data", "name")}


def local_fault(config: RunConfig) -> str:
    """A sentence about the first setting of one machine alone that these settings contain; "" if they contain none."""
    for (section, name), admitted in LOCAL.items():
        value = getattr(getattr(config, section), name)
        if value not in admitted:
            return (
                f"it sets {section}.{name} = {value!r:.80}, and a charter leaves this setting to each machine: found the "
                "federation again, with `secure-fed coordinator found`"
            )
    if config.data.chat_template and not is_template(config.data.chat_template):
        return (
            "it names a file in data.chat_template, and a charter holds the template itself: found the federation again"
        )
    return ""
