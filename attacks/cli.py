"""`secure-fed audit`: its options, and the kind of audit that they ask for. An option without effect is an error."""

from __future__ import annotations

import argparse
from pathlib import Path

from attacks import command as of_run
from attacks.any_model import command as any_model
from attacks.catalogue import ATTACKS
from attacks.extraction import command as extraction
from attacks.inference import command as inference
from attacks.lying import command as lying
from attacks.prepared import command as prepared
from secure_fed.errors import UsageError

_MODEL = "model adapter device"
_TEXTS = "members non_members task text text_b label labels max_length"
_OF_TASKS = "stride unanswerable label_centre label_scale chat_template"
_PREPARED = f"{_MODEL} prepared max_length fail_above"
# The options that each kind reads. --exposure reads --max-length because a model with fewer positions than the default cannot
# be loaded without it.
READ = {
    "--lying": "lying trials attack fail_above",
    "--attribute": f"attribute {_MODEL} {_TEXTS} fail_above",
    "--share": "share fail_above",
    "--extract": f"extract {_MODEL} reference task text text_b prefix suffix answers max_length chat_template show_texts "
    "fail_above",
    "--exposure": f"exposure {_PREPARED} secrets_tried chat_template",
    "--prepared": f"{_PREPARED} {_OF_TASKS} reference labels delta",
    "a plain --model": f"{_MODEL} {_TEXTS} {_OF_TASKS} reference shadows config recall neighbours neighbour_model date "
    "scores out show_texts attack fail_above",
    "RUN_DIR": "attack beside show_texts references",
}
_EVERYWHERE = ("run_dir", "json")
_OWN = ("lying", "attribute", "share", "extract", "exposure", "prepared", "model")  # the option that asks for each kind
_RUNS = {
    "--lying": lying.run,
    "--attribute": inference.run,
    "--share": inference.run_share,
    "--extract": extraction.run,
    "--exposure": prepared.run,
    "--prepared": prepared.run,
    "a plain --model": any_model.run,
    "RUN_DIR": of_run.run,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all kinds."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", nargs="?")
    any_model.add_arguments(parser)
    prepared.add_arguments(parser)
    extraction.add_arguments(parser)
    inference.add_arguments(parser)
    lying.add_arguments(parser)
    parser.add_argument(
        "--attack",
        action="append",
        default=[],
        metavar="NAME|FILE.py",
        help=f"make this attack only; may be repeated ({', '.join(ATTACKS)}, or a file of your own that defines one)",
    )
    parser.add_argument(
        "--beside",
        nargs="+",
        type=Path,
        default=[],
        metavar="RUN_DIR",
        help="other audited runs, shown beside this one in the report",
    )
    shown = "include the texts of the most exposed examples in the report (default: left out)"
    parser.add_argument("--show-texts", action="store_true", help=shown)
    of_run.add_arguments(parser)


def run(chosen: argparse.Namespace) -> int:
    """Audit the named run or model; the exit status. UsageError for an option that this kind of audit does not read."""
    kind = next(
        (kind for kind, name in zip(READ, _OWN, strict=False) if getattr(chosen, name) not in (None, False)), "RUN_DIR"
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    usual = parser.parse_args([])
    for name, value in vars(chosen).items():
        readers = [reader for reader, names in READ.items() if name in names.split()]
        if not readers or name in _EVERYWHERE or kind in readers or value == getattr(usual, name, value):
            continue
        raise UsageError(
            f"--{name.replace('_', '-')} goes with {' or '.join(readers)}, and not with {kind}: leave it out"
        )
    return _RUNS[kind](chosen)
