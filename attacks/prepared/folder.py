"""The folder of a prepared audit.

train.jsonl            for the training, wherever it happens
candidates.jsonl       for the audit: in the training or not, by a coin each; do not give it to anybody who trains
secrets.jsonl          the names and secrets of planted sentences, in the same order; for the audit too
prepared.json          how to read them, and the SHA-256 of each and of the sealed truth: publish it with the training file
private/truth.json     the coins, sealed: readable by its owner alone, needed only by the audit
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.extraction.template import Planted, Template
from attacks.prepared.coins import Truth, digest, unsealed
from attacks.prepared.kinds import KINDS, TASKS
from attacks.prepared.planted import Row
from secure_fed.errors import DataError, UsageError, plainly
from secure_fed.runs.directory import made_private, private_part
from secure_fed.runs.durable import atomic_write

TRAIN, CANDIDATES, SECRETS = "train.jsonl", "candidates.jsonl", "secrets.jsonl"
MANIFEST, TRUTH = "prepared.json", "truth.json"


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
            f"{folder} was not made by `secure-fed audit prepare` ({MANIFEST} is missing or damaged): name one with "
            "--prepared"
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
