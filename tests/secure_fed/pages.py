"""Edits of the hand-made run of `conftest`, and the text of its report: whole, or the lines in which two reports differ."""

from __future__ import annotations

import difflib
import html
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.report.page import write_report

Run = dict[str, Any]
Edit = Callable[[Run], None]
RunFolder = Callable[..., Path]
GONE = ...  # a value that is removed


def changed(values: Mapping[str, Any], *first: Edit) -> Edit:
    """An edit: after those `first`, values by their paths, such as "result.rounds", "rows.2.loss" or "rows.*.loss"."""

    def edit(run: Run) -> None:
        for one in first:
            one(run)
        for path, value in values.items():
            _put(run, path.split("."), value)

    return edit


def _put(at: Any, path: list[str], value: Any) -> None:
    place, *rest = path
    name: Any = int(place) if isinstance(at, list) and place != "*" else place
    if name == "*":
        for one in at:
            _put(one, rest, value)
    elif rest:
        _put(at[name] if isinstance(at, list) else at.setdefault(name, {}), rest, value)
    elif value is GONE:
        at.pop(name, None)
    else:
        at[name] = value


def told(folder: Path) -> str:
    """The report in one line, without markup."""
    return text_of(write_report(folder))


def text_of(file: Path) -> str:
    """A page in one line, without markup."""
    page = file.read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)))


def _lines(folder: Path) -> list[str]:
    """The report line by line: a sentence, a row of a table, or a drawing's name and words; of settings those that were set."""
    page = write_report(folder).read_text(encoding="utf-8")
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    page = re.sub(r"<svg.*?</svg>", _drawing, page, flags=re.DOTALL)
    page = re.sub(r"\b[0-9a-f]{64}\b", "DIGEST", page)
    page = re.sub(r"</t[hd]><t", " | <t", page.replace("</dt>", ": "))
    text = re.sub(r"(?<=[a-z)%]\.) (?=[A-Z])", "\n", html.unescape(re.sub(r"<[^>]*>", "", page)))
    return [line.strip() for line in text.splitlines() if line.strip() and line.strip() not in _unset()]


@cache
def _unset() -> set[str]:
    tables = RunConfig().to_dict().items()
    values = {f"{section}.{key}": value for section, table in tables for key, value in table.items()}
    return {f"{name} | {one if isinstance(one, str) and one else json.dumps(one)}" for name, one in values.items()}


def _drawing(found: re.Match[str]) -> str:
    """Its name, and the words of a picture or the labels of the lines of a plot."""
    words = re.findall(r"<text[^>]*>([^<]*)<", found[0]) + re.findall(r"Series\(label=&#x27;(.*?)&#x27;", found[0])
    (name,) = re.findall(r'<svg[^>]*aria-label="([^"]*)"', found[0])
    return f"\n[{': '.join([name, ' · '.join(words)] if words else [name])}]\n"


def differences(one: list[str], other: list[str]) -> Iterator[str]:
    """The lines of `other` that `one` lacks (+) and the reverse (-), in order."""
    for line in difflib.unified_diff(one, other, n=0, lineterm=""):
        if not line.startswith(("---", "+++", "@@")):
            yield line


def reports(run_folder: RunFolder, cases: Mapping[str, Mapping[str, Any]]) -> str:
    """The first case's report, and what the others have in other words. A case: arguments of `run_folder`."""
    texts: dict[str, list[str]] = {}
    for name, case in cases.items():
        folder = run_folder(**{"rounds": 3, **case})
        texts[name] = _lines(folder)
        shutil.rmtree(folder)
    return compared(texts)


def compared(texts: Mapping[str, list[str]]) -> str:
    """The first text, and the lines in which each other differs from it, under their names."""
    (name, first), *others = texts.items()
    parts = [[f"# {name}", *first], *([f"# {other}", *differences(first, lines)] for other, lines in others)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"
