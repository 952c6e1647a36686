"""One thing has one name in what users see: the words that docs/words.md retires do not come back."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from secure_fed.commands.cli import parser
from secure_fed.config.settings import sections

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def retired() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A pattern of the retired words, where they are no names in code, and one of the phrases that may contain them."""
    table = (DOCS / "words.md").read_text(encoding="utf-8").split("\n\n")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    words = [word for row in rows for word in row[0].split(", ")]
    allowed = [phrase for row in rows for phrase in re.findall("`([^`]*)`", row[2])]
    word, phrase = ("|".join(map(re.escape, some)) for some in (words, allowed))
    return re.compile(rf"(?<![\w`\"'./-])(?:{word})(?![\w`\"'=/]|-\d)", re.I), re.compile(phrase, re.I)


def found(text: str) -> list[str]:
    """The retired words of a text, each with what stands around it."""
    word, phrase = retired()
    text = phrase.sub("", " ".join(text.split()))
    return [text[max(0, one.start() - 40) : one.end() + 30] for one in word.finditer(text)]


def helps(one: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    yield f"help of {name}", one.format_help()
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from helps(below, f"{name} {word}")


def values(content: Any) -> Iterator[str]:
    """The sentences in a JSON value; keys and single words are names."""
    if isinstance(content, str) and " " in content:
        yield content
    elif isinstance(content, dict | list):
        for one in content.values() if isinstance(content, dict) else content:
            yield from values(one)


def texts() -> Iterator[tuple[str, str]]:
    """What users see, by its place: help, settings, kept refusals and reports, the pages, and the schema of results."""
    yield from helps(parser(), "secure-fed")
    for section, kind in sections().items():
        for one in dataclasses.fields(kind):
            yield f"setting {section}.{one.name}", one.metadata["doc"]
    pages = [ROOT / "README.md", *(page for page in DOCS.glob("*.md") if page.name != "words.md")]
    kept = [file for file in (ROOT / "tests" / "golden").rglob("*.*") if file.suffix in (".txt", ".json", ".toml")]
    for file in [*pages, DOCS / "result.schema.json", *kept]:
        text = file.read_text(encoding="utf-8")
        yield str(file.relative_to(ROOT)), "\n".join(values(json.loads(text))) if file.suffix == ".json" else text


def test_no_text_that_users_see_has_a_retired_word() -> None:
    places = [f"{place}: …{words}…" for place, text in texts() for words in found(text)]
    assert not places, f"{len(places)} places have words that docs/words.md replaces:\n" + "\n".join(places)


def test_retired_words_are_found_and_their_exceptions_are_not() -> None:
    assert len(found("The phantoms pull. Coins\ndecide; Everybody but readers, and 3 dummies.")) == 5
    assert not found(
        "For readers: 3 dummy clients (`evaluation.dummies`), dummy-0007, by a secret coin; evaluation.dummies = 3."
    )
