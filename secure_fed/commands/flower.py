"""`secure-fed flower`: Flower projects for federations on many machines."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `secure-fed flower`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    does = "write a ready Flower project for a coordinator's federation"
    init = actions.add_parser("init", help=does, description=does)
    init.add_argument("folder", type=Path, metavar="DIR", help="new or empty")
    init.add_argument("--coordinator", type=Path, required=True, metavar="FOLDER", help="of `coordinator init`")
    here = "on this machine, or a tunnel's end; default: %(default)s"
    init.add_argument("--superlink", default="127.0.0.1:8000", metavar="HOST:PORT", help=here)
    authority = "PEM file with the authority of its certificate; default: the system's authorities"
    init.add_argument("--root-certificates", type=Path, metavar="FILE", help=authority)
    init.add_argument("--insecure", action="store_true", help="no TLS, for a try on one machine")
    init.set_defaults(run=_init)
    does = "start the run of a project, or resume it, and show its output until it ends"
    meaning = (
        "exit status: 0 ended, 1 interrupted: run again; 2 and 3 as for train; 6 the SuperLink's certificate is refused"
    )
    run = actions.add_parser("run", help=does, description=does, epilog=meaning)
    run.add_argument("folder", type=Path, metavar="DIR", help="of `flower init`")
    run.set_defaults(run=_run)


def _init(chosen: argparse.Namespace) -> None:
    from secure_fed.flower.project import Connection, write_project

    connection = Connection(chosen.superlink, chosen.root_certificates, chosen.insecure)
    folder = write_project(chosen.folder, chosen.coordinator, connection)
    print(f"{folder}\nrun it: secure-fed flower run {shlex.quote(str(folder.absolute()))}")


def _run(chosen: argparse.Namespace) -> None:
    from secure_fed.flower.project import run

    print(run(chosen.folder.absolute()))
