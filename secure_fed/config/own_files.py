"""Python files of the user's own project that a setting names, such as `method.name = "my_method.py"`.

A run notes such a file by its absolute path and a digest of its content (`pinned`), so that an edited file does not resume it.
A file is executed only where the user of this process named it (`allow`, `pinned`), and not because a charter, a stored run or
an exported folder names it.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from secure_fed.config.run_config import RunConfig
from secure_fed.errors import ConfigError

SETTINGS = (("method", "name"), ("privacy", "mechanism"))
_FILE = re.compile(r"(?P<path>.+\.py)(?:@(?P<digest>[0-9a-f]{16}))?")
_allowed: set[Path] = set()  # the files that the user of this process named


def is_file(value: str) -> bool:
    """Whether a setting's value is the path of a file, with or without a digest."""
    return _FILE.fullmatch(value) is not None


def allow(setting: str, value: str) -> None:
    """Let this process execute the file that the user named. ConfigError if it is not there, or not as it was noted."""
    path, digest = _parts(value)
    if not path.is_file():
        raise refused(setting, value, "is no file: give the path of a .py file that is there")
    if digest not in ("", _digest(path.read_bytes())):
        raise refused(setting, value, "has another content now than the run began with: restore it, or start a new run")
    _allowed.add(path)


def allow_all(run: RunConfig) -> None:
    """`allow` for every file that the user's configuration names."""
    for setting, value in _named(run):
        allow(setting, value)


def pinned(run: RunConfig) -> RunConfig:
    """The configuration with every file as its absolute path and its digest.

    A name with a digest is a run's note, not a user's word: by itself it allows this process to execute no file.
    """
    noted = {}
    for setting, value in _named(run):
        path, digest = _parts(value)
        if not digest or path in _allowed:
            allow(setting, value)
            section, _, key = setting.partition(".")
            noted[section, key] = f"{path}@{_digest(path.read_bytes())}"
    return run.replace(noted) if noted else run


def executed(setting: str, value: str) -> ModuleType:
    """The module in the file, executed once a process for each content. ConfigError if it fails, or nobody named it."""
    path, digest = _parts(value)
    if path not in _allowed:
        raise refused(
            setting,
            value,
            "is a file of a user's own: it is executed only where a configuration of yours names it; if you trust it, call "
            "secure_fed.config.own_files.allow with the setting and its path first",
        )
    kind = setting.replace(".", "_")
    with suppress(KeyError):  # a run goes on with what it began with
        return sys.modules[f"{kind}_{path.stem}_{digest}"]
    allow(setting, value)
    content = path.read_bytes()
    name = f"{kind}_{path.stem}_{_digest(content)}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)  # among the modules, where dataclasses look their annotations up
    module.__file__ = str(path)
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise refused(setting, str(path), f"cannot be executed ({type(error).__name__}: {error})") from error
    return module


def refused(setting: str, value: str, why: str) -> ConfigError:
    """The error about a user's file."""
    return ConfigError(f"{setting} = {value!r} {why}").about(setting, value, "a file of the kind that it needs")


def _named(run: RunConfig) -> list[tuple[str, str]]:
    """The settings that name a file, with their values."""
    found = ((f"{section}.{key}", getattr(getattr(run, section), key)) for section, key in SETTINGS)
    return [(setting, value) for setting, value in found if is_file(value)]


def _parts(value: str) -> tuple[Path, str]:
    """The absolute path and the digest, which is empty where the value has none."""
    file = _FILE.fullmatch(value)
    assert file is not None
    return Path(file["path"]).expanduser().absolute(), file["digest"] or ""


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]
