"""`secure-fed audit`: its subcommands, the short form, and the calls of the version before subcommands.

`secure-fed audit RUN_DIR` is short for `secure-fed audit run RUN_DIR`. A subcommand's name is never read as a folder: a run in
a folder of that name is audited as `./model`. The heavy imports happen when a subcommand runs, so `--help` is instant.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from functools import partial

from attacks import command as of_run
from attacks.any_model import command as any_model
from attacks.extraction import command as extraction
from attacks.inference import command as inference
from attacks.lying import command as lying
from attacks.options import say
from attacks.prepared import command as prepared


def _add_model(parser: argparse.ArgumentParser) -> None:
    any_model.add_arguments(parser)
    parser.add_argument("--attribute", metavar="COLUMN", help="guess this column of each text from its rest")


def _audit_model(chosen: argparse.Namespace) -> int:
    return any_model.run(chosen) if chosen.attribute is None else inference.run(chosen)


Kind = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int | None]]
SUBCOMMANDS: dict[str, Kind] = {
    "run": ("attack a run, and report what it gives away", of_run.add_run_arguments, of_run.run),
    "model": (
        "attack a model trained elsewhere, by texts that it saw and texts that it did not",
        _add_model,
        _audit_model,
    ),
    "prepare": (
        "divide data at random, to audit a training with any tool, and write its training file",
        prepared.add_preparing,
        prepared.prepare,
    ),
    "prepared": (
        "bound the epsilon of a training that `secure-fed audit prepare` prepared, from below",
        prepared.add_arguments,
        prepared.run,
    ),
    "extract": (
        "look for texts of the training that a language model continues verbatim",
        extraction.add_arguments,
        extraction.run,
    ),
    "share": (
        "guess which share of a client's texts contain a word, from an update of each of at most 60 clients",
        inference.add_share,
        inference.run_share,
    ),
    "lying": (
        "try what a server that sends crafted models reads out of its clients' contributions",
        lying.add_arguments,
        lying.run,
    ),
}


def add_parsers(audit: argparse.ArgumentParser) -> None:
    """Add the subcommands to `secure-fed audit`."""
    kinds = audit.add_subparsers(
        required=True,
        metavar="KIND",
        description="`secure-fed audit RUN_DIR` is short for `secure-fed audit run RUN_DIR`.",
    )
    narrow = partial(argparse.HelpFormatter, max_help_position=28)
    for name, (does, add_arguments, run) in SUBCOMMANDS.items():
        parser = kinds.add_parser(name, help=does, description=does, formatter_class=narrow)
        add_arguments(parser)
        parser.set_defaults(run=run)


def with_subcommand(arguments: Sequence[str]) -> list[str]:
    """The arguments behind `audit`, beginning with a subcommand.

    Without one they are those of the short form, or an option of the version before subcommands chooses the kind of audit, such
    as `--lying RUN_DIR`. Such a call works for one more version, and a line on standard error gives the new call.
    """
    if not arguments or arguments[0] in SUBCOMMANDS or arguments[0] in ("-h", "--help"):
        return list(arguments)
    former = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--lying", "--share", "--extract", "--prepared", "--model"):
        former.add_argument(option)
    try:
        found, rest = former.parse_known_args(arguments)
    except argparse.ArgumentError:  # an option without its value
        found, rest = argparse.Namespace(), list(arguments)
    given = {name: value for name, value in vars(found).items() if value is not None}
    if not given:
        return ["run", *rest]
    kind = next(iter(given))
    subjects = [given[name] for name in dict.fromkeys(("model", kind)) if name in given]
    # the run of `share` stands among the other arguments, before its word
    new = [kind, *rest, *subjects] if kind == "share" else [kind, *subjects, *rest]
    say(f"this call is from an earlier version, and the next one will not know it: secure-fed audit {shlex.join(new)}")
    return new
