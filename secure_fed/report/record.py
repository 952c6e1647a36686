"""The contents of a run directory, read once into one frozen value that every section of the report uses.

`read` reads only the public part of the directory; `owned` reads all of it, for the owner of the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError, plainly
from secure_fed.runs import published
from secure_fed.runs.directory import (
    AUDIT,
    AUDIT_PAGE,
    CHECKPOINT,
    METRICS,
    OWN_FACTS,
    OWN_RESULT,
    OWN_ROUNDS,
    PRIVATE,
    RECORDING,
    RESULT,
    UNPROTECTED,
    Published,
    is_deployed,
    parsed,
    private_part,
    read_text,
    withholds_test,
)

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RunRecord:
    """One run: its finished `rounds` in order; `result` is None until the last planned round is done or the run ended early.

    owned: whether it contains the withheld part of a private run. audit: the path, relative to the run directory, of the page
    on an audit of the run after these rounds; empty where there is none, and for readers who may not see it. audited: that
    audit's main attack: its title, AUC, interval and true-positive rates. unguarded: the folders in the private part that hold
    what no noise and no mask protects. digests: SHA-256 of files of the run, by the name of the file.
    """

    name: str
    config: RunConfig
    facts: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None
    owned: bool = True
    audit: str = ""
    audited: Mapping[str, Any] = field(default_factory=dict)
    unguarded: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        """Whether the run has a protected unit, so that part of its contents is private."""
        return self.config.privacy.unit != "none"

    @property
    def deployed(self) -> bool:
        """Whether the clients were separate nodes; otherwise the run was a simulation."""
        return is_deployed(self.facts)

    @property
    def withholds_test(self) -> bool:
        """Whether measurements on the test rows are left out, because these rows were held out of private ones."""
        return not self.owned and withholds_test(self.config, self.facts)

    def series(self, metric: str, part: str = "") -> Points:
        """`(round, value)` for every round that measured `metric`, or that `part` of it."""
        measured = ((row["round"], row.get(metric)) for row in self.rounds)
        if part:
            measured = ((number, (value or {}).get(part)) for number, value in measured)
        return tuple((number, float(value)) for number, value in measured if value is not None)

    def last(self, metric: str) -> float | None:
        """The result's value of `metric`; without a result, the value of the last round that measured it."""
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
        """The requested number of rounds."""
        return self.config.federation.rounds

    @property
    def ended_early(self) -> str:
        """The reason if the run ended before its last planned round, else ""."""
        return str((self.result or {}).get("ended_early") or "")

    @property
    def hides_cohort(self) -> bool:
        """Whether the files have the expected number of clients in a round, and never the actual number."""
        in_turn = self.config.federation.sampling == "schedule"
        return self.config.privacy.unit == "client" and self.config.privacy.noise == "central" and not in_turn

    @property
    def draws_by_coins(self) -> bool:
        """Whether coins draw the cohort, so that it may be small."""
        federation = self.config.federation
        drawn = federation.cohort or self.last("cohort") or 0
        coins = federation.sampling == "poisson" or (federation.sampling == "auto" and self.hides_cohort)
        return coins and not self.hides_training and drawn < len(self.client_names)

    @property
    def hides_training(self) -> bool:
        """Whether all clients take part in every round, and each keeps to itself whether it trained."""
        return self.config.privacy.unit == "client" and self.config.privacy.hidden_cohort


def read(run_dir: Path) -> RunRecord:
    """The record of the public part of `run_dir`.

    A result of fewer rounds than requested counts as none, unless the run ended early with it.
    """
    public = Published(run_dir)
    facts, config = public.facts, public.config  # other folders may have a config.json, too
    rounds = _rounds(public.text(METRICS), run_dir / METRICS)
    with plainly(RunDirectoryError, f"{run_dir} cannot be read", "give the --out of `secure-fed train`"):
        files = (file for name in (CHECKPOINT, RESULT) if (file := run_dir / name).is_file())
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    record = RunRecord(run_dir.resolve().name, config, facts, rounds, public.result, owned=False, digests=digests)
    if record.private:  # without withheld values, in case its public files contain any
        shown, result = published.without_withheld, record.result
        record = replace(
            record,
            facts=shown(record.facts, published.FACTS),
            rounds=tuple(shown(row, published.ROUND) for row in record.rounds),
            result=None if result is None else shown(result, published.RESULT),
        )
    if record.withholds_test and record.result is not None:
        # A result without measurements on test rows.
        tested = {name: None for name, source in published.RESULT.items() if source is published.TEST}
        metrics = (record.result.get("metrics") or {}).items()
        of_releases = {name: value for name, value in metrics if name in published.ROUND}
        record = replace(record, result={**record.result, **tested, "metrics": of_releases})
    return _ended(record)


def owned(run_dir: Path) -> RunRecord:
    """The record of `run_dir` with its withheld part, for the owner of the data; without privacy, that part is small."""
    record, folder = read(run_dir), private_part(run_dir)
    facts, audit = _own(folder / OWN_FACTS), _audit(folder, len(record.rounds))
    # Recorded models are what the clients receive anyway; recorded updates and sums are not.
    kept = (UNPROTECTED, RECORDING) if record.config.evaluation.record == "updates" else (UNPROTECTED,)
    record = replace(
        record,
        owned=True,
        audit=f"{PRIVATE}/{AUDIT_PAGE}" if audit else "",
        audited=_main_attack(audit),
        unguarded=tuple(name for name in kept if (folder / name).is_dir()),
    )
    if not record.private or not folder.is_dir():
        noted: dict[str, Any] = {name: facts[name] for name in ("origin", "ended") if name in facts}
        return replace(record, facts={**record.facts, **noted})
    own = {row["round"]: row for row in _rounds(read_text(folder / OWN_ROUNDS), folder / OWN_ROUNDS)}
    figures = _own(folder / OWN_RESULT)
    result = Published(run_dir).result
    whole = replace(
        record,
        facts=published.together(record.facts, facts),
        rounds=tuple(published.together(row, own.get(row["round"], {})) for row in record.rounds),
        result=None if result is None else published.together(result, figures),
    )
    return _ended(whole)


def _ended(record: RunRecord) -> RunRecord:
    """The record, without a result of fewer rounds than requested, unless the run ended early with it."""
    result = record.result
    if result is not None and len(record.rounds) < result.get("rounds", 0):
        raise RunDirectoryError(
            f"{METRICS} of {record.name} has {len(record.rounds)} of the {result['rounds']} rounds of its result: restore it"
        )
    if result is None or result.get("rounds", 0) >= record.planned:
        return record
    last_word = result.get("ended_early") and result.get("rounds", 0) >= len(record.rounds)
    return record if last_word else replace(record, result=None)


def _own(file: Path) -> dict[str, Any]:
    content = read_text(file)
    return {} if content is None else parsed(content, str(file))


def _audit(folder: Path, finished: int) -> Mapping[str, Any]:
    """The audit after `finished` rounds, as its file has it, if the private part can be read and has its page; else empty."""
    try:
        found = _own(folder / AUDIT)
    except RunDirectoryError:
        return {}
    after = found.get("rounds")
    return found if type(after) is int and after == finished and (folder / AUDIT_PAGE).is_file() else {}


def _main_attack(audit: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an audit's main attack, with its title; empty where the file has none."""
    main: Mapping[str, Any] = audit.get("main") or {}
    for cell in (audit.get("cells") or ()) if main else ():
        if all(cell.get(name) == main.get(name) for name in ("attack", "vantage")) and cell.get("auc") is not None:
            titles = {one.get("name"): one.get("title") for one in audit.get("attacks") or ()}
            units = {"of": audit.get("audited_of"), "unit": audit.get("audited_unit")}
            return {**cell, **units, "title": str(titles.get(cell["attack"]) or cell["attack"])}
    return {}


def _rounds(content: str | None, file: Path) -> tuple[Mapping[str, Any], ...]:
    """One row a round. A last line without its newline was being written when the run was killed."""
    rows: dict[int, Mapping[str, Any]] = {}
    complete = (content or "").split("\n")[:-1]
    for line_number, line in enumerate(complete, start=1):
        row = parsed(line, f"{file}, line {line_number}")
        if not isinstance(row.get("round"), int):
            raise RunDirectoryError(f"{file}, line {line_number} is damaged: it has no round number")
        rows[row["round"]] = row
    return tuple(rows[number] for number in sorted(rows))
