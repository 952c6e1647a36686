"""Preparing an audit: before anybody trains, coins decide which candidates are in the training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks.extraction.template import Planted, Template, order, uniform
from attacks.prepared import planted
from attacks.prepared.coins import Truth, tossed
from attacks.prepared.folder import Manifest, Parts, write
from attacks.prepared.planted import Row
from privacy.entropy import Entropy, SystemEntropy
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, UsageError
from secure_fed.learning import tasks
from secure_fed.learning.data import files, sources
from secure_fed.learning.data.chats import ASSISTANT
from secure_fed.learning.data.formats import text_lines
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.data.table import Table
from secure_fed.learning.data.texts import is_blank, is_chat, normal
from secure_fed.learning.tasks.task import Task

FEWEST, USUAL = 10, 1000
_LONGEST_TOKEN = 16  # characters of a word that tokenizers may have whole
_ALONE = {"labels": ("classification",), "secrets": ("causal_lm", "chat")}


@dataclass(frozen=True)
class Wish:
    """The request for an audit. kind: "none", "labels" or "secrets". count: of candidates; None for a thousand, or half of the
    rows if that is fewer. repeat: the number of copies of a planted candidate in the training file.
    """

    source: Path
    data: DataConfig
    kind: str = "none"
    count: int | None = None
    repeat: int = 1
    template: Template = field(default_factory=Template)


@dataclass(frozen=True)
class _Data:
    """rows: as written in the file. alone: indices of rows with a unique text, which a language model can learn."""

    task: Task
    rows: list[Row]
    classes: Vocabulary
    alone: list[int]


def prepare(wish: Wish, out: Path, entropy: Entropy | None = None) -> Manifest:
    """Write the folder of an audit; if the request does not fit, nothing is written.

    Guarantee: given all rows and candidates, the coins are independent and fair, and of the written files only the training
    file and the sealed truth depend on them. So scores of the candidates by a model trained on this file meet the conditions of
    `attacks.evidence.guessing` if their author sees neither file. entropy: the operating system's, except in tests.
    """
    entropy = entropy or SystemEntropy()
    _require(wish)
    data = _read(wish)
    count = _count(wish, data)
    chosen = [data.alone[index] for index in order(entropy.stream("candidates"), len(data.alone))[:count]]
    rows = [data.rows[index] for index in chosen]
    candidates, canaries = _candidates(wish, data, rows, entropy)
    truth = tossed(count, entropy)
    train = _training(wish, data, chosen, candidates, truth, entropy)
    return write(out, Parts(train, candidates, canaries, truth), _manifest(wish, data, count))


def _require(wish: Wish) -> None:
    needed = _ALONE.get(wish.kind)
    if needed and wish.data.task not in needed:
        raise ConfigError(
            f"--canaries {wish.kind} is for --task {' or '.join(needed)}, and the task is {wish.data.task}"
        )
    if wish.repeat < 1 or (wish.repeat > 1 and wish.kind == "none"):
        raise ConfigError(
            f"--repeat is {wish.repeat}; it must be at least 1, and above 1 only for planted candidates (--canaries)"
        )


def _read(wish: Wish) -> _Data:
    task = tasks.build(wish.data)
    table = sources.of_one_party(task, [wish.source], "DATA")[0]
    rows = _whole(wish.source, table)
    first, second = task.texts([table])
    texts = [_key(*pair) for pair in zip(first, second or [None] * len(first), strict=True)]
    seen = Counter(texts)
    short = [_nothing_to_predict(wish, text) for text in first]
    alone = [index for index, text in enumerate(texts) if seen[text] == 1 and not short[index]]
    return _Data(task, rows, task.classes([table]), alone)


def _key(first: Any, second: Any) -> str:
    return json.dumps([normal(first), normal(second or "")])


def _single(wish: Wish) -> bool:
    """Whether a language model learns texts, and not targets of prompts."""
    return wish.data.task == "causal_lm" and not wish.data.text_b


def _nothing_to_predict(wish: Wish, text: Any) -> bool:
    if is_chat(text):
        return all(is_blank(said) for role, said in text if role == ASSISTANT)
    return _single(wish) and _one_token(text)


def _one_token(text: str) -> bool:
    """Whether a text may be a single token: then a language model has nothing to predict, and scores it alike in or out."""
    return len(text.split()) < 2 and len(text) <= _LONGEST_TOKEN


def _whole(source: Path, table: Table) -> list[Row]:
    """The rows with all columns, including columns that no task reads."""
    if files.kind(source) == ".jsonl":
        lines = list(text_lines(source))
        return [json.loads(lines[number - 1]) for number in table.lines]
    whole = files.read(source, table.present, "DATA")
    return [{name: column[row] for name, column in whole.columns.items()} for row in range(len(whole))]


def _count(wish: Wish, data: _Data) -> int:
    count = min(USUAL, len(data.alone) // 2) if wish.count is None else wish.count
    if not FEWEST <= count <= len(data.alone):
        words = " and has two words or more" if _single(wish) else ""
        words = " and has an answer" if wish.data.task == "chat" else words
        raise UsageError(
            f"{count} candidates cannot be drawn from the {len(data.alone)} rows of {wish.source} whose text occurs only once"
            f"{words}: give --count from {FEWEST} to as many, or more rows"
        )
    return count


def _candidates(wish: Wish, data: _Data, rows: Sequence[Row], entropy: Entropy) -> tuple[list[Row], list[Planted]]:
    columns, stream = data.task.columns, entropy.stream("planted")
    if wish.kind == "labels":
        return planted.wrong_labels(rows, columns.label, data.classes, stream), []
    if wish.kind == "secrets":
        if wish.data.task == "chat":
            return planted.secret_chats(rows, columns.text, wish.template, stream)
        return planted.secrets(rows, columns, wish.template, stream)
    return list(rows), []


def _training(
    wish: Wish, data: _Data, chosen: Sequence[int], candidates: Sequence[Row], truth: Truth, entropy: Entropy
) -> list[Row]:
    """The training rows: all rows that are not candidates, and the candidates whose coin says so.

    Rows keep their order. Planted rows are inserted at random places, because the last rows of a file may count more. The
    originals of rows with a wrong label do not train, so that the model learns about them from the canary alone.
    """
    members = [row for row, member in zip(candidates, truth.members, strict=True) if member]
    if wish.kind == "none":
        out = {index for index, member in zip(chosen, truth.members, strict=True) if not member}
        return [row for index, row in enumerate(data.rows) if index not in out]
    left = set(chosen) if wish.kind == "labels" else set()
    train = [row for index, row in enumerate(data.rows) if index not in left]
    added = members * wish.repeat
    places = uniform(entropy.stream("places"), len(train) + 1, len(added))
    inserted: dict[int, list[Row]] = {}
    for place, row in zip(places, added, strict=True):
        inserted.setdefault(place, []).append(row)
    return [row for index in range(len(train) + 1) for row in (*inserted.get(index, ()), *train[index : index + 1])]


def _manifest(wish: Wish, data: _Data, count: int) -> Manifest:
    columns = data.task.columns
    return Manifest(
        task=wish.data.task,
        text=columns.text,
        text_b=columns.text_b,
        label=columns.label,
        kind=wish.kind,
        candidates=count,
        repeat=wish.repeat,
        classes=tuple(data.classes.values),
        template=(wish.template.text, wish.template.digits) if wish.kind == "secrets" else None,
    )
