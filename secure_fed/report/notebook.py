"""A result in a notebook: a small table, without scripts."""

from __future__ import annotations

from collections.abc import Iterable

from secure_fed.report.page.markup import text

_CELL = 'style="text-align: left; vertical-align: top"'


def notebook_table(title: str, rows: Iterable[tuple[str, str]], lead: str = "") -> str:
    """A title, a sentence if there is one, and names with their values, as HTML."""
    body = "\n".join(f"<tr><th {_CELL}>{text(name)}</th><td {_CELL}>{text(value)}</td></tr>" for name, value in rows)
    said = f"<p>{text(lead)}</p>\n" if lead else ""
    return f"<div>\n<p><strong>{text(title)}</strong></p>\n{said}<table>\n{body}\n</table>\n</div>"
