"""A ready Flower project for the federation of a coordinator's folder.

    pyproject.toml       names the two apps, both of the installed secure-fed, and the coordinator's folder
    README.md            the commands
    .flwr/config.toml    the connection that `flwr run` uses, if FLWR_HOME is the folder .flwr

Flower sends a project to the SuperLink and to every node as a bundle. This project's bundle is its pyproject.toml and its
README.md, by name: no code, and nothing that is added to the folder later. So nodes run the secure-fed that their owners
installed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from secure_fed import __version__
from secure_fed.errors import UsageError, plainly

CONNECTION = "secure-fed"
BUNDLED = ("README.md",)  # and pyproject.toml, which Flower adds


class FlowerProjectError(UsageError):
    """The requested Flower project cannot be written."""


@dataclass(frozen=True)
class Connection:
    """How `flwr run` reaches the SuperLink. root_certificates: those that verify its certificate, None for the system's."""

    superlink: str = "127.0.0.1:8000"
    root_certificates: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        host, _, port = self.superlink.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
            raise FlowerProjectError(f"--superlink {self.superlink!r:.80} is no HOST:PORT, such as 127.0.0.1:8000")
        if self.insecure and self.root_certificates:
            raise FlowerProjectError(
                "--insecure switches TLS off, so --root-certificates has no effect: leave one of them out"
            )
        if self.root_certificates and not self.root_certificates.is_file():
            raise FlowerProjectError(f"--root-certificates {self.root_certificates} is not there: name a PEM file")


def write_project(folder: Path, coordinator: Path, connection: Connection) -> Path:
    """Write the project into a new or empty folder, all of it or nothing. FlowerProjectError gives the reason."""
    with plainly(FlowerProjectError, f"{folder} cannot be used", "name another folder"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FlowerProjectError(f"{folder} is not empty; name an empty or a new folder")
        if not coordinator.is_dir():
            raise FlowerProjectError(
                f"--coordinator {coordinator} is not a folder; name the folder that `secure-fed coordinator init` made"
            )
        files = contents(coordinator.resolve(), connection)
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            for name, text in files.items():
                (made / name).parent.mkdir(exist_ok=True)
                (made / name).write_text(text, encoding="utf-8")
            os.replace(made, folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return folder


def contents(coordinator: Path, connection: Connection) -> dict[str, str]:
    """The text of each file, by its path in the project."""
    certificates = connection.root_certificates
    secured = f"root-certificates = {_toml(certificates.absolute())}\n" if certificates else ""
    secured += "insecure = true\n" if connection.insecure else ""
    table = f"[superlink.{CONNECTION}]\naddress = {_toml(connection.superlink)}\n{secured}"
    return {
        "pyproject.toml": _PYPROJECT.format(
            version=__version__,
            folder=_toml(coordinator),
            bundled=json.dumps(list(BUNDLED)),
        ),
        "README.md": _README.format(connection=CONNECTION),
        ".flwr/config.toml": f'[superlink]\ndefault = "{CONNECTION}"\n\n{table}',
    }


def run_command(folder: Path) -> str:
    """The command that starts a run of the project, or resumes it."""
    return f"FLWR_HOME='{folder / '.flwr'}' flwr run '{folder}' {CONNECTION} --stream"


def _toml(value: Path | str) -> str:
    """A basic string of TOML, which has JSON's escapes."""
    return json.dumps(str(value)).replace("\x7f", "\\u007f")


_PYPROJECT = """\
[project]
name = "secure-fed-federation"
version = "{version}"
description = "One federation of secure-fed. The apps are those of the installed package."
license = "Apache-2.0"
dependencies = []  # nodes and SuperLink run the secure-fed that is installed there

[tool.flwr.app]
publisher = "secure-fed"
fab-include = {bundled}

[tool.flwr.app.components]
serverapp = "secure_fed.flower.coordinator_app:app"
clientapp = "secure_fed.flower.node_app:app"

[tool.flwr.app.config]
coordinator = {folder}
# Seconds that a stage of a round may take.
deadline = 600
# Seconds to wait for members before a round begins.
wait = 3600
# If they are too few after that: "wait" ends the run, to be gone on with; "lose" goes on with the next round.
too-few = "wait"
"""
_README = """\
# A federation of secure-fed, over Flower

On the coordinator's machine, with TLS:

    flower-superlink --host 0.0.0.0 --ssl-certfile server.pem --ssl-keyfile server.key --ssl-ca-certfile ca.pem \\
        --enable-supernode-auth --database superlink.db --disable-runtime-dependency-installation

On each node's:

    secure-fed node run HOME --superlink HOST:PORT --root-certificates ca.pem --auth-key node.key

Then, in this folder, and again after whatever interrupted it:

    FLWR_HOME=$PWD/.flwr flwr run . {connection} --stream

Only this file and pyproject.toml are sent to the nodes. A setting of pyproject.toml changes for one run by
`--run-config 'deadline=60'`.
"""
