"""`secure-fed compare`: several configurations over several seeds, as a table and a drawing.

Called again with the same --out it continues: finished runs are read, interrupted runs are resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError

if TYPE_CHECKING:
    from secure_fed.commands.comparison import Row
    from secure_fed.commands.comparison.runs import Job
    from secure_fed.report.progress import ConsoleProgress

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `secure-fed compare`."""
    parser.add_argument("configs", nargs="+", metavar="CONFIG.toml", help="the file name is the configuration's name")
    parser.add_argument(
        "--seeds", default="0,1,2", metavar="S,S,...", help="seeds, in place of federation.seed (default: 0,1,2)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="section.key=value", help="change one setting in all of them"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the runs; unfinished runs in it go on (default: a new one under runs/)"
    )
    parser.add_argument(
        "--target",
        type=float,
        metavar="ACCURACY",
        help="count the rounds until this accuracy, or F1 of entities and answers (default: evaluation.target_accuracy)",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object")


def run(chosen: argparse.Namespace) -> int:
    """Compare, print, and return the exit status."""
    from secure_fed.commands import train

    if any(one.replace(" ", "").startswith("federation.seed=") for one in chosen.set):
        raise ConfigError("--set federation.seed has no effect, since --seeds replaces it: leave it out").about(
            "federation.seed", chosen.set, "not set beside --seeds"
        )
    seeds, configs = _seeds(chosen.seeds), _configs(chosen.configs, chosen.set)
    for config in configs.values():
        train.check_ahead(config)
    from secure_fed.commands.comparison import compare, tables

    out = Path(chosen.out or f"runs/{datetime.now():%Y%m%d-%H%M%S}-compare")
    try:
        rows = compare(
            configs, seeds, out, chosen.target, partial(_shown, iter(tables.cost_ahead(configs, len(seeds))))
        )
    except KeyboardInterrupt:
        print(f"secure-fed: interrupted; the same command with --out {out} goes on", file=sys.stderr)
        return _INTERRUPTED
    if chosen.json:
        from secure_fed.commands.comparison.rows import differences, totals
        from secure_fed.commands.comparison.tables import numbers

        together = [total.to_dict() for total in totals(charge for row in rows for charge in row.charges)]
        paired = [one._asdict() for one in differences(rows)]
        found = {"rows": [numbers(row) for row in rows], "differences": paired, "together": together}
        print(json.dumps({"out": str(out), **found}))
    else:
        _show(out, rows)
    return 0


def _configs(files: Sequence[str], changes: Sequence[str]) -> dict[str, RunConfig]:
    """Every file's settings, by the file's name without its ending."""
    found: dict[str, RunConfig] = {}
    for file in files:
        name = Path(file).stem
        if name in found:
            raise ConfigError(f"two configurations are called {name!r}, and would share a folder: rename a file")
        found[name] = RunConfig.load(file, changes)
    return found


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--seeds is {text!r}, but it must be whole numbers with commas between, such as 0,1,2"
        ) from error


@contextmanager
def _shown(first: Iterator[str], job: Job) -> Iterator[ConsoleProgress]:
    """Print a line for the run, and its rounds as they end. first: lines to print before the first run that is made."""
    from secure_fed.report.progress import ConsoleProgress
    from secure_fed.runs.store import read_checkpoint, read_records

    for line in first:
        print(f"secure-fed: {line}", file=sys.stderr)
    place = f"run {job.number} of {job.count}: {job.name} ({job.config.method.name}), seed {job.seed}"
    print(f"secure-fed: {place}, run directory {job.run_dir}", file=sys.stderr, flush=True)
    checkpoint = read_checkpoint(job.run_dir)
    done = read_records(job.run_dir, checkpoint.state.round) if checkpoint else []
    with ConsoleProgress(job.config.federation.rounds, done, job.config.data.task, job.config.data.metric) as progress:
        yield progress


def _show(out: Path, rows: Sequence[Row]) -> None:
    """The table for people: one column for each configuration, since a row of all numbers would be too wide."""
    from secure_fed.commands.comparison.tables import cells, heads, notes
    from secure_fed.report.terminal import PlainConsole, table_of

    first, *named = zip(heads(rows), *(cells(row, rows) for row in rows), strict=True)
    console = PlainConsole()
    console.print(table_of(named, *first))
    for note in notes(rows):
        console.print(note)
    console.print(
        f"table: {out / 'compare.md'}\nnumbers: {out / 'compare.csv'}\ndrawing: {out / 'compare.svg'}", soft_wrap=True
    )
