"""`secure-fed train`: run a federation, write its report, and print its result; or say what that would need (--dry-run)."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError, UsageError

if TYPE_CHECKING:
    from secure_fed.report.result import Result

_LARGE = 10  # classes that a dry run prints, of those with the most rows


_EXAMPLES = """
examples:
  secure-fed train run.toml                                       a configuration, such as secure-fed init writes
  secure-fed train --train notes.csv --client clinic              a CSV with columns text, label and clinic
  secure-fed train run.toml --unit example --epsilon 8 --masks    the same with a guarantee for each text, behind masks
"""
_PLAIN = {
    "--model": ("model.name", "NAME", "a Hub id or a folder"),
    "--train": ("data.train", "FILE", "the training rows: JSON Lines, CSV or Parquet"),
    "--test": ("data.test", "FILE", "the test rows; without it, a fifth of the training rows"),
    "--task": ("data.task", "NAME", "classification, causal_lm, chat, ..."),
    "--client": ("data.client", "COLUMN", "column that names the client of a row"),
    "--clients": ("federation.clients", "N", "number of clients, where no column names them"),
    "--cohort": ("federation.cohort", "N", "clients in a round"),
    "--rounds": ("federation.rounds", "N", "communication rounds"),
    "--seed": ("federation.seed", "N", "seed of partition, cohorts and training"),
    "--method": ("method.name", "NAME", "see secure-fed methods; or a .py file of yours"),
    "--lr": ("training.lr", "RATE", "learning rate of local training"),
    "--unit": ("privacy.unit", "UNIT", "whom privacy protects: client, example or person"),
    "--epsilon": ("privacy.epsilon", "E", "the guarantee, with --unit"),
    "--delta": ("privacy.delta", "D", "the probability that it fails"),
}


class _Setting(argparse.Action):
    """An option that is `--set section.key=value` under a shorter name; of the two, the later one counts."""

    def __call__(self, parser: Any, chosen: argparse.Namespace, value: Any, option: str | None = None) -> None:
        chosen.set = [*chosen.set, f"{self.dest}={value}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; without it, the defaults")
    for option, (setting, value, does) in _PLAIN.items():
        parser.add_argument(
            option, action=_Setting, metavar=value, help=f"{does} ({setting})", default=argparse.SUPPRESS, dest=setting
        )
    masks = "masks: the server learns sums of updates (secure_aggregation.enabled)"
    enabled = "secure_aggregation.enabled=true"
    parser.add_argument("--masks", action="append_const", dest="set", const=enabled, default=[], help=masks)
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
        from secure_fed.runs.directory import CONFIG, read_config, require_begun

        if chosen.config:
            require_begun(Path(chosen.out))
        from secure_fed.methods.auto import as_begun

        unwritten = chosen.config and not (Path(chosen.out) / CONFIG).exists()  # the run ended at its first write
        stored = config if unwritten else read_config(Path(chosen.out))
        config = as_begun((config if chosen.config else stored).override(chosen.set), stored)
        _require_from_files(Path(chosen.out))
    if not chosen.dry_run:
        run(config, chosen, "", resume=chosen.resume)
        return
    _check(config, chosen.out)
    from secure_fed.runs.dry_run import foreseen

    facts = foreseen(config)
    if chosen.json:
        print(json.dumps(facts))
    else:
        _show_dry(facts)


def _require_from_files(out: Path) -> None:
    """Refuse a run on objects that a program made: the command would resume it with others."""
    from secure_fed.runs.directory import FACTS, is_given, read_facts

    if (out / FACTS).exists() and is_given(read_facts(out)):
        raise RunDirectoryError(
            f"{out} was begun with objects given in Python, which only that program can make: there, resume it with "
            "Federation.run"
        )


def run(config: RunConfig, chosen: argparse.Namespace, name: str, *, resume: bool, quiet: bool = False) -> Path:
    """Run in `chosen.out` or a new folder, write the report, and print the result unless `quiet`. Returns the folder.

    name: ends the name of a new folder; by default the method's.
    """
    from secure_fed.config.own_files import allow_all
    from secure_fed.report.page import write_report

    if resume:
        allow_all(config)  # whoever resumes a run names the run's own files
    else:
        _check(config, chosen.out)
        from secure_fed.methods.auto import decided

        config, reasons = decided(config)
        print("".join(f"secure-fed: {reason}\n" for reason in reasons), end="", file=sys.stderr)
    out, result = _ran(config, chosen.out, name or config.method.name, resume=resume)
    page = write_report(out)
    if chosen.json:
        print(json.dumps(result.summary))
    elif not quiet:
        _show(result, out, page)
    return out


def _check(config: RunConfig, out: str | None) -> None:
    from secure_fed.runs.directory import require_unused

    if out:
        require_unused(Path(out))
    check_ahead(config)


def check_ahead(config: RunConfig) -> None:
    """Refuse an unknown method, and missing files, columns, model folders or ledgers, before anything heavy is loaded.

    torch and transformers take seconds, these checks do not. Building the run checks the same again, and much else, such as
    labels and sizes.
    """
    from secure_fed import methods
    from secure_fed.config import own_files
    from secure_fed.learning.data import sources
    from secure_fed.learning.data.rows import columns_of
    from secure_fed.learning.models.locate import found
    from secure_fed.runs.budget import require_made

    methods.require_known(config.method.name)
    own_files.allow_all(config)
    found(config.model)
    read, others = columns_of(config.data), config.evaluation.non_members
    sources.require_columns(config.data, read, config.privacy.person_column, others, config.method.ranks_column)
    if config.privacy.ledger:
        require_made(config.privacy.ledger)


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
        for note in (*federation.notes, *(f"warning: {warning}" for warning in federation.warnings)):
            print(f"secure-fed: {note}", file=sys.stderr)
        federation.callbacks += [*asked_for(config, out, len(done)), progress]
        progress.begin(federation.assembly.protection.plan, federation.assembly.charges)
        return out, federation.run(out, resume=resume)


def _show(result: Result, out: Path, page: Path) -> None:
    from secure_fed.report.terminal import show_result
    from secure_fed.runs.directory import private_part

    show_result(result.whole)
    own = f", and for you alone {private_part(out) / page.name}" if result.withheld else ""
    print(f"report: {page}{own}\nadapter: secure-fed export {shlex.quote(str(out))} OUT_DIR")


def _show_dry(found: Mapping[str, Any]) -> None:
    """What a run would read, guarantee, send and need, as a table."""
    from secure_fed.report.terminal import FACTS, PlainConsole, table_of

    title = f"{found['method']}: {found['model']}, a dry run: nothing was trained, written or reserved"
    chosen = (("chosen", reason) for reason in found["chosen"])
    parts = (chosen, _data(found["data"]), _privacy(found["privacy"]), _traffic(found), _memory(found["memory"]))
    console = PlainConsole()
    console.print(table_of(chain(*parts), title=title, **FACTS))
    console.print(
        "Counts of rows have no noise: they are for the owner of the data. Memory follows from shapes; gaps in an allocator's "
        "memory and scratch space within an operation come on top. Trials of the model, which a private run makes before it "
        "reserves its budget, were not made."
    )


def _data(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    units = sorted(data["units"])
    middle = f", {units[0]:,} to {units[-1]:,} each, {units[len(units) // 2]:,} in the middle" if len(units) > 1 else ""
    yield "clients", f"{data['clients']:,}; {data['clients_without_rows']:,} without rows"
    unit = {"none": "rows", "client": "rows", "example": "rows", "person": "persons"}[data["unit"]]
    yield unit, f"{sum(units):,}{middle}"
    if labels := data["labels"]:
        most = sorted(labels.items(), key=lambda entry: -entry[1])
        listed = ", ".join(f"{name} {count:,}" for name, count in most[:_LARGE])
        yield "labels", listed + (f", and {len(most) - _LARGE} more" if len(most) > _LARGE else "")
    if tokens := data["tokens"]:
        yield "tokens a row", f"{tokens['mean']:.1f} in the mean, {tokens['longest']:,} at most"
    cut = "lose turns to" if data["task"] == "chat" else "reach"
    yield "test rows", f"{data['test_rows']:,} ({data['test_from']}); {data['empty_test_rows']:,} of them empty"
    without = (
        f"{data['rows_at_the_limit']:,} rows {cut} model.max_length, {data['rows_left_out']:,} are left out for want of "
        f"room, {data['rows_with_nothing_to_learn']:,} have no token to learn, {data['held_out_for_an_audit']:,} units are "
        "held out for an audit"
    )
    yield "cut or not learned", without
    if data["warning"]:
        yield "warning", data["warning"]


def _privacy(privacy: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if privacy is None:
        yield "guarantee", "none: privacy.unit is 'none'"
        return
    for sentence in privacy["words"]:
        name, _, rest = sentence.partition(": ")
        yield name, rest
    if privacy["releases"] < privacy["releases_planned"]:
        yield "shortened", f"the ledger has room for {privacy['releases']} of {privacy['releases_planned']} releases"


def _traffic(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from secure_fed.report.formatting import size

    sent = found["traffic"]
    up, down = size(sent["bytes_up"]), size(sent["bytes_down"])
    yield "a round", f"{sent['cohort']:g} clients expected; {up} up, {down} down, all of them together"
    yield "rounds", f"{sent['rounds']:,}"
    least = found["seconds_a_round_at_least"]
    known = "not known" if least is None else f"at least {least:.3g} s: the products alone, at this speed"
    yield "time of a round", known
    yield "checkpoint on disk", size(found["checkpoint_bytes"])


def _memory(memory: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from secure_fed.report.formatting import size

    yield f"memory ({memory['device']})", f"{size(memory['peak'])} at the peak, of {size(memory['of_device'])}"
    for name, part in memory["parts"].items():
        if part:
            yield f"  {name}", size(part)
    if memory["evaluation"] > memory["training"]:
        yield "  evaluation needs more", f"{size(memory['evaluation'])}: lower evaluation.batch_size"
    pass_ = memory["pass"]
    at_once = f", {memory['passes_at_once']} at the same time" if memory["passes_at_once"] > 1 else ""
    again = "; layers are computed again (training.checkpointing)" if memory["checkpointing"] else ""
    yield "  largest pass", f"{pass_['examples']:,} rows, {pass_['tokens']:,} tokens{at_once}{again}"
    yield "  clients trained at once", f"{memory['clients_at_once']:,}"
