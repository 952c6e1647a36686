"""The sections of a run in one self-contained file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from secure_fed.activity import activity
from secure_fed.errors import RunDirectoryError
from secure_fed.report.page import curves, details, diagnostics, masks, membership, overview, privacy, statement
from secure_fed.report.page.markup import text
from secure_fed.report.page.record import RunRecord, owned, read
from secure_fed.runs.directory import REPORT, private_part, without_times
from secure_fed.runs.durable import atomic_write

Section = Callable[[RunRecord], str]

# In reading order. A section returns "" where it does not apply to the run.
SECTIONS: tuple[Section, ...] = (
    overview.heading,
    overview.summary,
    privacy.privacy,
    curves.learning,
    membership.membership,
    masks.secure_aggregation,
    curves.traffic,
    diagnostics.diagnostics,
    details.clients,
    details.rejected,
    overview.results,
    details.rounds,
    details.configuration,
    statement.statement,
)

# The browser itself then refuses every request and every script, whatever the run's names contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` of the run in `run_dir` and return its path.

    The file is written whole or not at all, needs no network, runs no script, and is the same, byte for byte, for the same
    contents of the run directory. The report of a private run is made only from the public part. A second report, from both
    parts, is written into the private part.
    """
    path, private = run_dir / REPORT, private_part(run_dir)
    try:
        with activity("writing the report"):
            shown = read(run_dir)
            whole = page(owned(run_dir))
            content = page(shown) if shown.private else whole
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Rounds, result and facts are shown as found in the files, even if somebody edited them.
        raise RunDirectoryError(f"{run_dir} is damaged: it holds a value that no run writes ({error})") from error
    atomic_write(path, content)
    if shown.private:
        if private.is_dir():
            atomic_write(private / REPORT, whole, private=True)
        without_times(run_dir)
    return path


def page(record: RunRecord) -> str:
    """The whole HTML document."""
    return document(f"{record.name}: federated fine-tuning report", "".join(section(record) for section in SECTIONS))


def document(title: str, html: str, style: str = "") -> str:
    """`html` as a separate page in the style of the reports; `style` is added to their style sheet."""
    sheet = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n"
        f"<style>\n{sheet}{style}</style>\n</head>\n<body>\n<main>\n{html}</main>\n</body>\n</html>\n"
    )
