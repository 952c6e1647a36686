"""`secure-fed train`: run a federation, write its report, and print its result; or say what that would need (--dry-run)."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError, UsageError

if TYPE_CHECKING:
    from secure_fed.federation import Federation
    from secure_fed.report.result import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; without it, the defaults")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="change one setting")
    dry = "say what the run would read, guarantee, send and need; nothing is trained, written or reserved"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, if need be for more rounds")


def train(chosen: argparse.Namespace) -> None:
    if chosen.out == "":
        raise RunDirectoryError("--out is empty: name a folder, or leave --out out")
    if chosen.resume and chosen.dry_run:
        raise UsageError(
            "--dry-run is of a run from its beginning, and --resume goes on with one: leave one of them out"
        )
    if chosen.resume and not chosen.out:
        raise RunDirectoryError("--resume needs --out DIR, the run directory to go on with")
    config = RunConfig.load(chosen.config, () if chosen.resume else chosen.set)
    if chosen.resume:
        from secure_fed.runs.directory import read_config, require_begun

        if chosen.config:
            require_begun(Path(chosen.out))
        config = (config if chosen.config else read_config(Path(chosen.out))).override(chosen.set)
        _require_from_files(Path(chosen.out))
    if chosen.dry_run:
        return _dry(config, chosen)
    run(config, chosen, config.method.name, resume=chosen.resume)


def _dry(config: RunConfig, chosen: argparse.Namespace) -> None:
    from secure_fed.commands import dry_run
    from secure_fed.runs.dry_run import foreseen

    _check(config, chosen.out)
    found = foreseen(config)
    if chosen.json:
        print(json.dumps(found))
    else:
        dry_run.show(found)


def _require_from_files(out: Path) -> None:
    """Refuse a run on objects that a program made: the command would resume it with others."""
    from secure_fed.runs.directory import FACTS, is_given, read_facts

    if (out / FACTS).exists() and is_given(read_facts(out)):
        raise RunDirectoryError(
            f"{out} was begun with objects given in Python, which only that program can make: there, resume it with "
            "Federation.run"
        )


def run(config: RunConfig, chosen: argparse.Namespace, name: str, *, resume: bool, quiet: bool = False) -> Path:
    """Run in `chosen.out` or a new folder, write the report, and print the result unless `quiet`. Returns the folder."""
    from secure_fed.report.page import write_report

    if not resume:
        _check(config, chosen.out)
    out, result = _ran(config, chosen.out, name, resume=resume)
    page = write_report(out)
    if chosen.json:
        print(json.dumps(result.summary))
    elif not quiet:
        _show(result, out, page)
    return out


def _check(config: RunConfig, out: str | None) -> None:
    """Refuse what can be refused before the slow imports."""
    from secure_fed.commands import ahead
    from secure_fed.runs.directory import require_unused

    if out:
        require_unused(Path(out))
    ahead.check(config)


def _ran(config: RunConfig, asked: str | None, name: str, *, resume: bool) -> tuple[Path, Result]:
    """The run directory and the result, with progress on the terminal. asked: the folder; without it, a new one."""
    from secure_fed.federation import Federation
    from secure_fed.report.progress import ConsoleProgress
    from secure_fed.report.trackers import asked_for
    from secure_fed.runs.directory import claimed
    from secure_fed.runs.store import read_checkpoint, read_records, resumable

    out = Path(asked or f"runs/{datetime.now():%Y%m%d-%H%M%S}-{name}")
    with ExitStack() as stack:
        out = stack.enter_context(claimed(out, rename=not asked))
        stack.enter_context(resumable(out))
        print(f"secure-fed: {config.method.name} of {config.model.name}, run directory {out}", file=sys.stderr)
        checkpoint = read_checkpoint(out)
        done = read_records(out, checkpoint.state.round) if checkpoint else []
        progress = stack.enter_context(
            ConsoleProgress(config.federation.rounds, done, config.data.task, config.data.metric)
        )
        federation = Federation(config)
        _tell(federation)
        federation.callbacks += [*asked_for(config, out, len(done)), progress]
        progress.begin(federation.assembly.protection.plan, federation.assembly.charges)
        return out, federation.run(out, resume=resume)


def _tell(federation: Federation) -> None:
    for note in federation.notes:
        print(f"secure-fed: {note}", file=sys.stderr)
    for warning in federation.warnings:
        print(f"secure-fed: warning: {warning}", file=sys.stderr)


def _show(result: Result, out: Path, page: Path) -> None:
    from secure_fed.report.terminal import show_result
    from secure_fed.runs.directory import private_part

    show_result(result.whole)
    own = f", and for you alone {private_part(out) / page.name}" if result.withheld else ""
    print(f"report: {page}{own}\nadapter: secure-fed export {shlex.quote(str(out))} OUT_DIR")
