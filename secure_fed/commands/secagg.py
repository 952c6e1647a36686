"""`secure-fed secagg`: simulates one secure sum in one process, with dropouts and optional tampering, and measures its cost.

Exit status: 0 the sum is exact, or the party that should detect the tampering did; 1 the session aborted, or tampering was not
detected; 2 arguments from which no session can be made.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from secure_fed.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from protocols.simulate import Report

_QUIET_SECONDS = 2.0  # before the first line of progress, and between two lines


class _Help(argparse.Action):
    """Prints the help with all kinds of tampering; only this list needs the protocol to be loaded."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parser.epilog = _kinds()
        parser.print_help()
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `secure-fed secagg`, whose parser is made with add_help=False."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help, with the kinds of lies, and exit")
    parser.add_argument("--clients", required=True, type=int, metavar="N", help="number of invited clients")
    parser.add_argument("--dim", required=True, type=int, metavar="D", help="coordinates of a vector")
    parser.add_argument(
        "--dropout", type=float, default=0.0, metavar="P", help="share of the clients that vanish (default: 0)"
    )
    parser.add_argument(
        "--neighbours", type=int, metavar="K", help="clients that hold a client's shares (default: chosen)"
    )
    parser.add_argument("--threshold", type=int, metavar="T", help="shares that rebuild a secret (default: chosen)")
    parser.add_argument("--active", action="store_true", help="signatures, against a server that actively lies")
    parser.add_argument("--bits", type=int, choices=(32, 64), default=32, help="bits of a coordinate (default: 32)")
    parser.add_argument(
        "--corrupt", type=float, default=0.1, metavar="SHARE", help="share of clients that may collude (default: 0.1)"
    )
    parser.add_argument("--tamper", default="", metavar="KIND", help="put in a lie: see the list below")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(chosen: argparse.Namespace) -> int:
    """Simulate, print, and return the exit status."""
    from protocols.errors import ParameterError
    from protocols.simulate import Simulation, simulate

    if chosen.neighbours is not None and chosen.neighbours > (others := chosen.clients - 1):
        raise ConfigError(
            f"--neighbours is {chosen.neighbours}, and each of {chosen.clients} clients has {others} others: lower it"
        ).about("--neighbours", chosen.neighbours, f"at most {others}")
    try:
        simulation = Simulation(**{field.name: getattr(chosen, field.name) for field in fields(Simulation)})
        report = simulate(simulation, progress=_Patience())
    except ParameterError as error:
        raise ConfigError(error.what) from error
    if chosen.json:
        print(json.dumps(report.to_dict()))
    else:
        _show(report)
    return 0 if report.well else 1


class _Patience:
    """Prints a line of progress on standard error every `_QUIET_SECONDS`."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, stage: str, done: int, clients: int) -> None:
        now = time.monotonic()
        if now - self._last >= _QUIET_SECONDS:
            self._last = now
            print(f"secure-fed: stage {stage}: {done:,} of {clients:,} clients", file=sys.stderr, flush=True)


def _show(report: Report) -> None:
    from secure_fed.report.terminal import PlainConsole, table_of

    console = PlainConsole()
    console.print(_stages(report))
    console.print(table_of(_outcome(report), show_header=False))
    if report.simulation.clients == 2:
        console.print(
            "A sum of two hides nothing from the two: each can subtract its own vector. A run takes three or more."
        )


def _stages(report: Report) -> Table:
    """The cost of each stage. Bytes and seconds are per client, except for the column of the server."""
    from rich.table import Column

    from secure_fed.report.formatting import size
    from secure_fed.report.terminal import table_of

    one = report.simulation
    kind = "active" if one.active else "passive"
    title = f"secure sum: {one.clients:,} clients, {one.dim:,} coordinates of {one.bits} bits, {kind}"
    names = ("answers", "up", "down", "client\nmean", "client\nmost", "server")
    rows = []
    for stage in report.stages:
        seconds = (stage.client_seconds, stage.client_seconds_most, stage.server_seconds)
        sizes = (size(round(stage.bytes_up)), size(round(stage.bytes_down)))
        rows.append((stage.name, f"{stage.answered:,}", *sizes, *map(_seconds, seconds)))
    numbers = (Column(name, justify="right", no_wrap=True) for name in names)
    return table_of(rows, "stage", *numbers, title=title, title_style="bold")


def _outcome(report: Report) -> Iterator[tuple[str, str]]:
    """The terms of the sum, and what came of it."""
    from secure_fed.report.formatting import size

    choice = report.simulation.choice
    ring = "chosen by each client" if report.simulation.active else "of a ring"
    kind = ring if choice.neighbours < choice.clients - 1 else "all others"
    yield "neighbours", f"{choice.neighbours:,} ({kind})"
    yield "threshold", f"{choice.threshold:,} shares rebuild a secret"
    yield "least sum", f"of {choice.survivors:,} clients"
    yield "too many corrupt", f"{_power(choice.failure)} ({choice.corrupt} among one client's holders are tolerated)"
    yield "abort by chance", f"{_power(choice.abort)}, if as many drop out as expected"
    yield "dropped out", f"{report.dropped:,}"
    yield "in the sum", f"{report.survivors:,}"
    exact = {True: "exact, bit for bit", False: "WRONG: not the plain sum of its clients", None: "none"}
    yield "sum", exact[report.exact]
    if report.aborted is not None:
        yield "aborted", report.aborted
    yield "sent in all", size(report.bytes_total)
    if (lie := report.tamper) is not None:
        yield "tampering", f"{lie.kind}: {'caught' if lie.caught else 'NOT CAUGHT'}"
        if lie.by is not None:
            yield "  noticed by", f"{lie.by}, stage {lie.stage}"
        yield "  in words", lie.what


def _power(probability: float) -> str:
    if probability <= 0:
        return "probability 0"
    return f"probability 2^{math.log2(probability):.1f}" if probability < 0.5 else f"probability {probability:.2g}"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 2}f} ms"


def _kinds() -> str:
    """All kinds of tampering, with the party that should detect each, and the stage."""
    import textwrap

    from protocols.lies import ATTACKS

    lines = ["kinds of lies for --tamper, each with who notices it in which stage:", ""]
    for attack in ATTACKS.values():
        needs = [
            name for name, needed in (("--active", attack.active), ("fewer neighbours than all", attack.ring)) if needed
        ]
        who = "nobody has to" if attack.outcome is not None else f"the {attack.catcher}"
        where = {"": "any stage", "roster": "stage share", "survivors": "stage unmask or consistency"}
        stage = where.get(attack.stage, f"stage {attack.stage}")
        suffix = f"; needs {' and '.join(needs)}" if needs else ""
        lines.append(f"  {attack.kind}  ({who}, {stage}{suffix})")
        lines += textwrap.wrap(attack.does, 90, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
