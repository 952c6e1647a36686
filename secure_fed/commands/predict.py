"""`secure-fed predict`: for each text, the answer of a trained run, with the text's id or line and its beginning."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fed.activity import activity
from secure_fed.config import RunConfig
from secure_fed.config.settings import WRITE
from secure_fed.errors import ConfigError, DataError, UsageError

if TYPE_CHECKING:
    from secure_fed.export.trained import Trained
    from secure_fed.learning.data.rows import Columns, Table

_IDS = ("id", "idx", "guid", "uid")
_SHOWN = 80  # characters of a text
_NEW_TOKENS = 32
_WRITTEN = (".jsonl", ".csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `secure-fed predict` besides the run."""
    read = "as for training, or .txt, one text a line; default: lines of stdin"
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=read)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write .jsonl or .csv, instead of printing JSON lines")
    new = f"tokens to write after a text ({'|'.join(WRITE)}; default: {_NEW_TOKENS}; 0: none)"
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help=new)
    temperature = "draw tokens at this temperature (default: the most likely token)"
    parser.add_argument("--temperature", type=float, metavar="T", help=temperature)
    parser.add_argument("--seed", type=int, metavar="SEED", help="seed of the draws (default: 0)")


def run(chosen: argparse.Namespace) -> None:
    """A file is read before the run and torch are loaded, so that its errors are reported early; standard input after."""
    from secure_fed.learning.data.chats import QUESTION
    from secure_fed.learning.data.files import read_stream
    from secure_fed.learning.data.rows import columns_of
    from secure_fed.runs.directory import read_config, read_facts
    from secure_fed.runs.durable import require_new

    read_facts(chosen.run_dir)
    config = read_config(chosen.run_dir)
    require_new(chosen.out, "answers", _WRITTEN)
    new_tokens = _new_tokens(chosen, config)
    read = columns_of(config.data)
    table = None if chosen.file is None else _of_file(chosen.file, read, config.data.task, prompts=new_tokens > 0)
    if table is None and read.text_b and not new_tokens:
        raise ConfigError("this run labels pairs of texts, which lines of standard input cannot hold; name a FILE")
    from secure_fed.export import trained

    loaded = trained.load_run(chosen.run_dir, chosen.client, best=chosen.best)
    if table is None:
        with activity("", hushed=True):  # a person may be typing
            table = read_stream(
                sys.stdin.buffer if sys.stdin else (),
                "standard input",
                QUESTION if config.data.task == "chat" else read.text,
            )
    answers = _answers(loaded, table, read, new_tokens, chosen.temperature or 0.0, chosen.seed or 0)
    shown = _shown(table, read, config.data.task)
    rows = [_named(table, row) | {"text": shown[row]} | answer for row, answer in enumerate(answers)]
    if chosen.out is None:
        for row in rows:
            print(json.dumps(row, default=str))
    else:
        _write(chosen.out, rows)


def _new_tokens(chosen: argparse.Namespace, config: RunConfig) -> int:
    """The number of tokens to generate after each text. --max-new-tokens and --temperature need a task that generates."""
    generates = config.data.task in WRITE
    count = _NEW_TOKENS if chosen.max_new_tokens is None else int(chosen.max_new_tokens)
    for option, value in (("--max-new-tokens", chosen.max_new_tokens), ("--temperature", chosen.temperature)):
        if value is not None and not generates:
            raise ConfigError(
                f"{option} has no effect: this run's data.task is {config.data.task!r}, which writes no texts"
            )
    if count < 0:
        raise ConfigError(f"--max-new-tokens is {count}, but it must be at least 0")
    if chosen.temperature is not None and not 0 < chosen.temperature < math.inf:
        raise ConfigError(
            f"--temperature is {chosen.temperature}, but it must be above 0; leave it out for the likeliest"
        )
    if chosen.seed is not None and chosen.temperature is None:
        raise ConfigError(f"--seed {chosen.seed} has no effect without --temperature: nothing is drawn")
    return count if generates else 0


def _of_file(file: Path, columns: Columns, task: str, *, prompts: bool) -> Table:
    """The columns of the task, and the columns that identify a row. prompts: whether a first text alone is enough."""
    from secure_fed.learning.data import chats, files
    from secure_fed.learning.data.files import read_lines

    if task == "chat":
        if files.kind(file) == ".txt":
            return read_lines(file, chats.QUESTION)
        return files.read(file, [*chats.COLUMNS, columns.text, *_IDS], "FILE")
    pairs = columns.text_b and not prompts
    if files.kind(file) == ".txt":
        if pairs:
            names = f"{columns.text!r} and {columns.text_b!r}"
            raise UsageError(f"{file} has one text a line, but this run labels pairs; give columns {names}")
        return read_lines(file, columns.text)
    wanted = dict.fromkeys(name for name in (columns.text, columns.text_b, *_IDS) if name)
    table = files.read(file, wanted, "FILE")
    for name in (columns.text, columns.text_b)[: 2 if pairs else 1]:
        if name not in table.columns:
            there = ", ".join(map(repr, table.present))
            raise DataError(f"{file} has no column {name!r}, which this run reads: it has {there}; rename one of them")
    return table


def _answers(
    run: Trained, table: Table, columns: Columns, new_tokens: int, temperature: float, seed: int
) -> Iterator[dict[str, Any]]:
    """The answers of the task, and with `new_tokens` a language model's continuation of each text."""
    from secure_fed.learning import tasks
    from secure_fed.learning.data.rows import text_column

    task, judged = tasks.build(run.config.data), iter([dict[str, Any]()] * len(table))
    pairs = not columns.text_b or columns.text_b in table.columns
    texts = task.texts([table]) if pairs else (text_column(table, columns.text, "data.text"), None)
    if pairs:
        judged = run.predict(*texts)
    if not new_tokens:
        yield from judged
        return
    written = run.generate(texts[0], new_tokens, temperature=temperature, seed=seed)
    yield from (answer | {"continuation": text} for answer, text in zip(judged, written, strict=True))


def _named(table: Table, row: int) -> dict[str, Any]:
    """The row's id, or its place in its file."""
    named = {name: table.columns[name][row] for name in _IDS if name in table.columns}
    return named or {table.unit: table.lines[row]}


def _shown(table: Table, columns: Columns, task: str) -> list[str]:
    """The beginning of each row's text; of a conversation, of what the assistant is asked last."""
    from secure_fed.learning.data import chats

    if task == "chat":
        texts = [chats.unanswered(chat)[-1][1] for chat in chats.chats(table, columns.text)]
    else:
        cells = table.columns[columns.text]
        texts = [" ".join(map(str, cell)) if isinstance(cell, list | tuple) else str(cell) for cell in cells]
    return [text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…" for text in texts]


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows in one step, in the format of the file's ending; lists in CSV are JSON."""
    from secure_fed.runs.durable import write_new

    if out.suffix.lower() == ".csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
        content = text.getvalue()
    else:
        content = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    write_new(out, content)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | tuple | dict) else value
