"""The runs of a comparison and their folders. All checks are here, before anything is run or written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from secure_fed.config import RunConfig, with_absolute_paths
from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.learning.tasks.headline import has_accuracy
from secure_fed.runs.directory import CONFIG, read_config, usable
from secure_fed.runs.durable import part_of

TABLE, NUMBERS, DRAWING = "compare.md", "compare.csv", "compare.svg"
_OURS = {TABLE, NUMBERS, DRAWING}
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


def planned(configs: Mapping[str, RunConfig], seeds: Sequence[int], out: Path, target: float | None) -> list[Job]:
    """Every run, one configuration after the other. Refuses runs that cannot be made, and a folder with foreign files."""
    from secure_fed.methods import build

    _require_comparable(configs, seeds, target)
    jobs: list[Job] = []
    for name, config in configs.items():
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


def _left_open(config: RunConfig, held: RunConfig) -> RunConfig:
    """The configuration, with its unset settings as the run has chosen them."""
    chosen = config.to_dict()
    left = [(section, name) for section, name in _SETTLED if chosen[section].get(name) in (None, "auto")]
    return config.replace({(section, name): held.to_dict()[section][name] for section, name in left})


def _require_unchanged(job: Job) -> None:
    """Refuse a run that was started with other settings, and a folder that contains no run."""
    from secure_fed.runs.directory import require_unused

    with usable(job.run_dir):
        begun = (job.run_dir / CONFIG).exists()
    if not begun:
        require_unused(job.run_dir)
    elif differences := _left_open(job.config, held := read_config(job.run_dir)).differences(held):
        raise RunDirectoryError(
            f"{job.run_dir} was run with other settings than {job.name} has now: {'; '.join(differences)}; choose another "
            "--out, or put them back"
        )
