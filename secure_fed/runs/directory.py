"""The run directory from outside: its location, the names of its files, and checked reading of its JSON files.

A run directory has two parts. Files at its top follow from releases, settings and public data, and may be shown (`published`
names the source of every value); the exception is `result.json`, which has measurements on test rows even if these were held
out of private rows. The folder `private/` contains everything else that a run writes, and is for the owner of the data: only
the owner can open it. An export and the report read a run through `Published`, which can name no file in that folder.

Needs no torch, so that a report starts at once. Any damage to the files is reported in one sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, RunDirectoryError, plainly
from secure_fed.learning.data.holdout import GIVEN, is_declared
from secure_fed.runs.durable import part_of
from secure_fed.runs.published import together

CONFIG, FACTS, METRICS, RESULT = "config.json", "run.json", "metrics.jsonl", "result.json"
CHECKPOINT, BEST, REPORT = "checkpoint.safetensors", "best.safetensors", "report.html"
PUBLIC = (CONFIG, FACTS, METRICS, CHECKPOINT, BEST, RESULT, REPORT)

PRIVATE = "private"
OWN_FACTS, OWN_ROUNDS, OWN_RESULT = "facts.json", "rounds.jsonl", "figures.json"
AUDIT, AUDIT_PAGE = "audit.json", "audit.html"
MEMBERSHIP, ATTENDANCE, RELEASED = "membership.json", "attendance", "released.safetensors"
TENSORBOARD = "tensorboard"
# What an audit needs: recorded rounds, and a second run without privacy.
RECORDING, UNPROTECTED = "recording", "unprotected"
LOCK = ".lock"


def private_part(run_dir: Path) -> Path:
    """The private folder of a run directory; it need not exist."""
    return run_dir / PRIVATE


def made_private(run_dir: Path) -> Path:
    """The same folder, created if needed; only its owner can open it."""
    folder = private_part(run_dir)
    with usable(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    return folder


@dataclass(frozen=True)
class Published:
    """A reader of a run's public part only: it opens the files of `PUBLIC`, by these names."""

    run_dir: Path

    def path(self, name: str) -> Path:
        if name not in PUBLIC:
            raise ValueError(f"{name!r} is no file of the public part of a run directory ({', '.join(PUBLIC)})")
        return self.run_dir / name

    def text(self, name: str) -> str | None:
        """The content of a file, or None where there is none."""
        return read_text(self.path(name))

    @property
    def config(self) -> RunConfig:
        return read_config(self.run_dir)

    @property
    def facts(self) -> dict[str, Any]:
        return read_facts(self.run_dir)

    @property
    def result(self) -> dict[str, Any] | None:
        """`result.json`, once the run has ended."""
        content = self.text(RESULT)
        return None if content is None else parsed(content, str(self.path(RESULT)))


def without_times(run_dir: Path) -> None:
    """Give all public files of a private run, and their folder, the time at which the run began.

    The files' times would reveal how long rounds took, and so how many clients trained. Resuming does not move them back.
    """
    with suppress(OSError):
        began = (run_dir / CONFIG).stat().st_mtime_ns
        for file in (*(run_dir / name for name in PUBLIC), run_dir):
            if file.exists():
                os.utime(file, ns=(began, began))


def usable(path: Path) -> AbstractContextManager[None]:
    """Report an obstacle to using a run directory in one sentence."""
    return plainly(RunDirectoryError, f"{path} cannot be written", "choose another --out")


@contextmanager
def claimed(out: Path, *, rename: bool) -> Iterator[Path]:
    """Make the directory, so that a run killed during start-up leaves a trace; if left empty, it is removed again.

    With `rename` it is always new: if the name is taken, "-2", "-3", ... is appended.
    """
    with usable(out):
        made = [folder for folder in out.parents if not folder.exists()]
        if rename:
            out = next(place for place in _names(out) if _made(place))
        if rename or _made(out):
            made = [out, *made]
    try:
        yield out
    finally:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def require_begun(path: Path) -> None:
    """Refuse to resume where no run was begun; a start that was killed before it wrote anything counts as begun."""
    with plainly(RunDirectoryError, f"{path} cannot be read", "give the --out of `secure-fed train`"):
        if not path.exists():
            raise RunDirectoryError(f"{path} holds no run to go on with; start one there without --resume")


def require_unused(path: Path) -> None:
    """Refuse a directory that contains a run, or anything except the remains of a killed start."""
    with usable(path):
        if (path / CONFIG).exists():
            raise RunDirectoryError(
                f"{path} already holds a run; add --resume to go on with it or choose another --out"
            )
        remains = {LOCK, CONFIG}
        if path.exists() and not (path.is_dir() and all((part_of(one) or one) in remains for one in os.listdir(path))):
            raise RunDirectoryError(f"{path} is not an empty directory; choose another --out")


def read_config(path: Path) -> RunConfig:
    """The configuration of the run in `path`."""
    try:
        return RunConfig.from_dict(read_object(path, CONFIG))
    except ConfigError as error:
        raise RunDirectoryError(f"{path / CONFIG} is damaged, or of another version of secure-fed: {error}") from error


def read_facts(path: Path) -> dict[str, Any]:
    """The facts fixed when the run in `path` began; "label_names" and "clients" are lists of texts."""
    facts = read_object(path, FACTS)
    for name in ("label_names", "clients"):
        value = facts.get(name)
        if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise RunDirectoryError(f"{path / FACTS} is damaged: {name} is not a list of names")
    return facts


def withholds_test(config: RunConfig, facts: Mapping[str, Any]) -> bool:
    """Whether measurements on test rows are withheld, because these rows were held out of private ones."""
    tested = str(facts.get("test", {}).get("from", ""))
    return config.privacy.unit != "none" and not is_declared(tested)


def is_deployed(facts: Mapping[str, Any]) -> bool:
    """Whether the clients of the run were separate nodes, by the facts in run.json; otherwise the run was a simulation."""
    return "charter" in facts


def is_given(facts: Mapping[str, Any]) -> bool:
    """Whether a program gave the run objects of its own, which only that program can make."""
    return facts.get("task") == GIVEN or "given" in facts.get("privacy", {}) or facts.get("local") is not None


def read_object(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of a run directory, which must be there."""
    content = read_text(path / name)
    if content is None:
        raise RunDirectoryError(
            f"{path} holds no run: it has no {name}; give the --out of a run, which `secure-fed train` without --resume begins"
        )
    return parsed(content, str(path / name))


def read_whole_result(path: Path) -> dict[str, Any]:
    """The result of the run in `path` with its withheld part: for the owner of the data."""
    result, folder = read_object(path, RESULT), private_part(path)
    return together(result, read_object(folder, OWN_RESULT)) if (folder / OWN_RESULT).exists() else result


def read_text(file: Path) -> str | None:
    """The content of a file, or None where there is none."""
    with plainly(RunDirectoryError, f"{file} cannot be read", "give the --out of `secure-fed train`"):
        try:
            return file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None


def parsed(text: str, where: str) -> dict[str, Any]:
    """Text as a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of thousands of digits
        raise RunDirectoryError(f"{where} is damaged: it cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{where} is damaged: it holds {value!r:.40}, not an object")
    return value


def _names(first: Path) -> Iterator[Path]:
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in count(2))


def _made(folder: Path) -> bool:
    """Make the folder; False if the name is taken."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    return True
