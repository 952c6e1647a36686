"""What a run directory says, read once into one frozen value that every section of the report reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError
from secure_fed.run_dir import METRICS, RESULT, parsed, read_config, read_facts, read_text

AUDIT, AUDIT_PAGE = "audit.json", "audit.html"  # where an audit of a run is told, in the run's directory

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RunRecord:
    """One run: its finished `rounds` in order; `result` is None until the last planned round is done, or the budget spent.

    audited: whether a page on an audit of it, as it is after these rounds, lies in its directory.
    """

    name: str
    config: RunConfig
    facts: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None
    audited: bool = False

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
        return tuple(self.facts["clients"])

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
        return self.config.federation.rounds

    @property
    def ended_early(self) -> str:
        """Why the run ended before its last planned round; empty if it did not."""
        return str((self.result or {}).get("ended_early") or "")

    @property
    def hides_cohort(self) -> bool:
        """Whether the files say how many clients are expected in a round, and never how many there were."""
        return self.config.privacy.unit == "client" and self.config.privacy.noise == "central"

    @property
    def draws_by_coins(self) -> bool:
        """Whether a coin for every client draws a cohort, so that there may be few in it."""
        federation = self.config.federation
        drawn = federation.cohort or self.last("cohort") or 0
        coins = federation.sampling == "poisson" or (federation.sampling == "auto" and self.hides_cohort)
        return coins and drawn < len(self.client_names)

    @property
    def hides_training(self) -> bool:
        """Whether all clients take part in every round, and each keeps to itself whether it trained."""
        return self.config.privacy.unit == "client" and self.config.privacy.hidden_cohort


def read(run_dir: Path) -> RunRecord:
    """The record of `run_dir`; a result of fewer rounds than asked for counts as none, unless the run ended early with it."""
    facts, config = read_facts(run_dir), read_config(run_dir)  # other folders may have a config.json, too
    content = read_text(run_dir / RESULT)
    result = None if content is None else parsed(content, str(run_dir / RESULT))
    rounds = _rounds(run_dir / METRICS)
    if result is not None and result.get("rounds", 0) < config.federation.rounds:
        last_word = result.get("ended_early") and result.get("rounds", 0) >= len(rounds)
        result = result if last_word else None
    return RunRecord(run_dir.resolve().name, config, facts, rounds, result, _audited(run_dir, len(rounds)))


def _audited(run_dir: Path, finished: int) -> bool:
    """Whether there is a page on an audit made after so many rounds, as far as that can be read."""
    try:
        content = read_text(run_dir / AUDIT)
        told = parsed(content, str(run_dir / AUDIT)) if content is not None else {}
    except RunDirectoryError:
        return False
    after = told.get("rounds")
    return type(after) is int and after == finished and (run_dir / AUDIT_PAGE).is_file()


def _rounds(file: Path) -> tuple[Mapping[str, Any], ...]:
    """One row a round. A last line without its newline was being written when the run was killed."""
    rows: dict[int, Mapping[str, Any]] = {}
    complete = (read_text(file) or "").split("\n")[:-1]
    for line_number, line in enumerate(complete, start=1):
        row = parsed(line, f"{file}, line {line_number}")
        if not isinstance(row.get("round"), int):
            raise RunDirectoryError(f"{file}, line {line_number} is damaged: it has no round number")
        rows[row["round"]] = row
    return tuple(rows[number] for number in sorted(rows))
