"""The settings of each machine alone: paths, and names of local files. A charter contains none of them.

Each party keeps its own in `node.toml` or `coordinator.toml`. A node refuses a charter that sets one: such a charter could name
a file on the node's machine, which the node would read or write. The base model's name may be a folder; the owner's policy
lists the admitted names.
"""

from __future__ import annotations

from typing import Any

from secure_fed.config import RunConfig

MEMBERS = "the files of each member"  # data.train of a charter, which contains no path

# Each setting with the values that a charter may have.
OWN: dict[tuple[str, str], tuple[object, ...]] = {
    ("data", "train"): (MEMBERS, ""),
    ("data", "test"): ("",),
    ("data", "name"): ("builtin/notes",),  # the default, which names no data where data.train is set
    ("model", "device"): ("cpu",),
    ("model", "trust_remote_code"): (False,),  # or a charter could run code on every node
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
    return ""


def model_here(folder: str, device: str, *, trusted: bool) -> dict[tuple[str, str], Any]:
    """The settings of [model] on this machine.

    folder: of the base model, "" for the charter's name of it. trusted: whether code that the model brings along may run.
    """
    place = {("model", "name"): folder, ("model", "revision"): ""} if folder else {}
    return {**place, ("model", "device"): device, ("model", "trust_remote_code"): trusted}
