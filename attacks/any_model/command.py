"""`secure-fed audit model MODEL --members FILE --non-members FILE`: the audit of a model trained elsewhere."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

from attacks.options import (
    CANNOT_TELL,
    LENGTH,
    OF_CHATS,
    SETTINGS,
    TASKS,
    Asked,
    add_limit,
    add_model_arguments,
    add_task_arguments,
    cannot_tell,
    chosen_settings,
    exit_status,
    gives_scale,
    limit_of,
    require_columns,
    say,
)
from secure_fed.config import DataConfig, RunConfig
from secure_fed.errors import ConfigError, UsageError, plainly

_LANGUAGE_MODELS = ("causal_lm", "chat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `audit model`, whose help is one screen."""
    parser.usage = "%(prog)s MODEL --members FILE --non-members FILE [OPTION ...]"
    add_model_arguments(parser)
    add = parser.add_argument
    add("--members", type=Path, required=True, metavar="FILE", help="texts of the training, one a row")
    add("--non-members", type=Path, required=True, metavar="FILE", help="texts of the same kind outside it")
    add("--task", choices=TASKS, metavar="TASK", help="as data.task (default: classification)")
    add("--text", metavar="COLUMN", help="as data.text")
    add("--text-b", metavar="COLUMN", help="as data.text_b")
    add("--label", metavar="COLUMN", help="as data.label")
    add("--labels", metavar="A,B,...", help="the classes in the order of the model's outputs")
    add("--date", metavar="COLUMN", help="dates, by which members and others must not differ")
    add("--max-length", type=int, metavar="TOKENS", help=f"cut longer texts (default: {LENGTH}; chats: {OF_CHATS})")
    add_task_arguments(parser)
    unseen = "a model that never saw the members; may be repeated"
    add("--reference", action="append", default=[], metavar="NAME", help=unseen)
    add("--shadows", type=int, metavar="N", help="train N models (16) for LiRA and RMIA, by --config")
    add("--config", type=Path, metavar="TOML", help="their configuration, as for `secure-fed train`")
    add("--recall", type=Path, metavar="FILE", help="texts of no training, for ReCaLL (language models)")
    add("--neighbours", type=int, metavar="N", help="compare each text with N changed copies (25)")
    add("--neighbour-model", metavar="NAME", help="a masked language model that changes words")
    add("--attack", action="append", default=[], metavar="FILE.py", help="a signal of your own; may be repeated")
    add("--scores", type=Path, metavar="FILE.csv", help="also write every text's scores")
    add("--out", type=Path, metavar="DIR", help="write audit.html, audit.json and scores.csv here")
    add("--show-texts", action="store_true", help="show the texts that stand out in audit.html")
    add_limit(parser, "auc", f" ({CANNOT_TELL} if it cannot tell)")


def run(chosen: argparse.Namespace) -> int:
    """Make the audit and print it; the exit status shows whether the result is above the limit."""
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
    asked = _asked(chosen)
    if asked.recall is not None and asked.data.task not in _LANGUAGE_MODELS:
        raise UsageError(f"--recall is for language models, and the task is {asked.data.task}: leave it out")
    asked.require_files()
    from attacks.any_model.report import as_csv, audited, show, written
    from attacks.any_model.shadows import require_fits
    from attacks.any_model.subject import opened
    from secure_fed.runs.durable import atomic_write

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
    auc = max(one.ranking.auc for one in audit.found.values())
    return exit_status(auc, limit, f"an AUC of {auc:.3f} is above --fail-above auc={limit:g}")


def _asked(chosen: argparse.Namespace) -> Asked:
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
    asked = Asked.of(chosen, chosen.members, chosen.non_members, data)
    if config is not None:
        data = replace(config.data, train="of the user", test="")
        asked = replace(asked, data=data, max_length=config.model.max_length, config=config)
    return replace(
        asked,
        date=chosen.date or "",
        shadows=chosen.shadows or 0,
        recall=chosen.recall,
        neighbours=chosen.neighbours or 0,
        neighbour_model=chosen.neighbour_model or "",
        attacks=_own(chosen.attack) if chosen.attack else (),
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
                f"--attack is {name!r}: give a .py file of your own whose name is not that of a built-in signal; "
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
