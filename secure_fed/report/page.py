"""A finished or unfinished run as one HTML file to read, print and keep: all sections in order, written atomically.

record      the run directory as one frozen value
overview    name, first screen, all results; clients, rounds, configuration, versions
guarantee   the guarantee that the files state, its pictures and its meaning, and the statement for the record
privacy     the clients' protection, and the server's view
masks       secure aggregation: its parameters and its cost
measured    the metrics of a task in words, and the run's own membership inference
curves      accuracy, loss, bytes and diagnostics over the rounds
markup      the HTML shapes of the sections, and drawings; the one place where text is escaped

A section is a function `RunRecord -> HTML`, and returns "" where it does not apply to the run.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from secure_fed.activity import activity
from secure_fed.errors import RunDirectoryError
from secure_fed.report import curves, guarantee, masks, measured, overview, privacy
from secure_fed.report.markup import text
from secure_fed.report.record import RunRecord, owned, read
from secure_fed.runs.directory import REPORT, private_part, without_times
from secure_fed.runs.durable import atomic_write

Section = Callable[[RunRecord], str]

# In reading order.
SECTIONS: tuple[Section, ...] = (
    overview.heading,
    overview.summary,
    privacy.privacy,
    curves.learning,
    measured.membership,
    masks.secure_aggregation,
    curves.traffic,
    curves.diagnostics,
    overview.clients,
    overview.rejected,
    overview.results,
    overview.rounds,
    overview.configuration,
    guarantee.statement,
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
