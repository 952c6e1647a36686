"""The audit of a run, `secure-fed audit run RUN_DIR`, and the script of each attack, `python -m attacks.NAME RUN_DIR`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from attacks.catalogue import ATTACKS, attacks_named
from attacks.options import say
from secure_fed.errors import ConfigError, RunDirectoryError, UsageError, reported
from secure_fed.runs.directory import read_facts

if TYPE_CHECKING:
    from attacks.record import Audit

REFERENCES = 16
_FEWEST = 4
_WITH_REFERENCES = next(one.name for one in ATTACKS.values() if one.shadows)
_PATIENCE = 300.0  # seconds that references may train by default


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `audit run`."""
    add_arguments(parser)
    parser.add_argument(
        "--attack",
        action="append",
        default=[],
        metavar="NAME|FILE.py",
        help=f"make this attack only; may be repeated ({', '.join(ATTACKS)}, or a file of your own that defines one)",
    )
    quick = "the cheapest attack alone, without reference adapters, in seconds; the report names what it leaves out"
    parser.add_argument("--quick", action="store_true", help=quick)
    beside = "other audited runs, shown beside this one in the report"
    parser.add_argument("--beside", nargs="+", type=Path, default=[], metavar="RUN_DIR", help=beside)
    shown = "include the texts of the most exposed examples in the report (default: left out)"
    parser.add_argument("--show-texts", action="store_true", help=shown)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that the scripts of single attacks have too."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    trained = (
        f"reference adapters to train (default: as many as take about five minutes, at most {REFERENCES}, and 0 if these are "
        f"fewer than {_FEWEST}; {REFERENCES} where --attack names an attack with references; 0: none)"
    )
    parser.add_argument("--references", type=int, metavar="N", help=trained)
    parser.add_argument("--json", action="store_true", help="print the audit as one JSON object")


def run(chosen: argparse.Namespace) -> int:
    """Make an audit, write it beside the run, and show its findings.

    Everything that could fail at the end is checked first: the runs beside it, the lock, and write access.
    """
    references = _references(chosen)
    from attacks.report.sweep import rows_beside
    from secure_fed.runs.store import locked

    rows_beside(chosen.run_dir, chosen.beside)
    with locked(chosen.run_dir):
        _require_writable(chosen.run_dir)
        audit, page = written(_audit(chosen, references), chosen.run_dir, chosen.beside)
    _show(audit, as_json=chosen.json)
    if not chosen.json:
        print(f"report: {page}")
    return 0


def main(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run the script of one attack: print its figures on a run, and write nothing."""
    from secure_fed.activity import heartbeat

    attack = ATTACKS[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m {attack.module}", description=f"{attack.title} ({attack.paper}), on a run."
    )
    add_arguments(parser)
    parser.set_defaults(attack=[name], quick=False, show_texts=False)
    chosen = parser.parse_args(arguments)

    @heartbeat()
    def run() -> None:
        _show(_audit(chosen, _references(chosen)), as_json=chosen.json)

    return reported(run)


def _references(chosen: argparse.Namespace) -> int | None:
    """The number of reference adapters, if it is known. What is cheap to check is checked here, before torch is loaded."""
    read_facts(chosen.run_dir)
    if chosen.references is not None and not (chosen.references == 0 or chosen.references >= 2):
        raise ConfigError(f"--references is {chosen.references}; it must be 0, for none, or at least 2")
    if chosen.quick and (chosen.attack or chosen.references):
        raise UsageError(
            "--quick makes the cheapest attack and trains no references: leave --attack and --references out"
        )
    attacks = attacks_named(chosen.attack)
    needed = chosen.attack and any(one.shadows for one in attacks)
    if chosen.attack and chosen.references is not None and not needed:
        raise UsageError(
            f"--references is {chosen.references}, but no reference is trained for {', '.join(one.name for one in attacks)}: "
            f"leave it out, or name an attack with references, such as {_WITH_REFERENCES}"
        )
    return REFERENCES if needed and chosen.references is None else 0 if chosen.quick else chosen.references


def _audit(chosen: argparse.Namespace, references: int | None) -> Audit:
    from attacks.adversary.case import Settings, opened
    from attacks.audit import audited

    target, names, shown = opened(chosen.run_dir), chosen.attack, chosen.show_texts
    if chosen.quick:
        names = ["one_run" if target.assembly.audit_pool.directions else "loss"]
    if references is None:
        references = affordable(float(target.result["seconds"]))
    audit = audited(target, names, Settings(references=references), show_texts=shown, progress=say).record
    if names and not any(cell.applicable for cell in audit.cells):
        whose: dict[tuple[str, str], list[str]] = {}  # the vantage points of each attack and reason
        for cell in audit.cells:
            whose.setdefault((cell.attack, cell.why), []).append(audit.vantage_title(cell.vantage).lower())
        reasons = (f"{attack} ({', '.join(vantages)}): {why}" for (attack, why), vantages in whose.items())
        raise UsageError(f"the requested attacks do not apply to this run. {'; '.join(reasons)}")
    return audit


def affordable(seconds: float) -> int:
    """The default number of reference adapters for a run that took `seconds`."""
    count = min(REFERENCES, int(_PATIENCE / max(seconds, 1e-3)))
    return count if count >= _FEWEST else 0


def _require_writable(run_dir: Path) -> None:
    """Refuse a folder without write access, before the audit is made."""
    from secure_fed.runs.directory import private_part

    folder = private_part(run_dir)
    if run_dir.is_dir():
        try:
            with TemporaryFile(dir=folder if folder.is_dir() else run_dir):
                pass
        except OSError as error:
            raise RunDirectoryError(
                f"{run_dir} cannot be written ({error.strerror}), and an audit is stored there; make it writable, or print "
                "single attacks, `python -m attacks.NAME RUN_DIR`"
            ) from error


def written(audit: Audit, run_dir: Path, beside: Sequence[Path]) -> tuple[Audit, Path]:
    """Write audit.json and audit.html (audit-NAME.* for single attacks) in the run's private part.

    Returns the audit with the runs beside it, and the page's path.
    """
    from attacks.audit import AUDIT, PAGE
    from attacks.record import content
    from attacks.report.page import write
    from attacks.report.sweep import swept
    from secure_fed.runs.directory import made_private
    from secure_fed.runs.durable import atomic_write

    audit = replace(audit, sweep=swept(audit, run_dir, beside))
    some = "-".join(["", *audit.asked_for])
    folder = made_private(run_dir)
    page = write(audit, folder / PAGE.replace(".", f"{some}."))
    told = json.dumps(content(audit), indent=1, allow_nan=False)
    atomic_write(folder / AUDIT.replace(".", f"{some}."), told + "\n", private=True)
    return audit, page


def side_by_side(run_dir: Path, other: Path) -> list[str]:
    """Audit two runs without reference adapters, and write the report of the first with the other beside it.

    Returns lines to print: one for each run, and the path of the report.
    """
    from attacks.adversary.case import Settings, opened
    from attacks.audit import audited
    from attacks.report.sweep import sentence

    settings = Settings(references=0)
    second, first = (audited(opened(one), (), settings).record for one in (other, run_dir))
    written(second, other, ())
    first, page = written(first, run_dir, (other,))
    return [*map(sentence, first.sweep), f"audit: {page}"]


def _show(audit: Audit, *, as_json: bool) -> None:
    if as_json:
        from attacks.record import content

        print(json.dumps(content(audit), allow_nan=False))
        return
    from attacks.report.display import show

    show(audit)
