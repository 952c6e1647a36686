"""The attacks of docs/deployment_threats.md that happen within a round, over Flower's own processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from secure_fed.flower.project import Connection, write_project
from tests.flower_loopback import Loopback, loopback, supernode
from tests.secure_fed.deployment.hostile import SCRIPTS, VICTIM, found
from tests.secure_fed.deployment.parties import founded
from tests.secure_fed.deployment.test_attacked import config
from tests.secure_fed.deployment.test_deployed_run import PARTS


@pytest.mark.weekly
@pytest.mark.parametrize("which", SCRIPTS)
def test_every_attack_is_noticed_through_the_real_transport(tmp_path: Path, which: str) -> None:
    script = SCRIPTS[which]
    party = founded(tmp_path, config(which), PARTS, lambda number: None)

    def node(link: Loopback, number: int) -> list[str]:
        hostile = [sys.executable, "-m", "tests.secure_fed.flower.hostile_node", str(link.homes[number]), which]
        return [*(hostile if number == VICTIM else []), *supernode(link, number)]

    with loopback(tmp_path / "link", party.homes, command=node) as link:
        project = write_project(tmp_path / "app", party.folder, Connection(link.address, insecure=True))
        settings = project / "pyproject.toml"
        own = settings.read_text().replace("secure_fed.flower.coordinator_app", "tests.secure_fed.flower.hostile_app")
        settings.write_text(own + f'script = "{which}"\n')
        link.await_nodes()
        output = link.run(project, seconds=200 + 90 * len(script))
    lines = (party.folder / "run" / "metrics.jsonl").read_text().splitlines()
    print(output)
    assert [came for came in found([*map(json.loads, lines)], output.splitlines(), script) if came] == []
