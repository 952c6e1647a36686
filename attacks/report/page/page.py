"""The sections of an audit in one self-contained file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from attacks.report.audited import Audit
from attacks.report.page import curves, exposure, limits, matrix, opening, sweep
from attacks.report.reading import read
from attacks.report.verdict import recorded
from secure_fed.report.page.page import document
from secure_fed.runs.durable import atomic_write

Section = Callable[[Audit], str]

# In reading order, behind the first screen. A section returns "" if the audit has no data for it.
SECTIONS: tuple[Section, ...] = (
    matrix.matrix,
    curves.roc_curves,
    curves.bounds,
    sweep.sweep,
    exposure.clients,
    exposure.examples,
    limits.baseline,
    limits.not_proved,
    limits.how,
)


def write(audit: Mapping[str, Any], path: Path) -> Path:
    """Write the page of a parsed audit.json to `path`, whole or not at all, and return it."""
    atomic_write(path, page(audit), private=True)
    return path


def page(audit: Mapping[str, Any]) -> str:
    """The whole HTML document. Fields that `audit` lacks are reported as missing; equal audits give equal bytes."""
    parsed = read(audit)
    level, body, summary = recorded(audit)
    sections = (
        opening.first_screen(parsed, level, summary if summary and body.startswith(summary) else body),
        *(section(parsed) for section in SECTIONS),
        opening.for_the_record(body),
    )
    style = resources.files(__package__).joinpath("audit.css").read_text(encoding="utf-8")
    return document(f"{opening.name(parsed)}: audit", "".join(sections), style)
