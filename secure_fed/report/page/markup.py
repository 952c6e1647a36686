"""The few HTML shapes the sections use.

`text` is the only way from a value to markup. Arguments named `html` are markup already; every other
argument is plain text and is escaped here.
"""

from __future__ import annotations

import html as standard_html
from collections.abc import Iterable, Sequence


def text(value: object) -> str:
    """Any value as escaped text, safe between tags and inside a quoted attribute."""
    return standard_html.escape(str(value), quote=True)


def paragraph(content: str, css_class: str = "") -> str:
    """One paragraph of plain text."""
    return f"<p{_class(css_class)}>{text(content)}</p>\n"


def link(file: str, content: str) -> str:
    """A paragraph with a link to a file beside this one, whose name the code chooses."""
    return f'<p><a href="{text(file)}">{text(content)}</a></p>\n'


def section(title: str, *html: str, css_class: str = "") -> str:
    """A titled section; empty where it has no content."""
    content = "".join(html)
    return f"<section{_class(css_class)}>\n<h2>{text(title)}</h2>\n{content}</section>\n" if content else ""


def subsection(title: str, *html: str) -> str:
    """A part of a section with its own title."""
    return f"<h3>{text(title)}</h3>\n{''.join(html)}"


def facts(rows: Iterable[tuple[str, str]], css_class: str = "facts") -> str:
    """Names and their values as a description list."""
    items = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>\n" for name, value in rows)
    return f"<dl{_class(css_class)}>\n{items}</dl>\n"


def bullets(entries: Iterable[object]) -> str:
    """A list of short texts; empty where there are none."""
    points = "".join(f"<li>{text(entry)}</li>\n" for entry in entries)
    return f"<ul>\n{points}</ul>\n" if points else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls sideways on a narrow screen; the first column names the row."""
    cells = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    body = "".join(f"<tr>{_row(row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def figure(title: str, html: str, caption: str) -> str:
    """A drawing with its title above and a description below; empty where there is no drawing."""
    if not html:
        return ""
    return f"<figure>\n<h3>{text(title)}</h3>\n{html}\n<figcaption>{text(caption)}</figcaption>\n</figure>\n"


def figures(*html: str) -> str:
    """Drawings side by side where there is room; empty where there are none."""
    content = "".join(html)
    return f'<div class="figures">\n{content}</div>\n' if content else ""


def folded(title: str, *html: str) -> str:
    """Detail that opens on a click, and is printed open."""
    content = "".join(html)
    return f"<details><summary>{text(title)}</summary>\n{content}</details>\n" if content else ""


def _row(cells: Sequence[object]) -> str:
    name, *values = cells
    return f'<th scope="row">{text(name)}</th>' + "".join(f"<td>{text(value)}</td>" for value in values)


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
