"""The pages of the repository: links lead somewhere, no half of a merge is left in them, and a stale table is noticed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.parametrize("page", sorted(PAGES))
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
