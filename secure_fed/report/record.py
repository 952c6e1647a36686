"""What a run directory says, read once into one frozen value that every section of the report reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_fed.errors import RunDirectoryError

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RunRecord:
    """One run: its finished `rounds` in order; `result` is None until the last planned round is done."""

    name: str
    config: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """One value of the configuration."""
        return self.config.get(section, {}).get(key, default)

    def series(self, metric: str, part: str = "") -> Points:
        """`(round, value)` for every round that measured `metric`, or that `part` of it."""
        measured = ((row["round"], row.get(metric)) for row in self.rounds)
        if part:
            measured = ((number, (value or {}).get(part)) for number, value in measured)
        return tuple((number, float(value)) for number, value in measured if value is not None)

    def last(self, metric: str) -> float | None:
        """The result's value of `metric`; without a result, that of the last round that measured it."""
        if self.result is not None and self.result.get(metric) is not None:
            return float(self.result[metric])
        measured = self.series(metric)
        return measured[-1][1] if measured else None

    def total(self, metric: str) -> float:
        """The sum of `metric` over the finished rounds."""
        return sum(value for _, value in self.series(metric))

    @property
    def client_names(self) -> tuple[str, ...]:
        """Every client, whether it was ever drawn or not."""
        return tuple(str(name) for name in self.facts.get("clients", ()))

    @property
    def clients(self) -> tuple[tuple[str, int], ...]:
        """`(name, training examples)` of every client whose size is known."""
        return tuple(zip(self.client_names, self.facts.get("partition", {}).get("sizes", ()), strict=False))

    @property
    def rejected(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """`(round, clients whose update was left out)` for every round that left some out."""
        return tuple((row["round"], tuple(map(str, row["rejected"]))) for row in self.rounds if row.get("rejected"))

    @property
    def planned(self) -> int:
        """Rounds asked for."""
        return int(self.setting("federation", "rounds", len(self.rounds)))

    @property
    def unprotected(self) -> bool:
        """True unless the configuration names a privacy unit or switches secure aggregation on."""
        unit = self.setting("privacy", "unit", "none")
        return unit == "none" and not self.setting("secure_aggregation", "enabled", False)


def read(run_dir: Path) -> RunRecord:
    """The record of `run_dir`; a result older than the configured number of rounds counts as none."""
    if not run_dir.is_dir():
        raise RunDirectoryError(f"there is no run directory at {run_dir}: name the folder given to `train --out`")
    config = _required(run_dir, "config.json")
    rounds = _rounds(run_dir / "metrics.jsonl")
    result = _object(run_dir / "result.json")
    if result is not None and result.get("rounds", 0) < config.get("federation", {}).get("rounds", 0):
        result = None
    return RunRecord(run_dir.resolve().name, config, _required(run_dir, "run.json"), rounds, result)


def _required(run_dir: Path, name: str) -> dict[str, Any]:
    found = _object(run_dir / name)
    if found is None:
        raise RunDirectoryError(f"{run_dir} is not a run directory: it has no {name}")
    return found


def _object(path: Path) -> dict[str, Any] | None:
    content = _content(path)
    return None if content is None else _parsed(content, str(path))


def _rounds(path: Path) -> tuple[Mapping[str, Any], ...]:
    """One row a round. A last line without its newline was being written when the run was killed."""
    rows: dict[int, Mapping[str, Any]] = {}
    complete = (_content(path) or "").split("\n")[:-1]
    for line_number, line in enumerate(complete, start=1):
        row = _parsed(line, f"{path}, line {line_number}")
        if not isinstance(row.get("round"), int):
            raise RunDirectoryError(f"{path}, line {line_number} has no round number: the run directory is damaged")
        rows[row["round"]] = row
    return tuple(rows[number] for number in sorted(rows))


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"cannot read {path}: {error}") from error


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise RunDirectoryError(f"{where} is not JSON ({error}): the run directory is damaged") from error
    if not isinstance(parsed, dict):
        raise RunDirectoryError(f"{where} holds {parsed!r:.40}, not an object: the run directory is damaged")
    return parsed
