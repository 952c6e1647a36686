"""`secure-fed export`: the trained model of a run as a folder, and on the Hugging Face Hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from secure_fed.activity import activity
from secure_fed.errors import UsageError
from secure_fed.runs.directory import read_facts
from secure_fed.runs.durable import require_empty


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `secure-fed export` besides the run."""
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--merged", action="store_true", help="write the whole model, the adapter merged into it")
    push = "upload the folder to this repository of the Hugging Face Hub too; a new one is private"
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help=push)
    parser.add_argument("--public", action="store_true", help="make the repository public (--push-to-hub)")


def run(chosen: argparse.Namespace) -> None:
    """Export, and push with --push-to-hub. The two folders are looked at before torch is loaded."""
    if chosen.public and chosen.push_to_hub is None:
        raise UsageError("--public has no effect without --push-to-hub USER/NAME")
    read_facts(chosen.run_dir)
    require_empty(chosen.out_dir)
    from secure_fed.export.export import push, require_pushable
    from secure_fed.export.model_card import LABELS
    from secure_fed.export.trained import load_run

    loaded = load_run(chosen.run_dir, chosen.client, best=chosen.best)
    if chosen.push_to_hub is not None:
        require_pushable(chosen.push_to_hub, loaded.config.model.name, merged=chosen.merged)
    with activity(f"writing {chosen.out_dir}"):
        written = loaded.export(chosen.out_dir, merged=chosen.merged)
    print(written)
    print(f"how to load it: {chosen.out_dir / 'README.md'}", file=sys.stderr)
    if (chosen.out_dir / LABELS).exists() and (line := loaded.card.labelled(chosen.out_dir.as_posix())):
        print(f"with PEFT, and the names of its labels: {line}", file=sys.stderr)
    if chosen.push_to_hub is not None:
        with activity(f"uploading to {chosen.push_to_hub}"):
            pushed = push(chosen.out_dir, chosen.push_to_hub, public=chosen.public)
        print(pushed)
