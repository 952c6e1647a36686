"""The commands that files and pages advise, as the programs themselves read them: no SuperLink is open to a network, and each
node has two users.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

from secure_fed.commands import node
from secure_fed.deployment.agent import AgentEnded
from secure_fed.deployment.relay import AgentError, HeldError
from secure_fed.errors import StorageError, UsageError
from secure_fed.flower.project import Connection, contents
from secure_fed.flower.supernode import FlowerError, LinkError, UnknownKeyError, UntrustedError

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "examples" / "deployment"
UNITS = {path.name: path.read_text(encoding="utf-8") for path in SHIPPED.glob("*.service")}
COMPOSE = yaml.safe_load((SHIPPED / "compose.yaml").read_text(encoding="utf-8"))
TOLD = {
    **UNITS,
    "compose.yaml": "\n".join(service.get("command", "") for service in COMPOSE["services"].values()),
    "loopback.sh": (SHIPPED / "loopback.sh").read_text(encoding="utf-8"),
    "deployment.md": (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8"),
    "flower init": contents(Path("/srv/coordinator"), Connection())["README.md"],
}


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The arguments of each command of this program in a text."""
    for line in text.replace("\\\n", " ").splitlines():
        begins = re.match(rf"(?:ExecStart=|\s*)(?:/\S*/)?{program} (-.*|node .*)", line)
        if begins:
            yield shlex.split(re.split(r" +(?:#|>|&)", begins[1])[0])


def superlinks(text: str) -> list[argparse.Namespace]:
    read = _parse_args_run_superlink()
    return [read.parse_args(given) for given in commands(text, "flower-superlink")]


def halves(text: str) -> dict[str, list[argparse.Namespace]]:
    """The commands of `secure-fed node agent` and `node connect` in a text."""
    found: dict[str, list[argparse.Namespace]] = {"agent": [], "connect": []}
    read = argparse.ArgumentParser()
    node.add_parsers(read)
    for _, action, *rest in commands(text, "secure-fed"):
        if action in found:
            found[action].append(read.parse_args([action, *rest]))
    return found


def directives(name: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in UNITS[name].splitlines() if re.match("[A-Z][A-Za-z]+=", line))


@pytest.mark.parametrize(
    "name", ["secure-fed-superlink.service", "compose.yaml", "loopback.sh", "deployment.md", "flower init"]
)
def test_every_superlink_listens_on_this_machine_alone(name: str) -> None:
    (found,) = superlinks(TOLD[name].replace('"${link#*:}"', "8000"))
    assert ipaddress.ip_address(found.host).is_loopback
    assert found.enable_supernode_auth == (not found.insecure) == (name != "loopback.sh")
    assert found.health_server_address is None
    assert not found.runtime_dependency_install


def test_nothing_that_is_shipped_listens_everywhere() -> None:
    for path in [
        *SHIPPED.iterdir(),
        *(ROOT / "secure_fed").rglob("*"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
    ]:
        if path.suffix in (".py", ".md", ".yaml", ".service", ".sh", ".conf"):
            assert "0.0.0.0" not in path.read_text(encoding="utf-8"), path


def test_in_containers_only_the_proxy_can_be_reached() -> None:
    services = COMPOSE["services"]
    assert [name for name, service in services.items() if "ports" in service] == ["proxy"]
    assert services["superlink"]["network_mode"] == services["coordinator"]["network_mode"] == "service:proxy"
    assert services["proxy"]["volumes"][0].startswith("./app/nginx.conf:")
    assert COMPOSE["networks"]["nodes"]["internal"] is True


@pytest.mark.parametrize("number", [1, 2])
def test_the_containers_of_a_node_have_two_users_and_a_socket_between_them(number: int) -> None:
    agent, supernode = (COMPOSE["services"][f"{half}-{number}"] for half in ("agent", "supernode"))
    (half,), _ = halves(agent["command"]).values()
    _, (other,) = halves(supernode["command"]).values()
    assert agent["user"].split(":")[0] != supernode["user"].split(":")[0] != "0"
    assert supernode["user"].split(":")[1] == half.group == agent["group_add"][0]
    assert other.agent == half.socket
    assert agent["network_mode"] == "none"
    assert supernode["networks"] == ["nodes"]
    shared = {volume.split(":")[0] for volume in agent["volumes"]} & {v.split(":")[0] for v in supernode["volumes"]}
    assert shared == {f"socket-{number}"}


def test_the_units_of_a_node_have_two_users_and_a_socket_between_them() -> None:
    agent, supernode = directives("secure-fed-agent.service"), directives("secure-fed-supernode.service")
    (half,), _ = halves(UNITS["secure-fed-agent.service"]).values()
    _, (other,) = halves(UNITS["secure-fed-supernode.service"]).values()
    assert agent["User"] != supernode["User"]
    assert supernode["Group"] == half.group == agent["SupplementaryGroups"]
    assert other.agent == half.socket
    assert other.auth_key is not None
    assert str(half.socket.parent) == f"/run/{agent['RuntimeDirectory']}"
    assert str(other.folder) == f"/var/lib/{supernode['StateDirectory']}"
    assert agent["PrivateNetwork"] == "true"
    assert not {"ReadWritePaths", "SupplementaryGroups"} & set(supernode)


@pytest.mark.parametrize(
    ("half", "also"), [("agent", set()), ("supernode", set()), ("coordinator", {3}), ("superlink", None)]
)
def test_units_restart_what_a_restart_can_mend(half: str, also: set[int] | None) -> None:
    """Errors about this machine's settings wait for a person, and the coordinator's exhausted budget; no other error does."""
    unit = directives(f"secure-fed-{half}.service")
    kinds = (
        UsageError,
        LinkError,
        AgentError,
        FlowerError,
        UntrustedError,
        UnknownKeyError,
        HeldError,
        AgentEnded,
        StorageError,
    )
    acts = {kind.exit_code for kind in kinds if issubclass(kind, UsageError) and kind is not HeldError}
    restarted = {kind.exit_code for kind in kinds} - acts
    assert (acts, restarted) == ({2}, {1, 6, 7})
    prevented = set(map(int, unit.get("RestartPreventExitStatus", "").split()))
    assert prevented == (set() if also is None else acts | also)
    assert unit["Restart"] == "on-failure"
    assert float(unit["RestartSec"]) > 2.0, "systemd gives up after five starts in ten seconds"
    assert unit["UMask"] == "0077"
    assert unit["MemoryMax"]


@pytest.mark.parametrize("name", ["deployment.md", "flower init"])
def test_pages_advise_two_halves_with_one_socket(name: str) -> None:
    (half,), (other,) = halves(TOLD[name]).values()
    assert other.agent == half.socket
    assert other.superlink.endswith(":443")


def test_flower_init_writes_the_proxy_for_its_superlink() -> None:
    text = contents(Path("/srv/coordinator"), Connection("127.0.0.1:8123"))["nginx.conf"]
    assert "proxy_pass https://127.0.0.1:8123/v1/fleet/;" in text
    assert "8000" not in text
