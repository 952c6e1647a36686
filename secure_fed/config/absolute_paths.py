"""Settings that mean the same in every working directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from secure_fed.config.run import RunConfig


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same settings with the absolute path of every file and folder that exists, so that any working directory will do."""
    data = config.data
    return config.replace(
        {
            ("model", "name"): _absolute(config.model.name, Path.is_dir),
            ("data", "name"): _absolute(data.name, Path.is_dir),
            **{("privacy", name): _made_absolute(getattr(config.privacy, name)) for name in ("ledger", "ledger_heads")},
            **{("data", name): _each_absolute(getattr(data, name)) for name in ("train", "test")},
        }
    )


def _each_absolute(paths: str | tuple[str, ...]) -> str | list[str]:
    return _absolute(paths) if isinstance(paths, str) else [_absolute(path) for path in paths]


def _made_absolute(name: str) -> str:
    """A file that may not be there yet."""
    return str(Path(name).expanduser().absolute()) if name else name


def _absolute(name: str, there: Callable[[Path], bool] = Path.exists) -> str:
    with suppress(OSError, RuntimeError, ValueError):  # what cannot be looked up is refused where it is read
        path = Path(name).expanduser()
        if name and not name.startswith("builtin/") and there(path):
            return str(path.absolute())
    return name
