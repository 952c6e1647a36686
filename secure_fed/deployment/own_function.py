"""A function in a file of the node's owner, as the local step of this node (`local` in node.toml). No charter names one."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from secure_fed.deployment.home_files import HomeError, placed
from secure_fed.learning.training.local_function import LocalFunction
from secure_fed.rounds.local_function import require_function


def function_in(folder: Path, named: str) -> LocalFunction:
    """The function `FILE.py:NAME`; a relative path is in this folder. The file is executed. HomeError if it has none."""
    path, _, name = named.rpartition(":")
    file = placed(folder, path, "local")
    spec = spec_from_file_location(f"local_of_{file.stem}", file)
    if not path or spec is None or spec.loader is None or not file.is_file():
        raise _refused(named, 'names no file: write local = "FILE.py:NAME"')
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _refused(named, f"cannot be executed ({type(error).__name__}: {error}): correct the file") from error
    function: Any = getattr(module, name, None)
    if function is None:
        raise _refused(named, f"names {name!r}, which {file} does not have: name a function in it")
    require_function(function)
    return function  # type: ignore[no-any-return]  # of a file that mypy does not see


def _refused(named: str, why: str) -> HomeError:
    return HomeError(f"local = {named!r:.200} {why}").about("local", named, "a function in a file of this machine")
