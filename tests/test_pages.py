"""The pages of the repository and other texts that users see.

Links lead somewhere, no half of a merge is left in a page, a stale table is noticed, and no text has a word that docs/words.md
retires: one thing has one name. Every page says for whom it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from secure_fed.commands.cli import parser
from secure_fed.config.settings import sections
from tests.cells import every

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))}


def text_of(path: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The names of the page's headings in links, as GitHub makes them; a repeated one gets a number."""
    found: dict[str, int] = {}
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text_of(path), flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = "".join(one for one in plain if one.isalnum() or one in " -_").replace(" ", "-")
        names.add(name if name not in found else f"{name}-{found[name]}")
        found[name] = found.get(name, 0) + 1
    return names


@every("page", sorted(PAGES))
def test_every_link_of_a_page_leads_somewhere_and_no_merge_is_left_in_it(page: str) -> None:
    text, here = text_of(PAGES[page]), PAGES[page]
    assert not re.findall(r"^(?:<<<<<<<|>>>>>>>) .*", text, flags=re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match("[a-z]+:|reference/", link):  # the site makes these pages from the code, and checks links to them
            continue
        name, _, anchor = link.partition("#")
        place = (here.parent / name).resolve() if name else here
        assert place.exists(), link
        assert not anchor or place.suffix != ".md" or anchor in anchors(place), link


def test_the_walks_of_the_design_count_their_files_and_name_what_is_defined_in_them() -> None:
    text = text_of(DOCS / "design.md")
    stops = re.findall(r"^(\d+)\. \[([^]]*)\]\(\.\./([^)]*)\): (.*)$", text, flags=re.MULTILINE)
    counts = [int(count) for count in re.findall(r"^\*\*.*\*\*, (\d+) files:", text, flags=re.MULTILINE)]
    assert len(counts) == 2
    assert [int(number) for number, *_ in stops] == [number for count in counts for number in range(1, count + 1)]
    for _, named, path, clause in stops:
        assert named == path
        for name in re.findall(r"`(\w+)`", clause):
            assert re.search(rf"^ *(?:(?:def|class) )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), (path, name)


def test_a_table_that_stored_runs_no_longer_give_is_named_with_the_command_that_renews_it(tmp_path: Path) -> None:
    file = runpy.run_path(str(ROOT / "benchmarks" / "runs_file.py"))
    page, tables = tmp_path / "page.md", {"one": "| 1 |\n| 2 |", "two": "| 3 |"}
    script = SimpleNamespace(__name__="rates", PAGE="page.md", tables=lambda: tables)
    page.write_text(
        "# Rates\n\n<!-- one: begin -->\n<!-- one: end -->\n\n<!-- two: begin -->\nold\n<!-- two: end -->\nend\n"
    )
    file["fill"](page, tables)
    assert file["stale"](tmp_path, script) == []
    filled = page.read_text()
    page.write_text(filled.replace("| 3 |", "| 4 |"))
    (sentence,) = file["stale"](tmp_path, script)
    assert "page.md: the table 'two'" in sentence
    assert "`python benchmarks/rates.py --docs docs`" in sentence
    file["fill"](page, tables)
    assert page.read_text() == filled
    with pytest.raises(ValueError, match="has no marks <!-- three: begin -->"):
        file["fill"](page, {"one": "other", "three": ""})
    assert page.read_text() == filled


@cache
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


def test_every_page_begins_with_who_should_read_it() -> None:
    """The site says it of each decision."""
    pages = (*DOCS.glob("*.md"), DOCS / "decisions" / "README.md")
    assert not [page.name for page in pages if not re.match("# .*\n\nFor ", page.read_text(encoding="utf-8"))]
