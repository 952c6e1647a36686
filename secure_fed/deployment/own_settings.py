"""The settings of each machine alone: paths, and names of local files. A charter contains none of them.

Each party keeps its own in `node.toml` or `coordinator.toml`. A node refuses a charter that sets one: such a charter could name
a file on the node's machine, which the node would read or write. The base model's name may be a folder; the owner's policy
lists the admitted names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.learning.data.chats import is_template

MEMBERS = "the files of each member"  # data.train of a charter, which contains no path

# Each setting with the values that a charter may have.
OWN: dict[tuple[str, str], tuple[object, ...]] = {
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
    return {setting: admitted[0] for setting, admitted in OWN.items() if setting != ("data", "name")}


def fault(config: RunConfig) -> str:
    """A sentence about the first setting of one machine alone that these settings contain; "" if they contain none."""
    for (section, name), admitted in OWN.items():
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


@dataclass(frozen=True)
class ModelHere:
    """The base model on one machine.

    folder: of the model, "" for the charter's name of it. The rest as in [model].
    """

    folder: str = ""
    device: str = "cpu"
    trust_remote_code: bool = False
    device_map: str = ""
    max_memory: tuple[str, ...] = ()

    @classmethod
    def of(cls, section: Any) -> ModelHere:
        """As the section [node] or [coordinator] of a machine's own file has it."""
        others = {one.name: getattr(section, one.name) for one in fields(cls) if one.name != "folder"}
        return cls(section.model, **others)

    @property
    def settings(self) -> dict[tuple[str, str], Any]:
        """The settings of [model] on this machine."""
        place = {("model", "name"): self.folder, ("model", "revision"): ""} if self.folder else {}
        return place | {("model", one.name): getattr(self, one.name) for one in fields(self) if one.name != "folder"}
