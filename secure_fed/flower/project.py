"""A ready Flower project for the federation of a coordinator's folder, and its run (`run`).

    pyproject.toml       names the two apps, both of the installed secure-fed, and the coordinator's folder
    README.md            the commands
    supernodes/          the public keys of the members' SuperNodes, which `run` registers
    nginx.conf           a proxy in front of the SuperLink that lets nodes through, and nobody to its other interfaces
    .flwr/config.toml    the connection that `flwr run` uses, if FLWR_HOME is the folder .flwr

Flower sends a project to the SuperLink and to every node as a bundle. This project's bundle is its pyproject.toml and its
README.md, by name: no code, and nothing that is added to the folder later. So nodes run the secure-fed that their owners
installed.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from secure_fed import __version__
from secure_fed.deployment.home import ENDED, RUN
from secure_fed.errors import UsageError, plainly
from secure_fed.flower.supernode import FlowerError, UntrustedError, environment

CONNECTION, KEYS = "secure-fed", "supernodes"
SUPERLINK = "127.0.0.1:8000"
PROXY = Path(__file__).with_name("nginx.conf")  # in front of SUPERLINK
BUNDLED = ("README.md",)  # and pyproject.toml, which Flower adds


class FlowerProjectError(UsageError):
    """The requested Flower project cannot be written."""


@dataclass(frozen=True)
class Connection:
    """How `flwr run` reaches the SuperLink. root_certificates: those that verify its certificate, None for the system's.

    superlink: an address of this machine, its own or the end of a tunnel. Where `flwr run` reaches a SuperLink from elsewhere,
    so does everybody, and can start apps on every node.
    """

    superlink: str = SUPERLINK
    root_certificates: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        host, _, port = self.superlink.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
            raise FlowerProjectError(f"--superlink {self.superlink!r:.80} is no HOST:PORT, such as 127.0.0.1:8000")
        if not _is_here(host):
            raise FlowerProjectError(
                f"--superlink {self.superlink!r:.80} is not this machine, and whoever reaches a SuperLink as `flwr run` does "
                "can start apps on every node: let it listen on 127.0.0.1, and reach it there, or by a tunnel "
                "(`ssh -L 8000:127.0.0.1:8000 HOST`)"
            ).about("--superlink", self.superlink, "an address of this machine, such as 127.0.0.1:8000")
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
            (made / KEYS).mkdir()
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
            version=__version__, folder=_toml(coordinator), bundled=json.dumps(list(BUNDLED))
        ),
        "README.md": _README.format(port=connection.superlink.rpartition(":")[2]),
        "nginx.conf": PROXY.read_text(encoding="utf-8").replace(SUPERLINK, connection.superlink),
        ".flwr/config.toml": f'[superlink]\ndefault = "{CONNECTION}"\n\n{table}',
    }


def run(folder: Path) -> str:
    """Start the project's run, or resume it, and show its output until it ends. Returns the folder of the result.

    Every key in `supernodes` is registered first, so that a SuperLink that lost its database knows its nodes again. A run that
    goes on is not started a second time, nor one that has ended, unless a member did not confirm the final model. FlowerError
    with the exit status of the coordinator's error, as its app noted it (`coordinator_app`); with status 1 where it noted none:
    it was killed, or cannot be reached, and the same command resumes.
    """
    with plainly(FlowerProjectError, f"{folder} cannot be used", "give the folder of `secure-fed flower init`"):
        app = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        link = tomllib.loads((folder / ".flwr/config.toml").read_text(encoding="utf-8"))["superlink"][CONNECTION]
        coordinator = Path(app["config"]["coordinator"])
    if not coordinator.is_dir():
        raise FlowerProjectError(
            f"{coordinator} is not there: run on the SuperLink's machine, as the user of that folder"
        )
    if _outcome(coordinator) != (0, ""):
        _require_reachable(link["address"], link.get("root-certificates"), insecure=link.get("insecure", False))
        keys = sorted((folder / KEYS).glob("[!.]*[!~]"))
        if others := [key for key in keys if key.suffix != ".pub"]:
            raise FlowerProjectError(
                f"{others[0]} is no public key of a SuperNode, whose name ends in .pub: take it away"
            )
        for key in keys:
            _flwr(folder, "supernode", "register", str(key), CONNECTION)  # refused if it is registered
        (coordinator / ENDED).unlink(missing_ok=True)
        listed = _flwr(folder, "ls", CONNECTION, "--format", "json")
        runs = json.loads(listed[listed.index("{") :])["runs"] if "{" in listed else []
        going = [one["run-id"] for one in runs if not one["status"].startswith("finished")]
        _flwr(folder, *(["log", going[0], CONNECTION] if going else ["run", str(folder), CONNECTION, "--stream"]))
    status, sentence = _outcome(coordinator)
    if status != 0:
        failed = FlowerError(sentence)
        failed.exit_code = status
        raise failed
    return f"the run has ended: {coordinator / RUN}" + (sentence and f"; {sentence}")


def _outcome(coordinator: Path) -> tuple[int, str]:
    """Exit status and sentence of the latest run of the coordinator's app."""
    try:
        found = json.loads((coordinator / ENDED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return (
            1,
            "the coordinator's app came to no end: it was killed, or its SuperLink was stopped; run again, which resumes",
        )
    return int(found["status"]), str(found["sentence"])


def _require_reachable(address: str, authority: str | None, *, insecure: bool) -> None:
    """FlowerError unless a SuperLink listens there; UntrustedError if its certificate is refused, which `flwr` does not say."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout=10) as reached:
            if not insecure:
                ssl.create_default_context(cafile=authority).wrap_socket(reached, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        raise UntrustedError(
            f"the certificate of {address} is refused by {authority or 'the system'}: {error.verify_message}; renew it, and "
            "restart SuperLink and proxy"
        ) from error
    except OSError as error:
        raise FlowerError(f"the SuperLink at {address} does not answer: {error}; start it, and run again") from error


def _flwr(folder: Path, *words: str) -> str:
    """The output of a command of `flwr` about this project; that of a command about its run goes to the terminal instead."""
    env = environment(FLWR_HOME=str(folder / ".flwr"))
    kept = subprocess.PIPE if words[0] in ("ls", "supernode") else None
    done = subprocess.run(["flwr", *words], stdout=kept, stderr=kept, env=env, text=True, check=False)
    return done.stdout or ""


def _is_here(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


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

    flower-superlink --host 127.0.0.1 --port {port} --ssl-certfile server.pem --ssl-keyfile server.key \\
        --ssl-ca-certfile ca.pem --enable-supernode-auth --database superlink.db --disable-runtime-dependency-installation

Whoever reaches this port can start apps on every node, so it stays on 127.0.0.1. nginx.conf, in this folder, configures a
proxy that lets nodes through, by the path /v1/fleet/, and nothing else.

On each node's machine, under two users, since the second runs whatever app the SuperLink sends:

    secure-fed node agent NODE --socket /run/secure-fed/agent.sock --group GROUP
    secure-fed node connect FOLDER --agent /run/secure-fed/agent.sock --superlink PROXY:443 \\
        --root-certificates ca.pem --auth-key node.key

The public key of each node, node.key.pub, belongs into the folder supernodes/. Then, in this folder, and again after whatever
interrupted it:

    secure-fed flower run .

Only this file and pyproject.toml are sent to the nodes. The settings of a run, such as its deadline, are in pyproject.toml.
"""
