"""`secure-fed audit extract MODEL FILE`: texts that a language model reproduces."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attacks.options import (
    OF_CHATS,
    Asked,
    add_chat_template,
    add_limit,
    add_model_arguments,
    chosen_settings,
    exit_status,
    limit_of,
    longest,
    require_columns,
    say,
)
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, UsageError

PREFIX = SUFFIX = 32
_TASKS = ("causal_lm", "chat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `audit extract`."""
    add_model_arguments(parser)
    add = parser.add_argument
    texts = "texts that were in the training; the model gets their beginnings"
    add("texts", type=Path, metavar="FILE", help=texts)
    either = " or ".join(_TASKS)
    add("--task", choices=_TASKS, default=_TASKS[0], metavar="TASK", help=f"{either} (default: {_TASKS[0]})")
    add("--text", metavar="COLUMN", help="as data.text")
    add("--text-b", metavar="COLUMN", help="as data.text_b")
    add("--prefix", type=int, metavar="TOKENS", help=f"length of the beginning (default: {PREFIX})")
    add("--suffix", type=int, metavar="TOKENS", help=f"length of the continuation to look for (default: {SUFFIX})")
    answers = "give a conversation up to the assistant's last answer, in the place of --prefix (--task chat)"
    add("--answers", action="store_true", help=answers)
    add("--max-length", type=int, metavar="TOKENS", help=f"cut longer conversations (--task chat; default: {OF_CHATS})")
    add_chat_template(parser)
    unseen = "a model that never saw the texts; may be repeated"
    add("--reference", action="append", default=[], metavar="NAME", help=unseen)
    add("--show-texts", action="store_true", help="print the texts that came back")
    add_limit(parser, "extracted")


def run(chosen: argparse.Namespace) -> int:
    """Make the extraction and print it; the exit status shows whether more texts were reproduced than the limit."""
    task = chosen.task
    if chosen.answers and (task != "chat" or chosen.prefix is not None):
        raise UsageError("--answers is for --task chat, and in the place of --prefix: leave it out, or --prefix")
    if task != "chat" and chosen.max_length is not None:
        raise UsageError("--max-length is for --task chat: of a text, --prefix and --suffix say how much is read")
    how = "give extracted= and a share of the texts, such as extracted=0.01"
    limit = limit_of(chosen.fail_above, "extracted", how)
    prefix = None if chosen.answers else _length(chosen, "prefix", PREFIX)
    suffix = _length(chosen, "suffix", SUFFIX)
    require_columns(task, chosen.text_b, None)
    settings = chosen_settings(chosen, task)
    data = DataConfig("", "of the user", "", task, chosen.text or "", chosen.text_b or "", **settings)
    most = longest(chosen, task) if task == "chat" else (prefix or 0) + suffix
    of_model = chosen.adapter, tuple(chosen.reference), (), most, chosen.device
    asked = Asked(chosen.model, chosen.texts, None, data, *of_model, all_in="FILE")
    asked.require_files()
    from attacks.any_model.subject import opened
    from attacks.extraction.prefix import extracted

    subject = opened(asked)
    facts = extracted(subject, prefix, suffix, say, show_texts=chosen.show_texts)
    print(json.dumps(facts)) if chosen.json else _show(facts)
    share = facts["only_by_the_model"] / facts["tried"]
    return exit_status(share, limit, f"{share:.3f} of the texts came back, above --fail-above extracted={limit:g}")


def _length(chosen: argparse.Namespace, name: str, usual: int) -> int:
    length = getattr(chosen, name)
    if length is not None and length < 1:
        raise ConfigError(f"--{name} is {length}; it must be at least 1")
    return usual if length is None else int(length)


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Column, Table

    from secure_fed.report.terminal import PlainConsole

    console, adapter = PlainConsole(), f" with {facts['adapter']}" if facts["adapter"] else ""
    console.print(
        f"{facts['model']}{adapter}: {facts['only_by_the_model']} of {facts['tried']} texts came back", style="bold"
    )
    controls = ". There is no reference that never saw them: add --reference."
    if any(one["never_saw"] for one in facts["readers"]):
        controls = ", and by no model that never saw it."
    of_texts = " of its texts" if facts["task"] == "chat" else ""
    begun = f"its first {facts['prefix']} tokens{of_texts}"
    if facts["prefix"] is None:
        begun = "everything before its last answer"
    console.print(
        f"Given {begun}, each of these was continued by its own next {facts['suffix']}, verbatim or "
        f"nearly (at most {1 - facts['near_from']:.0%} of the tokens edited){controls}"
    )
    if facts["returned"]:
        rows = ", ".join(str(one["text"]) for one in facts["returned"])
        console.print(f"The closest, by their rows in the file, from 0: {rows}.")
    if facts["tried"] < facts["texts"]:
        console.print(f"{facts['texts'] - facts['tried']} of {facts['texts']} texts are too short to be tried.")
    heads = ("verbatim", "nearly", f"expected in {facts['draws']} draws", "personal data")
    table = Table("continued by", *(Column(head, justify="right") for head in heads))
    for one in facts["readers"]:
        counts = one["verbatim"], one["near"], f"{one['expected_in_draws']:.1f}", sum(one["personal"].values())
        table.add_row(one["model"], *map(str, counts))
    console.print(table)
    if facts["personal_in_texts"]:
        kinds = ", ".join(
            f"{facts['readers'][0]['personal'].get(kind, 0)} of {count} ({kind})"
            for kind, count in sorted(facts["personal_in_texts"].items())
        )
        console.print(f"Personal data that the model gives back: {kinds}.")
    for one in facts["returned"]:
        if "written" in one:
            console.print(f"text {one['text']}: {one['beginning']!r} ... {one['written']!r}", markup=False)
