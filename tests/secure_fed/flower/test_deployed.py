"""Whole runs over Flower's processes on this machine: each node has its own data, and the coordinator has none of it."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import protocols.client
from privacy.entropy import SeededEntropy
from privacy.ledger import Ledger
from secure_fed import Federation, RunConfig
from secure_fed.commands.cli import main
from secure_fed.deployment.home import LEDGER
from secure_fed.flower.project import Connection, write_project
from secure_fed.runs.store import read_checkpoint
from tests.flower_loopback import Loopback, loopback, node_run, supernode
from tests.secure_fed.deployment.parties import Deployed, founded, rows_of

pytestmark = pytest.mark.nightly

SEED, VICTIM = 5, 2
PARTS = [rows_of(8, seed) for seed in range(4)]
SHARES = RunConfig.from_dict(
    {
        "data": {"train": "of each member"},
        "federation": {"rounds": 3, "cohort": 4, "sampling": "fixed"},
        "training": {"batch_size": 4},
        "method": {"name": "fedlora", "rank": 2},
        "privacy": {"unit": "client", "epsilon": 8.0, "noise": "distributed"},
        "secure_aggregation": {"enabled": True, "dropout": 0.25},
    }
)


def seeded(link: Loopback, node: int) -> list[str]:
    """The command of a node with seeded noise. The victim is killed once: in the second round, after it sent its shares."""
    dies = "1 mask" if node == VICTIM and not link.output(f"node-{node}") else ""
    own = [sys.executable, "-m", "tests.secure_fed.flower.seeded_node", str(link.homes[node]), str(SEED), dies]
    return [*own, *supernode(link, node)]


@dataclass
class Ran:
    """A finished run: its parties, its output, and every byte between the nodes and the SuperLink."""

    party: Deployed
    output: str
    wire: bytes

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.party.folder / "run" / "result.json").read_text())
        return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    tmp = tmp_path_factory.mktemp("shares")
    party = founded(tmp, SHARES, PARTS, lambda number: None)
    with loopback(tmp / "link", party.homes, proxy=True, command=seeded) as link:
        project = write_project(tmp / "app", party.folder, Connection(link.address, insecure=True))
        link.await_nodes()
        begun = link.begin(project, "--run-config", "deadline=120 wait=600")
        until = time.monotonic() + 1500
        while begun.poll() is None and time.monotonic() < until:
            if not link.alive(VICTIM):
                link.start(VICTIM)
            time.sleep(0.5)
        assert begun.poll() is not None, link.outputs()
        output = begun.communicate()[0].decode()
        assert link.recording is not None
        wire = b"".join(bytes(stream) for stream in [*link.recording.up, *link.recording.down])
        assert (party.folder / "run" / "result.json").exists(), f"{output}\n{link.outputs()}"
    return Ran(party, output, wire)


def test_a_node_killed_between_its_shares_and_the_opening_costs_its_contribution_alone(ran: Ran) -> None:
    rounds = [line for line in ran.output.splitlines() if line.startswith("round ")]
    survivors = [int(found[1]) for line in rounds if (found := re.search(r"(\d) of 4 members in the sum", line))]
    assert survivors == [4, 3, 4], ran.output
    assert ran.result["epsilon"] <= 8.0
    assert ran.result["holds_against"] == ["reader", "participant", "server"]


@dataclass
class Losing:
    """A simulation's transport that loses the victim from the stage in which its node was killed."""

    inner: Any

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        def gone(client: int, request: Any) -> bool:
            return client == VICTIM and request.round == 1 and request.name in ("mask", "unmask")

        yield from self.inner.exchange({one: asked for one, asked in requests.items() if not gone(one, asked)})


@dataclass
class Simulated:
    """start: bytes of the initial first A. final: all numbers of the final adapter. plain: every vector before its masking."""

    start: bytes
    final: torch.Tensor
    plain: list[bytes]


def in_one_process(party: Deployed, config: RunConfig, tmp: Path) -> Federation:
    """The federation that simulates the same run, over copies of the nodes' files."""
    files = [str(shutil.copy(home / "train.jsonl", tmp / f"c{at}.jsonl")) for at, home in enumerate(party.homes)]
    own = {("data", "train"): files, ("data", "test"): str(party.folder.parent / "test.jsonl")}
    quiet = {("evaluation", "audit_fraction"): 0.0, ("training", "together"): 1}
    return Federation(config.replace({**own, **quiet}), entropy=SeededEntropy(SEED))


@pytest.fixture(scope="module")
def simulated(ran: Ran, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    plain = list[bytes]()
    federation = in_one_process(ran.party, SHARES, tmp_path_factory.mktemp("simulated"))
    federation.assembly = replace(federation.assembly, transport=Losing(federation.assembly.transport))
    mask = protocols.client.Client.mask

    def noted(self: Any, message: bytes, vector: Any) -> bytearray:
        plain.append(vector.tobytes())
        return mask(self, message, vector)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocols.client.Client, "mask", noted)
        state = federation.run().state
    parts = federation.assembly.initial.tensors.parts()
    start = next(part for name, part in parts.items() if "lora_A" in name).reshape(-1)[:16].numpy().tobytes()
    return Simulated(start, flat(state.tensors.parts()), plain)


def flat(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parts[name].reshape(-1) for name in sorted(parts)])


def test_it_is_the_run_of_a_simulation_to_the_bit(ran: Ran, simulated: Simulated) -> None:
    checkpoint = read_checkpoint(ran.party.folder / "run")
    assert checkpoint is not None
    assert torch.equal(flat(checkpoint.state.tensors.parts()), simulated.final)


def test_no_plain_update_is_on_the_wire(ran: Ran, simulated: Simulated) -> None:
    """Neither a vector nor a member's text is found. The same search finds the initial A, which is sent to every member."""
    vectors = simulated.plain
    assert len(vectors) == 3 * 4 - 1
    pieces = [vector[at : at + 32] for vector in vectors for at in range(0, len(vector) - 32, 4096)]
    assert [piece for piece in pieces if piece in ran.wire and len(set(piece)) > 8] == []
    texts = [row["text"].encode() for part in PARTS for row in part]
    assert [text for text in texts if text in ran.wire] == []
    assert len(set(simulated.start)) > 8
    assert simulated.start in ran.wire


def test_every_node_knows_what_it_was_asked_and_what_it_spent(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    for home in ran.party.homes:
        assert main(["node", "status", str(home), "--json"]) == 1, "its agent has ended"
        status = json.loads(capsys.readouterr().out)
        assert status["spent"]["epsilon"] <= 8.0
        assert "unmask" in "".join(line["what"] for line in status["last"])


EXAMPLE = RunConfig.from_dict(
    {
        "data": {"train": "of each member"},
        "federation": {"rounds": 3, "cohort": 4, "sampling": "fixed"},
        "training": {"batch_size": 4},
        "method": {"name": "fra_lora", "rank": 1, "transport_form": "sketch", "target_modules": ["query"]},
        "privacy": {"unit": "example", "epsilon": 50.0, "clip_norm": 0.1},
        "secure_aggregation": {"enabled": True, "dropout": 0.0},
    }
)


def seeded_run(link: Loopback, node: int) -> list[str]:
    """The command `secure-fed node run`, with seeded noise in the agent."""
    python, _, _, *rest = node_run(link, node)
    return [python, "-m", "tests.secure_fed.flower.seeded_node_run", "run", str(SEED), *rest]


def test_under_tls_with_node_authentication_and_the_budgets_at_the_nodes(tmp_path: Path) -> None:
    """Nodes start as usual, but with seeded noise. The privacy unit is the example; a round has two sums of sketches."""
    party = founded(tmp_path, EXAMPLE, PARTS, lambda number: None, most_epsilon=50.0)
    homes = party.homes
    with loopback(tmp_path / "link", homes, tls=True, auth=True, proxy=True, command=seeded_run) as link:
        secured = Connection(link.address, root_certificates=link.certificate)
        link.await_nodes()
        output = link.run(write_project(tmp_path / "app", party.folder, secured), seconds=1500)
        assert link.recording is not None
        assert not link.recording.holds(party.charter.model_digest.encode()), "TLS hides even the charter"
    assert output.count("4 of 4 members in the sum") == 3
    result = json.loads((party.folder / "run" / "result.json").read_text())
    for home in homes:
        spent = Ledger.open(home / LEDGER).spent()
        assert 0 < spent.epsilon <= result["epsilon"] + 1e-9
    checkpoint = read_checkpoint(party.folder / "run")
    assert checkpoint is not None
    alone = in_one_process(party, EXAMPLE, tmp_path).run().state
    assert torch.equal(flat(checkpoint.state.tensors.parts()), flat(alone.tensors.parts()))
