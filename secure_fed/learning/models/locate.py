"""The location of a named model: built in, a folder, or the Hub. Needs no torch, so that a wrong name is reported at once."""

from __future__ import annotations

from pathlib import Path

from secure_fed.errors import ModelError, plainly

# This path does not change: exports for PEFT name it, since AutoPeftModel knows no other name of the built-in model.
BUILTIN = {"builtin/tiny": Path(__file__).parents[2] / "models" / "tiny"}


def locate(name: str) -> str:
    """The name of `model.name` for transformers: a folder's absolute path, or the Hub id."""
    if name in BUILTIN:
        return str(BUILTIN[name])
    if name.startswith("builtin/"):
        raise ModelError(f"model.name is {name!r}, but the built-in models are {', '.join(BUILTIN)}")
    with plainly(ModelError, f"model.name {name!r} cannot be looked up", "give a folder, builtin/tiny or a Hub id"):
        folder = Path(name).expanduser()
        found = folder.is_dir()
    if found:
        if not (folder / "config.json").exists():
            raise ModelError(
                f"model.name is the folder {name!r}, but it has no config.json; give a saved transformers model"
            )
        return str(folder.absolute())
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"model.name is {name!r}, but there is no such folder")
    return name
