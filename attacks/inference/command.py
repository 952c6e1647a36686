"""`secure-fed audit model MODEL --attribute COLUMN`, and `secure-fed audit share RUN_DIR WORD`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attacks.options import Asked, add_limit, cannot_tell, exit_status, limit_of, refuse, say
from secure_fed.config import DataConfig
from secure_fed.errors import UsageError
from secure_fed.runs.directory import read_facts

_UNREAD = (
    "reference shadows config recall neighbours neighbour_model date scores out show_texts attack stride unanswerable "
    "label_centre label_scale chat_template"
)
_TASKS = ("classification", "multi_label", "regression", "causal_lm")


def add_share(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `audit share`."""
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="its clients each make an update from the final model"
    )
    parser.add_argument("word", metavar="WORD", help="guess which share of a client's texts contain it")
    add_limit(parser, "gain")


def run(chosen: argparse.Namespace) -> int:
    """Make the audit and print it; the exit status shows whether the advantage is above the limit."""
    refuse(chosen, _UNREAD, "has no effect beside --attribute")
    task = chosen.task or "classification"
    if task not in _TASKS:
        raise UsageError(
            f"--task is {task}, and --attribute changes a text as a whole, without tags, answers or turns in it: it is for "
            f"{', '.join(_TASKS)}"
        )
    limit = limit_of(chosen.fail_above, "advantage", "with --attribute give advantage= and a number from 0 to 1")
    columns = chosen.text or "", chosen.text_b or "", chosen.label or ""
    data = DataConfig("", "of the user", "", task, *columns)
    asked = Asked.of(chosen, chosen.members, chosen.non_members, data)
    asked.require_files()
    from attacks.any_model.subject import opened
    from attacks.inference.attribute import attribute, audited

    subject = opened(asked)
    found = attribute(subject, chosen.attribute)
    facts = audited(subject, found, say)
    print(json.dumps(facts)) if chosen.json else _show(facts)
    if chosen.fail_above is not None and facts["verdict"] == "void":
        return cannot_tell("members and others differ without any model")
    advantage = facts["guesses"][0]["advantage"]
    above = f"an advantage of {advantage:.3f} is above --fail-above advantage={limit:g}"
    return exit_status(advantage, limit, above)


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Column, Table

    from attacks.report.phrases import CAPITALS
    from secure_fed.report.terminal import PlainConsole

    console = PlainConsole()
    console.print(f"verdict on {facts['attribute']} in {facts['model']}: {CAPITALS[facts['verdict']]}", style="bold")
    for sentence in facts["sentences"]:
        console.print(sentence)
    table = Table("guessed by", *(Column(head, justify="right") for head in ("members", "others", "advantage")))
    for one in facts["guesses"]:
        table.add_row(one["by"], f"{one['members']:.1%}", f"{one['others']:.1%}", f"{one['advantage']:+.1%}")
    console.print(table)
    counts = f"{facts['members']} members and {facts['non_members']} others, {facts['values']} values"
    console.print(f"{counts}; the adversary knows a record except for its {facts['attribute']}")


def run_share(chosen: argparse.Namespace) -> int:
    """Make the audit and print it; the exit status shows whether the gain is above the limit."""
    limit = limit_of(chosen.fail_above, "gain", "give gain= and a number from 0 to 1")
    read_facts(chosen.run_dir)
    from attacks.adversary.case import Inapplicable
    from attacks.inference.share import audited

    try:
        found = audited(chosen.run_dir, chosen.word, say)
    except Inapplicable as error:
        raise UsageError(f"this audit does not apply: {error}") from error
    if chosen.json:
        print(json.dumps(found))
    else:
        from attacks.report.phrases import CAPITALS

        print(f"verdict on the share of {found['word']!r} in {found['clients']} clients: {CAPITALS[found['verdict']]}")
        print("\n".join(found["sentences"]))
    gain = 0.0 if found["verdict"] == "nothing" else found["gain"]
    return exit_status(gain, limit, f"a gain of {gain:.3f} is above --fail-above gain={limit:g}")
