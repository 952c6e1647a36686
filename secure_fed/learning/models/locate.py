"""The location of a named model: built in, a folder, or the Hub. Needs no torch, so that a wrong name is reported at once."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from secure_fed.config import ModelConfig
from secure_fed.config.settings import WRITE
from secure_fed.errors import ConfigError, ModelError, plainly
from secure_fed.learning.data import hub

# Exports for PEFT name this path, since AutoPeftModel knows no other name of the built-in model.
BUILTIN = {"builtin/tiny": Path(__file__).parent / "tiny"}

ENCODER, CHAT = "sentence-transformers/all-MiniLM-L6-v2", "HuggingFaceTB/SmolLM2-135M-Instruct"  # small ones of the Hub


def never_saw(name: str, task: str) -> str:
    """Why a built-in model learns little of a user's texts, and what to set instead."""
    other = CHAT if task in WRITE else ENCODER
    return f"{name} was pre-trained on the built-in notes alone: set model.name to a model of the Hub, such as {other}"


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


def found(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The name of the configured model for transformers, and the settings with which every part of it is loaded.

    A revision that does not exist is refused.

    Code that comes with a model runs only if `model.trust_remote_code` says so: nobody is asked.
    """
    place = locate(config.name)
    if config.quantization != "none" and not (find_spec("bitsandbytes") and find_spec("accelerate")):
        raise ConfigError(
            f"model.quantization is {config.quantization!r}, which needs bitsandbytes: pip install "
            "'secure-fed[quantized]', or set model.quantization = 'none'"
        ).about("model.quantization", config.quantization, "none without bitsandbytes")
    if config.device_map and not find_spec("accelerate"):
        raise ConfigError(
            f"model.device_map is {config.device_map!r}, which needs accelerate: pip install 'secure-fed[quantized]', or leave "
            "it out"
        ).about("model.device_map", config.device_map, "left out without accelerate")
    if config.quantization != "none" and "," in config.device:
        raise ConfigError(f"model.device is {config.device!r}, and a quantised model is on one device: name one").about(
            "model.device", config.device, "one device with model.quantization"
        )
    if config.revision and Path(place).is_absolute():
        raise ConfigError(
            f"model.revision is {config.revision!r}, and model.name {config.name!r} is no Hub model but a folder, which has "
            "one revision: leave model.revision out"
        ).about("model.revision", config.revision, "left out beside a folder")
    if config.revision:
        hub.commit("model", place, config.revision)
    if not Path(place).is_absolute():
        hub.require_reachable(place, config.revision)
    revision = {"revision": config.revision} if config.revision else {}
    return place, {"trust_remote_code": config.trust_remote_code, **revision}
