"""The folder of a prepared audit: before anybody trains, coins decide which candidates are in the training.

train.jsonl            for the training, wherever it happens
candidates.jsonl       for the audit: in the training or not, by a coin each; do not give it to anybody who trains
secrets.jsonl          the names and secrets of planted sentences, in the same order; for the audit too
prepared.json          how to read them, and the SHA-256 of each and of the sealed truth: publish it with the training file
private/truth.json     the coins, sealed: readable by its owner alone, needed only by the audit

The sealed file holds the coins and a random nonce of 256 bits. Its SHA-256 is published beside the training file. It is
binding: finding other coins with the same digest is as hard as finding a collision. It is hiding: without the nonce nobody can
test guesses of the coins.

Candidates are rows of the data, or made for the audit, so that one training shows more than with its own rows:

    labels    a row of the data with a wrong label, drawn uniformly from the other classes: a model that has not memorised it
              has no reason to predict it (Steinke, Nasr and Jagielski 2023, section 6)
    secrets   a sentence with a random secret (Carlini et al. 2019, section 4.1), for language models; for chats a question and
              an answer that holds the secret

Each is a copy of a row of the data with its text, conversation or label replaced, so that all other columns look usual.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attacks.adversary.null import Bools
from attacks.extraction.exposure import Planted, Template, order, uniform
from attacks.options import KINDS, TASKS
from privacy.entropy import Entropy, Stream, SystemEntropy
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError, UsageError, plainly
from secure_fed.learning import tasks
from secure_fed.learning.data import files, sources
from secure_fed.learning.data.chats import ASSISTANT, answered, chat_of, rewritten
from secure_fed.learning.data.files import text_lines
from secure_fed.learning.data.rows import Columns, Vocabulary, is_blank, is_chat, normal_text
from secure_fed.learning.tasks.task import Task
from secure_fed.runs.directory import made_private, private_part
from secure_fed.runs.durable import atomic_write

Row = dict[str, Any]
TRAIN, CANDIDATES, SECRETS = "train.jsonl", "candidates.jsonl", "secrets.jsonl"
MANIFEST, TRUTH = "prepared.json", "truth.json"
FEWEST, USUAL = 10, 1000
_LONGEST_TOKEN = 16  # characters of a word that tokenizers may have whole
_ALONE = {"labels": ("classification",), "secrets": ("causal_lm", "chat")}
_NONCE_WORDS = 4


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


def prepare(wish: Wish, out: Path, entropy: Entropy | None = None) -> Manifest:
    """Write the folder of an audit; if the request does not fit, nothing is written.

    Guarantee: given all rows and candidates, the coins are independent and fair, and of the written files only the training
    file and the sealed truth depend on them. So scores of the candidates by a model trained on this file meet the conditions of
    `attacks.evidence.bounds` if their author sees neither file. entropy: the operating system's, except in tests.
    """
    entropy = entropy or SystemEntropy()
    needed = _ALONE.get(wish.kind)
    if needed and wish.data.task not in needed:
        raise ConfigError(
            f"--canaries {wish.kind} is for --task {' or '.join(needed)}, and the task is {wish.data.task}"
        )
    if wish.repeat < 1 or (wish.repeat > 1 and wish.kind == "none"):
        raise ConfigError(
            f"--repeat is {wish.repeat}; it must be at least 1, and above 1 only for planted candidates (--canaries)"
        )
    data = _read(wish)
    count = min(USUAL, len(data.alone) // 2) if wish.count is None else wish.count
    if not FEWEST <= count <= len(data.alone):
        words = " and has two words or more" if _single(wish) else ""
        words = " and has an answer" if wish.data.task == "chat" else words
        raise UsageError(
            f"{count} candidates cannot be drawn from the {len(data.alone)} rows of {wish.source} whose text occurs only once"
            f"{words}: give --count from {FEWEST} to as many, or more rows"
        )
    chosen = [data.alone[index] for index in order(entropy.stream("candidates"), len(data.alone))[:count]]
    rows = [data.rows[index] for index in chosen]
    candidates, canaries = _candidates(wish, data, rows, entropy)
    truth = tossed(count, entropy)
    train = _training(wish, data, chosen, candidates, truth, entropy)
    columns = data.task.columns
    manifest = Manifest(
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
    return write(out, Parts(train, candidates, canaries, truth), manifest)


@dataclass(frozen=True)
class _Data:
    """rows: as written in the file. alone: indices of rows with a unique text, which a language model can learn."""

    task: Task
    rows: list[Row]
    classes: Vocabulary
    alone: list[int]


def _read(wish: Wish) -> _Data:
    task = tasks.build(wish.data)
    table = sources.of_one_party(task, [wish.source], "DATA")[0]
    if files.kind(wish.source) == ".jsonl":  # rows with all columns, including columns that no task reads
        lines = list(text_lines(wish.source))
        rows = [json.loads(lines[number - 1]) for number in table.lines]
    else:
        whole = files.read(wish.source, table.present, "DATA")
        rows = [{name: column[row] for name, column in whole.columns.items()} for row in range(len(whole))]
    first, second = task.texts([table])
    taught = [answered(one) if is_chat(one) else one for one in first]  # nothing after the last answer is
    texts = [json.dumps([*map(normal_text, pair)]) for pair in zip(taught, second or [""] * len(first), strict=True)]
    seen = Counter(texts)
    short = [_nothing_to_predict(wish, text) for text in first]
    alone = [index for index, text in enumerate(texts) if seen[text] == 1 and not short[index]]
    return _Data(task, rows, task.classes([table]), alone)


def _single(wish: Wish) -> bool:
    """Whether a language model learns texts, and not targets of prompts."""
    return wish.data.task == "causal_lm" and not wish.data.text_b


def _nothing_to_predict(wish: Wish, text: Any) -> bool:
    if is_chat(text):
        return all(is_blank(said) for role, said in text if role == ASSISTANT)
    # A text that may be a single token: a language model has nothing to predict, and scores it alike in or out.
    return _single(wish) and len(text.split()) < 2 and len(text) <= _LONGEST_TOKEN


def _candidates(wish: Wish, data: _Data, rows: Sequence[Row], entropy: Entropy) -> tuple[list[Row], list[Planted]]:
    columns, stream = data.task.columns, entropy.stream("planted")
    if wish.kind == "labels":
        return wrong_labels(rows, columns.label, data.classes, stream), []
    if wish.kind == "secrets":
        if wish.data.task == "chat":
            return secret_chats(rows, columns.text, wish.template, stream)
        return secrets(rows, columns, wish.template, stream)
    return list(rows), []


def wrong_labels(rows: Sequence[Row], column: str, classes: Vocabulary, stream: Stream) -> list[Row]:
    """Every row with a label other than its own, in the type and the spelling of the data, and with its name in `<label>_name`.

    Otherwise whoever trains could recognise the planted rows.
    """

    def index(written: Any) -> int:
        """The index of the class, which `Vocabulary` writes its own way."""
        text = str(written).lower() if isinstance(written, bool) else str(written).strip()
        return [str(value) for value in classes.values].index(text)

    def in_type_of(written: Any, value: Any) -> Any:
        """The class in the type in which the data write another one."""
        return str(value) == "true" if isinstance(written, bool) else str(value) if isinstance(written, str) else value

    named = f"{column}_name"
    own = [index(row[column]) for row in rows]
    written: dict[int, Row] = dict(zip(own, rows, strict=True))  # a row of each class
    made, shifts = [], uniform(stream, len(classes.values) - 1, len(rows))
    for row, true, shift in zip(rows, own, shifts, strict=True):
        wrong = (true + 1 + shift) % len(classes.values)
        like = written.get(wrong, {})
        changed = {column: like.get(column, in_type_of(row[column], classes.values[wrong]))}
        if named in row:
            changed[named] = like.get(named, classes.names[wrong])
        made.append({**row, **changed})
    return made


def secrets(
    rows: Sequence[Row], columns: Columns, template: Template, stream: Stream
) -> tuple[list[Row], list[Planted]]:
    """Every row with its text replaced by a sentence; if prompts have targets, the target begins with the secret."""
    canaries = template.drawn(len(rows), stream)
    made = []
    for row, one in zip(rows, canaries, strict=True):
        if columns.text_b:
            before, after = template.pair(one)
            if not before:
                raise ConfigError(
                    f"the template {template.text!r:.80} begins with its secret: put a prompt before {{secret}}"
                )
            made.append({**row, columns.text: before, columns.text_b: after})
        else:
            made.append({**row, columns.text: template.written(one)})
    return made, canaries


def secret_chats(
    rows: Sequence[Row], column: str, template: Template, stream: Stream
) -> tuple[list[Row], list[Planted]]:
    """Every row with its conversation replaced by a question and its answer, which holds the secret. column: "" or the column
    of the turns.
    """
    canaries, made = template.drawn(len(rows), stream), []
    for row, one in zip(rows, canaries, strict=True):
        question, answer = template.turns(one)
        if not question.strip():
            raise ConfigError(
                f"the template {template.text!r:.80} has no question: put a line with it before that of {{secret}}"
            )
        made.append(rewritten(row, column, chat_of(question, answer)))
    return made, canaries


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


@dataclass(frozen=True, eq=False, repr=False)
class Truth:
    """members: (candidates,) whether each is in the training."""

    members: Bools
    nonce: str

    def sealed(self) -> bytes:
        """The content of the sealed file."""
        coins = "".join("1" if one else "0" for one in self.members)
        return json.dumps({"schema": 1, "nonce": self.nonce, "members": coins}).encode() + b"\n"


def tossed(count: int, entropy: Entropy) -> Truth:
    """A fair coin for each of `count` candidates, independent of everything else, and a nonce."""
    coins: Bools = (entropy.stream("coins").words(count) >> np.uint64(63)).astype(bool)
    return Truth(coins, entropy.stream("nonce").words(_NONCE_WORDS).tobytes().hex())


def unsealed(content: bytes, commitment: str, count: int, place: object) -> Truth:
    """The truth, if it matches the commitment; else DataError."""
    if digest(content) != commitment:
        raise DataError(
            f"{place} was changed after sealing: its SHA-256 is {digest(content):.12}..., and {commitment:.12}... was "
            "published; put back the file that `audit prepare` wrote"
        )
    found: dict[str, Any] = json.loads(content)
    members = np.array([one == "1" for one in found["members"]], dtype=bool)
    if len(members) != count:
        raise DataError(
            f"{place} says of {len(members)} candidates whether they train, and there are {count}; prepare the audit again"
        )
    return Truth(members, str(found["nonce"]))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """prepared.json. candidates: their number. template: a sentence and its number of digits, if secrets were planted. digests:
    of the files, by name; commitment: to the truth.
    """

    task: str
    text: str
    text_b: str
    label: str
    kind: str
    candidates: int
    repeat: int = 1
    classes: tuple[int | str, ...] = ()
    template: tuple[str, int] | None = None
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    commitment: str = ""
    schema: int = 1


@dataclass(frozen=True)
class Parts:
    """The content of the files. planted: the candidates' secrets, if they are sentences with secrets."""

    train: Sequence[Row]
    candidates: Sequence[Row]
    planted: Sequence[Planted]
    truth: Truth


def write(out: Path, parts: Parts, manifest: Manifest) -> Manifest:
    """Write all files. The manifest is written last: a folder without it is incomplete."""
    with plainly(UsageError, f"{out} cannot be made", "name another folder with --out"):
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"{out} is not empty: name a new folder with --out")
        out.mkdir(parents=True, exist_ok=True)
    content = {TRAIN: _lines(parts.train), CANDIDATES: _lines(parts.candidates)}
    if parts.planted:
        content[SECRETS] = _lines([dataclasses.asdict(one) for one in parts.planted])
    atomic_write(made_private(out) / TRUTH, parts.truth.sealed(), private=True)
    for name, text in content.items():
        atomic_write(out / name, text)
    digests = {name: digest(text) for name, text in content.items()}
    whole = dataclasses.replace(manifest, digests=digests, commitment=digest(parts.truth.sealed()))
    atomic_write(out / MANIFEST, json.dumps(dataclasses.asdict(whole), indent=1, ensure_ascii=False) + "\n")
    return whole


def _lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows).encode()


def read(folder: Path) -> Manifest:
    """The manifest of a folder, after a check that the candidates and, if present, the training file are unchanged."""
    try:
        found: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        template = found["template"] and tuple(found["template"])
        manifest = Manifest(**{**found, "classes": tuple(found["classes"]), "template": template})
        _require_whole(manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} was not made by `secure-fed audit prepare` ({MANIFEST} is missing or damaged): name one as DIR"
        ) from error
    for name, published in manifest.digests.items():
        gone = name == TRAIN and not (folder / name).exists()  # it may only be where the training happens
        if not gone and digest(_content(folder / name)) != published:
            raise DataError(
                f"{folder / name} has been changed since it was prepared: its SHA-256 is not the published one"
            )
    return manifest


def _require_whole(manifest: Manifest) -> None:
    """ValueError unless the manifest has everything that `write` puts there, including every file's digest."""
    texts = (manifest.task, manifest.text, manifest.text_b, manifest.label, manifest.kind, manifest.commitment)
    counts = (manifest.candidates, manifest.repeat)
    files = {TRAIN, CANDIDATES} | ({SECRETS} if manifest.template else set())
    kinds = {type(one) for one in texts} == {str} and {type(one) for one in counts} == {int}
    if not kinds or manifest.task not in TASKS or manifest.kind not in KINDS or set(manifest.digests) != files:
        raise ValueError(f"{MANIFEST} is damaged")


def planted_in(folder: Path, manifest: Manifest) -> tuple[Template, list[Planted]]:
    """The template, and the canary of each candidate. DataError for a folder without planted sentences."""
    if manifest.template is None:
        raise DataError(
            f"{folder} has no planted secrets: prepare it with `secure-fed audit prepare --canaries secrets`, for --task "
            "causal_lm or chat"
        )
    lines = _content(folder / SECRETS).decode().splitlines()
    return Template(*manifest.template), [Planted(**json.loads(line)) for line in lines]


def truth_of(folder: Path, manifest: Manifest) -> Truth:
    """The sealed coins, checked against the commitment."""
    place = private_part(folder) / TRUTH
    return unsealed(_content(place), manifest.commitment, manifest.candidates, place)


def _content(place: Path) -> bytes:
    with plainly(DataError, f"{place} cannot be read", "it belongs to the prepared audit: put it back"):
        return place.read_bytes()
