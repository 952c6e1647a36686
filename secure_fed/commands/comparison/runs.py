"""Running a comparison: finished runs are read, interrupted runs are resumed, and the results are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from secure_fed.commands.comparison.plan import DRAWING, NUMBERS, TABLE, Job, planned
from secure_fed.commands.comparison.rows import Row, row_of
from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError
from secure_fed.report.record import RunRecord, owned
from secure_fed.runs.directory import CONFIG, FACTS, claimed
from secure_fed.runs.durable import atomic_write

# A context around a run that is made or resumed. It yields None, or a callback of the federation that may also have
# `on_begin(federation)`.
Progress = Callable[[Job], AbstractContextManager[Any]]


def compare(
    configs: Mapping[str, RunConfig],
    seeds: Sequence[int],
    out: str | Path,
    target: float | None = None,
    progress: Progress = lambda job: nullcontext(),
) -> list[Row]:
    """Run every configuration with every seed in OUT/NAME/seed-SEED, write compare.md, .csv and .svg, and return their rows.

    The seed is set as `federation.seed`: it changes the partition, the cohorts, the adapter and the training. Everything is
    checked before the first run starts. Called again after a kill, it continues: a finished run is not repeated, and changed
    settings are refused. An error of a run ends the comparison; finished runs stay.
    """
    place = Path(out)
    jobs = planned(configs, seeds, place, target)
    finished: dict[str, dict[int, RunRecord]] = {name: {} for name in configs}
    with claimed(place, rename=False):
        for job in jobs:
            finished[job.name][job.seed] = _finished(job) or _made(job, progress)
        rows = [row_of(name, runs, target) for name, runs in finished.items()]
        _write(place, rows)
    return rows


def _finished(job: Job) -> RunRecord | None:
    """The run, if it has finished all its rounds, or has ended early."""
    from secure_fed.report.page import write_report

    if not (job.run_dir / CONFIG).exists() or not (job.run_dir / FACTS).exists():
        return None
    record = owned(job.run_dir)
    if record.result is None:
        return None
    if not (job.run_dir / "report.html").exists():  # killed between its end and its report
        write_report(job.run_dir)
    return record


def _made(job: Job, progress: Progress) -> RunRecord:
    """The run, started or resumed, until its end."""
    from secure_fed.federation import Federation
    from secure_fed.report.page import write_report

    with progress(job) as callback:
        federation = Federation(job.config)
        federation.callbacks += [callback] if callback is not None else []
        federation.callbacks += _trackers(job)
        if hasattr(callback, "on_begin"):
            callback.on_begin(federation)
        federation.run(job.run_dir, resume=True)
    write_report(job.run_dir)
    record = owned(job.run_dir)
    if record.result is None:
        raise RunDirectoryError(f"{job.run_dir} lost its result while the comparison ran; start the comparison again")
    return record


def _trackers(job: Job) -> list[Any]:
    from secure_fed.report.trackers import asked_for
    from secure_fed.runs.store import read_checkpoint

    checkpoint = read_checkpoint(job.run_dir)
    return asked_for(job.config, job.run_dir, checkpoint.state.round if checkpoint else 0)


def _write(out: Path, rows: Sequence[Row]) -> None:
    from secure_fed.commands.comparison import drawing, tables

    atomic_write(out / NUMBERS, tables.as_csv(rows))
    atomic_write(out / DRAWING, drawing.drawn(rows))
    atomic_write(out / TABLE, tables.markdown(rows))  # last: if it exists, all files do
