"""`secure-fed audit --model BASE --members FILE --non-members FILE`: the audit of a model trained elsewhere."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from attacks.options import (
    ABOVE_LIMIT,
    CANNOT_TELL,
    LENGTH,
    OF_CHATS,
    SETTINGS,
    TASKS,
    above_limit,
    add_task_arguments,
    cannot_tell,
    chosen_settings,
    gives_scale,
    labels_of,
    limit_of,
    longest,
    require_columns,
    say,
)
from secure_fed.errors import ConfigError, UsageError, plainly

if TYPE_CHECKING:
    from attacks.any_model.subject import Asked
    from secure_fed.config import RunConfig


_LANGUAGE_MODELS = ("causal_lm", "chat")
_NEEDED = {"members": "--members", "non_members": "--non-members"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("a model that others have trained")
    own.add_argument("--model", metavar="NAME", help="a folder or a Hub id, in the place of RUN_DIR")
    own.add_argument("--adapter", type=Path, metavar="DIR", help="the folder of a PEFT adapter on it")
    own.add_argument("--members", type=Path, metavar="FILE", help="texts that were in the training, one a row")
    own.add_argument(
        "--non-members", type=Path, metavar="FILE", help="texts of the same kind that were not in the training"
    )
    reference = "a model of the same kind that never saw the members; may be repeated"
    own.add_argument("--reference", action="append", default=[], metavar="NAME", help=reference)
    trained = "train N models on random halves of the texts, by --config, for the attacks LiRA and RMIA (16)"
    own.add_argument("--shadows", type=int, metavar="N", help=trained)
    own.add_argument(
        "--config",
        type=Path,
        metavar="CONFIG.toml",
        help="the configuration of these trainings, as for `secure-fed train`",
    )
    unseen = "texts that were in no training of the model, read before each text: the attack ReCaLL, of language models"
    own.add_argument("--recall", type=Path, metavar="FILE", help=unseen)
    near = "compare each text with N copies with one word changed (25 show most; each costs a pass over all texts)"
    own.add_argument("--neighbours", type=int, metavar="N", help=near)
    fills = "a masked language model that changes the words of neighbours (default: a word is left out)"
    own.add_argument("--neighbour-model", metavar="NAME", help=fills)
    own.add_argument("--task", choices=TASKS, help="what the model was trained for (default: classification)")
    own.add_argument("--text", metavar="COLUMN", help="as data.text")
    own.add_argument("--text-b", metavar="COLUMN", help="as data.text_b")
    own.add_argument("--label", metavar="COLUMN", help="as data.label")
    own.add_argument("--date", metavar="COLUMN", help="the date of a text: members and others must not differ by it")
    own.add_argument("--labels", metavar="A,B,...", help="the classes in the order of the model's outputs")
    own.add_argument(
        "--max-length", type=int, metavar="TOKENS", help=f"longer texts are cut (default: {LENGTH}; chats: {OF_CHATS})"
    )
    add_task_arguments(own)
    own.add_argument("--device", default="cpu", help="as model.device (default: cpu)")
    own.add_argument("--scores", type=Path, metavar="FILE.csv", help="also write every text's scores")
    folder = "write audit.html, a page to read, audit.json and scores.csv into this folder, readable by you alone"
    own.add_argument("--out", type=Path, metavar="DIR", help=folder)
    limit = (
        f"exit with status {ABOVE_LIMIT} if the audit's figure is above X: auc; epsilon with --prepared; exposure with "
        "--exposure; extracted with --extract; advantage with --attribute; gain with --share; rate with --lying. With "
        f"{CANNOT_TELL} if the audit cannot tell"
    )
    own.add_argument("--fail-above", metavar="NAME=X", help=limit)


def run(chosen: argparse.Namespace) -> int:
    """Make the audit and print it; the exit status shows whether the result is above the limit."""
    if chosen.run_dir is not None:
        raise UsageError(f"name either RUN_DIR, which is {chosen.run_dir}, or --model")
    for name, option in _NEEDED.items():
        if getattr(chosen, name) is None:
            raise UsageError(f"{option} is missing: name the texts that were in the training, and texts that were not")
    limit = limit_of(chosen.fail_above, "auc", "give auc= and a number from 0 to 1, such as auc=0.6")
    if chosen.show_texts and not chosen.out:
        raise UsageError("--show-texts puts texts on the page of an audit: name the folder of the page with --out")
    if chosen.out:  # made before the audit, so that a folder that cannot be made loses no results
        with plainly(UsageError, f"{chosen.out} cannot be written", "name another folder with --out"):
            chosen.out.mkdir(mode=0o700, parents=True, exist_ok=True)
            with TemporaryFile(dir=chosen.out):
                pass
    if chosen.scores:
        _require_writable(chosen.scores)
    from attacks.any_model.report import as_csv, audited, show, written
    from attacks.any_model.shadows import require_fits
    from attacks.any_model.subject import opened
    from secure_fed.runs.durable import atomic_write

    asked = _asked(chosen)
    if asked.recall is not None and asked.data.task not in _LANGUAGE_MODELS:
        raise UsageError(f"--recall is for language models, and the task is {asked.data.task}: leave it out")
    if asked.config is not None:  # before anything is loaded
        require_fits(asked.config, asked, asked.shadows)
    audit = audited(opened(asked), say)
    if chosen.scores:
        atomic_write(chosen.scores, as_csv(audit), private=True)
    print(json.dumps(audit.to_dict())) if chosen.json else show(audit)
    if chosen.out:
        page = written(audit, chosen.out, show_texts=chosen.show_texts)
        print(f"report: {page}", file=sys.stderr if chosen.json else sys.stdout)
    if chosen.fail_above is not None and audit.verdict.level == "void":
        return cannot_tell("members and others differ for another reason than the training")
    if audit.largest_auc <= limit:
        return 0
    return above_limit(f"an AUC of {audit.largest_auc:.3f} is above --fail-above auc={limit:g}")


def _asked(chosen: argparse.Namespace) -> Asked:
    from attacks.any_model.subject import Asked
    from secure_fed.config import DataConfig

    if chosen.neighbour_model and chosen.neighbours is None:
        raise UsageError(
            "--neighbour-model changes the words of neighbours: give their number with --neighbours, such as 25"
        )
    if chosen.neighbours is not None and chosen.neighbours < 1:
        raise UsageError(f"--neighbours is {chosen.neighbours}: give a number from 1, such as 25")
    columns = {name: getattr(chosen, name) for name in ("text", "text_b", "label") if getattr(chosen, name)}
    config = _config(chosen)
    task = chosen.task or "classification"
    require_columns(task, chosen.text_b, chosen.label)
    settings = {} if config is not None else chosen_settings(chosen, task)
    data = DataConfig(train="of the user", task=task, **columns, **settings)
    return Asked(
        chosen.model,
        chosen.members,
        chosen.non_members,
        data if config is None else replace(config.data, train="of the user", test=""),
        chosen.adapter,
        tuple(chosen.reference),
        labels_of(chosen),
        longest(chosen, task) if config is None else config.model.max_length,
        chosen.device,
        date=chosen.date or "",
        shadows=chosen.shadows or 0,
        config=config,
        recall=chosen.recall,
        neighbours=chosen.neighbours or 0,
        neighbour_model=chosen.neighbour_model or "",
        attacks=_own(chosen.attack),
        scale_given=gives_scale(settings),
    )


def _own(names: Sequence[str]) -> tuple[Path, ...]:
    """The files of user-defined signals, which have the names of their files."""
    from attacks.any_model.signals import PAPERS

    stems: dict[str, str] = {}
    for name in names:
        stem = Path(name).stem
        if not name.endswith(".py") or stem in PAPERS:
            raise ConfigError(
                f"--attack is {name!r}: with --model give a .py file of your own whose name is not that of a built-in signal; "
                "the built-in signals are always tried"
            )
        if stem in stems:
            raise ConfigError(
                f"--attack is {name!r}, and {stems[stem]!r} is a signal named {stem!r} too: rename one of the files"
            )
        stems[stem] = name
    return tuple(map(Path, names))


def _config(chosen: argparse.Namespace) -> RunConfig | None:
    """The configuration for training shadows. It defines how texts are read, so no other option may."""
    from secure_fed.config import RunConfig

    if (chosen.shadows is None) != (chosen.config is None):
        raise UsageError(
            "--shadows N and --config CONFIG.toml go together: the configuration says how shadows are trained"
        )
    if chosen.config is None:
        return None
    for name in ("data.task", "data.text", "data.text_b", "data.label", "model.max_length", *SETTINGS):
        option = name.partition(".")[2]
        if getattr(chosen, option) is not None:
            raise UsageError(
                f"--{option.replace('_', '-')} has no place beside --config, whose {name} sets it: leave it out"
            )
    return RunConfig.load(chosen.config)


def _require_writable(place: Path) -> None:
    """Refuse an output file that cannot be written, before the audit starts."""
    with plainly(UsageError, f"{place} cannot be written", "name another file with --scores"):
        if place.is_dir():
            raise IsADirectoryError("it is a folder")
        # Such as /dev/stdout, which a new file would replace.
        if place.is_symlink() or (place.exists() and not place.is_file()):
            raise OSError("it is a link or a device")
        with TemporaryFile(dir=place.parent):
            pass
