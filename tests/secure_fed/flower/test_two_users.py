"""A foreign app, sent to a node by its SuperLink through the shipped proxy: under two users it reads nothing of the node.

The SuperLink, with TLS and node authentication, and `flwr run` are root's, the agent and the SuperNode have a user each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from secure_fed.deployment import home, relay
from tests.flower_loopback import HOST, Loopback, loopback
from tests.nginx import needs_nginx, proxy
from tests.users import given_to, place, python, under

pytestmark = [pytest.mark.nightly, needs_nginx]

AGENT, SUPERNODE, GROUP = 64101, 64102, 64110
PROJECT = """
[project]
name = "foreign"
version = "1.0.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "foreign:server"
clientapp = "foreign:client"
[tool.flwr.app.config]
paths = '''{paths}'''
agent = '''{agent}'''
"""
APP = """
import json, os, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


@client.query("look")
def look(message, context):
    from secure_fed.deployment import relay
    from secure_fed.deployment.envelope import Envelope

    found = {}
    for path in json.loads(context.run_config["paths"]):
        try:
            found[path] = open(path, "rb").read(1000).decode(errors="replace") or "empty"
        except OSError as error:
            found[path] = error.strerror
    asked = relay.ask(Path(context.run_config["agent"]), Envelope(b'{"kind":"request"}'), 20)
    answer = {"user": os.getuid(), "found": found, "agent": asked.header.decode()}
    return Message(RecordDict({"c": ConfigRecord({"found": json.dumps(answer)})}), reply_to=message)


@server.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    messages = [Message(RecordDict(), node, "query.look") for node in nodes]
    (answer,) = grid.send_and_receive(messages, timeout=60)
    print("FOUND", answer.content["c"]["found"], flush=True)
"""


def scripts(folder: Path) -> Path:
    """Flower's commands, for an interpreter that other users can run."""
    folder.mkdir()
    for script in Path(sys.executable).parent.glob("fl*w*r*-*"):
        lines = script.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / script.name).write_text("".join([f"#!{python()}\n", *lines[1:]]), encoding="utf-8")
        (folder / script.name).chmod(0o755)
    return folder


def as_user(user: int, group: int, *others: int, commands: Path, flower: Path) -> list[str]:
    """The words before a command that another user shall run."""
    groups = ["--groups", ",".join(map(str, others))] if others else ["--clear-groups"]
    paths = [f"{name}={value}" for name, value in under(user, group)["env"].items() if name in ("PYTHONPATH", "HOME")]
    paths += [f"PATH={commands}:{os.environ['PATH']}", f"FLWR_HOME={flower}"]
    return [
        "setpriv",
        "--reuid",
        str(user),
        "--regid",
        str(group),
        *groups,
        "env",
        *paths,
        python(),
        "-m",
        "secure_fed",
    ]


@contextmanager
def found(folder: Path, *, apart: bool) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The node's folder, and what the foreign app found. apart: agent and SuperNode have a user each, not one for both."""
    (folder / "data").mkdir(mode=0o700)
    train = folder / "data" / "own.csv"
    train.write_text("text,label\nA PATIENT,b\n")
    own = home.new_node(folder / "node", name="n", train=[str(train)], coordinator="-".join(["abcd"] * 10)).folder
    (own / home.LEDGER).write_text("LEDGER")
    for name in ("run", "supernode"):
        (folder / name).mkdir()
    given_to(AGENT, AGENT, own, folder / "data", folder / "run")
    given_to(SUPERNODE, GROUP, folder / "supernode")
    commands = scripts(folder / "bin")
    at = folder / "run" / "agent.sock" if apart else own / relay.SOCKET
    block = ExitStack()

    def node(link: Loopback, number: int) -> list[str]:
        flower = link.folder / f"node-{number}"
        flower.mkdir(exist_ok=True)
        user, group = (SUPERNODE, GROUP) if apart else (AGENT, AGENT)
        given_to(user, group, flower, link.key(number))
        front = block.enter_context(proxy(folder / "nginx", link.port, link.folder))
        connection = ["--superlink", f"{HOST}:{front}", *link.secured(), "--auth-key", str(link.key(number))]
        half = ["connect", str(folder / "supernode"), "--agent", str(at)] if apart else ["run", str(own)]
        return [*as_user(user, group, commands=commands, flower=flower), "node", *half, *connection]

    with block:
        if apart:
            words = as_user(AGENT, AGENT, GROUP, commands=commands, flower=folder / "no")
            options = ["--socket", str(at), "--group", str(GROUP)]
            agent = subprocess.Popen([*words, "node", "agent", str(own), *options])
            block.callback(agent.wait, 30)
            block.callback(agent.terminate)
        homes = [folder / "supernode" if apart else own]  # where the SuperNode's log is
        link = block.enter_context(loopback(folder / "link", homes, tls=True, auth=True, command=node))
        link.await_nodes()
        app = folder / "app"
        app.mkdir()
        processes = [f"/proc/{pid}/{name}" for pid in _of(AGENT) for name in ("environ", "mem")]
        paths = [*map(str, (own / home.IDENTITY, own / home.LEDGER, train, own / home.NODE)), *processes]
        (app / "pyproject.toml").write_text(PROJECT.format(paths=json.dumps(paths), agent=at), encoding="utf-8")
        (app / "foreign.py").write_text(APP, encoding="utf-8")
        (said,) = [line for line in link.run(app).splitlines() if line.startswith("FOUND ")]
        yield own, json.loads(said.removeprefix("FOUND "))


def _of(user: int) -> list[str]:
    """The processes of a user."""
    return [path.name for path in Path("/proc").glob("[0-9]*") if path.stat().st_uid == user]


def test_an_app_of_the_superlink_reads_neither_key_ledger_nor_data() -> None:
    python()
    with place() as folder, found(folder, apart=True) as (own, said):
        assert said["user"] == SUPERNODE
        assert set(said["found"].values()) == {"Permission denied"}
        assert str(own / home.IDENTITY) in said["found"]
        assert len(said["found"]) >= 6  # the agent's processes are among them
        assert (
            "takes part in no federation" in said["agent"]
        )  # its socket is open to the app, and admits signed requests


def test_under_one_user_it_reads_all_of_them() -> None:
    """So the test above can fail; and `node run` says so when it starts."""
    python()
    with place() as folder, found(folder, apart=False) as (own, said):
        assert said["user"] == AGENT
        assert said["found"][str(own / home.IDENTITY)] == (own / home.IDENTITY).read_text()
        assert said["found"][str(own / home.LEDGER)] == "LEDGER"
        assert "A PATIENT" in str(said["found"])
        assert "under one user" in (folder / "link" / "node-0.log").read_text()
