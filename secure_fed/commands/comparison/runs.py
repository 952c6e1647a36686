"""Running a comparison: finished runs are read, interrupted runs are resumed, and the results are written.

`planned` checks everything before anything is run or written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_fed.commands.comparison.rows import Row, row_of
from secure_fed.config import RunConfig, with_absolute_paths
from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.learning.tasks.headline import has_accuracy
from secure_fed.report.record import RunRecord, owned
from secure_fed.runs.directory import CONFIG, FACTS, claimed, read_config, usable
from secure_fed.runs.durable import atomic_write, part_of

TABLE, NUMBERS, DRAWING = "compare.md", "compare.csv", "compare.svg"
_OURS = {TABLE, NUMBERS, DRAWING}
# Settings that a run chooses where they are not set.
_SETTLED = (
    *(
        ("federation", name)
        for name in ("sampling", "server_optimizer", "server_lr", "server_momentum", "average_last")
    ),
    *(("privacy", name) for name in ("clip_norm", "noise", "correlation")),
    *(("training", "lr"), ("training", "batch_size"), ("training", "lr_schedule"), ("training", "head_factor")),
    ("method", "switch_round"),
)


@dataclass(frozen=True)
class Job:
    """A run of a comparison, the `number`-th of `count`."""

    name: str
    seed: int
    config: RunConfig
    run_dir: Path
    number: int
    count: int


# A context around a run that is made or resumed. It yields None, or a callback of the federation, which is told before the run
# begins: `begin(plan, charges)`, as `ConsoleProgress` is.
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
    from secure_fed.commands.comparison import tables

    place = Path(out)
    jobs = planned(configs, seeds, place, target)
    finished: dict[str, dict[int, RunRecord]] = {name: {} for name in configs}
    with claimed(place, rename=False):
        for job in jobs:
            finished[job.name][job.seed] = _finished(job) or _made(job, progress)
        rows = [row_of(name, runs, target) for name, runs in finished.items()]
        atomic_write(place / NUMBERS, tables.as_csv(rows))
        atomic_write(place / DRAWING, tables.drawn(rows))
        atomic_write(place / TABLE, tables.markdown(rows))  # last: if it exists, all files do
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
    from secure_fed.report.trackers import asked_for
    from secure_fed.runs.store import read_checkpoint

    with progress(job) as callback:
        federation = Federation(job.config)
        federation.callbacks += [callback] if callback is not None else []
        checkpoint = read_checkpoint(job.run_dir)
        federation.callbacks += asked_for(job.config, job.run_dir, checkpoint.state.round if checkpoint else 0)
        if hasattr(callback, "begin"):
            for warning in federation.warnings:
                print(f"secure-fed: warning: {warning}", file=sys.stderr)
            callback.begin(federation.assembly.protection.plan, federation.assembly.charges)
        federation.run(job.run_dir, resume=True)
    write_report(job.run_dir)
    record = owned(job.run_dir)
    if record.result is None:
        raise RunDirectoryError(f"{job.run_dir} lost its result while the comparison ran; start the comparison again")
    return record


def planned(configs: Mapping[str, RunConfig], seeds: Sequence[int], out: Path, target: float | None) -> list[Job]:
    """Every run, one configuration after the other. Refuses runs that cannot be made, and a folder with foreign files."""
    from secure_fed.methods import build
    from secure_fed.methods.auto import decided

    _require_comparable(configs, seeds, target)
    jobs: list[Job] = []
    for name, config in configs.items():
        config, _ = decided(config)
        build(config)  # the method's own checks
        if target is not None and not has_accuracy(config.data.task):
            raise ConfigError(
                f"a target accuracy of {target} is set, but {name!r} has data.task = {config.data.task!r}, which has no "
                "accuracy: leave the target out"
            )
        for seed in seeds:
            seeded = with_absolute_paths(config.replace({("federation", "seed"): seed}))
            number, place = len(jobs) + 1, out / name / f"seed-{seed}"
            jobs.append(Job(name, seed, seeded, place, number, len(configs) * len(seeds)))
    _require_own(out, configs)
    for job in jobs:
        _require_unchanged(job)
    return jobs


def _require_comparable(configs: Mapping[str, RunConfig], seeds: Sequence[int], target: float | None) -> None:
    if not configs or not seeds:
        raise ConfigError("nothing is compared without a configuration and a seed: give one of each at least")
    folded: dict[str, str] = {}
    for name in configs:
        if not name or Path(name).name != name or name.startswith(".") or name.casefold() in _OURS:
            raise ConfigError(f"{name!r} cannot be the name of a configuration and of its folder: choose another")
        if name.casefold() in folded:  # one folder on file systems that ignore case
            raise ConfigError(f"{folded[name.casefold()]!r} and {name!r} would share a folder: rename one of them")
        folded[name.casefold()] = name
    if repeated := [seed for place, seed in enumerate(seeds) if seed in seeds[:place]]:
        raise ConfigError(f"seed {repeated[0]} is named twice, which would count one run twice: name it once")
    if target is not None and not (math.isfinite(target) and 0 < target <= 1):
        raise ConfigError(f"the target accuracy is {target}, but it must be above 0 and at most 1")


def _require_own(out: Path, configs: Mapping[str, RunConfig]) -> None:
    """Refuse a folder that contains anything but the folders of these configurations and the files of a comparison."""
    with usable(out):
        if out.exists() and not out.is_dir():
            raise RunDirectoryError(f"{out} is a file; choose another --out")
        held = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
        foreign = [name for name in held if name not in configs and (part_of(name) or name) not in _OURS]
    if foreign:
        raise RunDirectoryError(
            f"{out} holds {foreign[0]!r}, which is not of this comparison: name its configuration too, or choose another --out"
        )


def _require_unchanged(job: Job) -> None:
    """Refuse a run that was started with other settings, and a folder that contains no run."""
    from secure_fed.runs.directory import require_unused

    with usable(job.run_dir):
        begun = (job.run_dir / CONFIG).exists()
    if not begun:
        require_unused(job.run_dir)
        return
    held, chosen = read_config(job.run_dir), job.config.to_dict()
    left_open = [(section, name) for section, name in _SETTLED if chosen[section].get(name) in (None, "auto")]
    settled = job.config.replace({(section, name): held.to_dict()[section][name] for section, name in left_open})
    if differences := settled.differences(held):
        raise RunDirectoryError(
            f"{job.run_dir} was run with other settings than {job.name} has now: {'; '.join(differences)}; choose another "
            "--out, or put them back"
        )
