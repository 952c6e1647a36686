"""The cost of a masked round over Flower's processes on this machine, beside one process and Flower's SecAgg+.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/flower_overhead.py [--nodes 4 3 8] [--ranks 2 8 32] [--rounds 3]

The built-in model and notes, LoRA of a rank on query and value, pooler and head in full; every node trains on the same number
of notes in every round; secure aggregation is the only protection. There are one SuperLink and, for each node, a SuperNode and
an agent, as `secure-fed node run` starts them. Flower's SecAgg+ is its own workflow and client modifier, by `flwr run` on the
same SuperNodes.

    round       median seconds of the rounds after the first
    stages      median seconds from sending a stage's messages until its last answer is used
    up, down    bytes per node and stage, including Flower's own traffic, counted by a proxy before the SuperLink
    one process the same rounds of a simulation

A stage's seconds are divided for the node that answers last; its parts add up to the stage:

    noticed     until its SuperNode has the message, by its log: it polls the SuperLink every three seconds
    started     until a process for the message starts, by the system's clock
    loading     until that process has loaded Flower and the message, and passes it to our relay
    ours        until the agent has answered (SecAgg+: until its modifier and client have answered)
    returned    until the coordinator has it

"CPU of loading" is the process's CPU time by then: unlike the seconds, it depends little on other work on the machine.

The first of --nodes is run with all --ranks and with SecAgg+; the others with the first rank. Modules of `over_flower` record
times inside Flower's processes. The tests' nodes are used, so this needs a checkout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from flower_overhead_measured import NAMES, PARTS, Measured, Sampler, sampled
from over_flower.clock import MESSAGES, STAGES, noted
from peers.prepare import TINY, prepare
from timing import machine

from secure_fed import Federation, RunConfig
from secure_fed.deployment import home
from secure_fed.deployment.charter import fingerprint
from secure_fed.deployment.coordinator import found
from secure_fed.flower.supernode import LOG
from secure_fed.learning.data import notes
from tests.flower_loopback import Loopback, loopback, node_run

HERE = Path(__file__).resolve().parent
NOTES, TESTS, BATCH = 16, 256, 8  # notes of a node, of the test set, of a step
PROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
[tool.flwr.app]
publisher = "benchmarks"
fab-include = ["over_flower/*.py", "common.py"]
[tool.flwr.app.components]
serverapp = "over_flower.{server}:app"
clientapp = "over_flower.{client}:app"
[tool.flwr.app.config]
"""


def rows(count: int, split: str) -> list[dict[str, Any]]:
    made = notes.generate(count, seed=0, split=split)
    return [{"text": text, "label": made.label_names[own]} for text, own in zip(made.text, made.label, strict=True)]


def written(place: Path, found: list[dict[str, Any]]) -> str:
    place.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return str(place)


def settings(rank: int, nodes: int, rounds: int) -> RunConfig:
    return RunConfig.from_dict(
        {
            "data": {"train": "of each member"},
            "federation": {"rounds": rounds, "cohort": nodes, "sampling": "fixed"},
            "training": {"batch_size": BATCH},
            "method": {"name": "fedlora", "rank": rank, "target_modules": ["query", "value"]},
            "secure_aggregation": {"enabled": True, "dropout": 0.25},
            "evaluation": {"audit_fraction": 0.0},
        }
    )


@dataclass
class Party:
    """Nodes, and a coordinator's folder for each rank."""

    folder: Path
    homes: list[Path]
    ranks: list[int]
    rounds: int

    @classmethod
    def made(cls, folder: Path, nodes: int, ranks: list[int], rounds: int) -> Party:
        keys = []
        for rank in ranks:
            home.new_folder(folder / f"rank-{rank}", "secure-fed coordinator init")
            keys.append(fingerprint(home.write_key(folder / f"rank-{rank}" / home.COORDINATOR_KEY).public))
        homes, train = [folder / f"node-{number}" for number in range(nodes)], rows(nodes * NOTES, "train")
        for number, place in enumerate(homes):
            home.new_folder(place, "secure-fed node init")
            home.write_key(place / home.IDENTITY)
            written(place / "train.jsonl", train[number * NOTES : (number + 1) * NOTES])
            (place / "client.json").write_text(str(number), encoding="utf-8")
            own = f'[node]\nname = "node-{number}"\ntrain = "train.jsonl"\n'
            policy = f"[policy]\ncoordinators = {json.dumps(keys)}\nprivacy = false\n"
            (place / home.NODE).write_text(own + policy, encoding="utf-8")
            home.write_card(home.Home.load(place))
            (place / LOG).touch(mode=0o600)
        test = written(folder / "test.jsonl", rows(TESTS, "test"))
        members = [home.read_card(place / home.CARD) for place in homes]
        for rank in ranks:
            config = settings(rank, nodes, rounds).replace({("data", "test"): test})
            found(folder / f"rank-{rank}", config, members, f"rank-{rank}")
        return cls(folder, homes, ranks, rounds)

    def project(self, name: str, server: str, client: str, **config: Any) -> Path:
        place = self.folder / f"app-{name}"
        shutil.copytree(HERE / "over_flower", place / "over_flower", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(HERE / "peers" / "common.py", place)
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
        (place / "pyproject.toml").write_text(PROJECT.format(name=name, server=server, client=client) + lines)
        return place

    def run(self, link: Loopback, project: Path) -> tuple[Sampler, list[list[Any]]]:
        """Run a project; returns the proxy's samples and every node's recorded times."""
        for place in self.homes:
            (place / MESSAGES).unlink(missing_ok=True)
        with sampled(link) as sampler:
            link.run(project, seconds=900)
        return sampler, [noted(place / MESSAGES) for place in self.homes]

    def ours(self, link: Loopback, rank: int) -> Measured:
        place = self.folder / f"rank-{rank}"
        config = {"coordinator": str(place), "deadline": 300, "wait": 600}
        sampler, messages = self.run(link, self.project(f"rank-{rank}", "coordinator", "relay", **config))
        rounds = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
        assert all(one["masked"]["survivors"] == len(self.homes) for one in rounds), "somebody is missing in a sum"
        return Measured.of([one["seconds"] for one in rounds[1:]], noted(place / STAGES), sampler, messages)

    def simulated(self, rank: int) -> tuple[float, int]:
        """Seconds per round in this process, and the numbers sent."""
        files, test = [str(place / "train.jsonl") for place in self.homes], str(self.folder / "test.jsonl")
        config = settings(rank, len(files), self.rounds + 2)
        result = Federation(config.replace({("data", "train"): files, ("data", "test"): test})).run()
        return statistics.median(one["seconds"] for one in result.records[1:]), result.summary["trainable"]

    def secagg(self, link: Loopback, rank: int) -> Measured:
        place = self.folder / "secagg"
        place.mkdir()
        own = {"rounds": self.rounds, "batch": BATCH, "rank": rank, "alpha": 16, "lr": 1e-3}
        prepare(place, HERE.parent / TINY, None, len(self.homes), NOTES, own)
        project = self.project("secagg", "secagg_server", "secagg_client", work=str(place))
        sampler, messages = self.run(link, project)
        ends, stages = [one["ended"] for one in noted(place / "rounds.jsonl")], noted(place / STAGES)
        rounds = [after - before for before, after in pairwise(ends)]
        return Measured.of(rounds, stages, sampler, messages)


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, aligned for reading as text."""
    widths = [max(len(line[at]) for line in [head, *lines]) for at in range(len(head))]
    ruled = [f"{'-' * (width - 1)}:" if at else "-" * width for at, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(aligned(line, widths))} |" for line in [head, ruled, *lines]) + "\n"


def aligned(line: list[str], widths: list[int]) -> list[str]:
    return [
        cell.rjust(width) if at else cell.ljust(width)
        for at, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]


def size(count: float) -> str:
    return f"{count / 1e3:,.1f}"


def report(what: str, found: dict[str, Measured]) -> None:
    """Print the tables for one number of nodes."""
    print(f"\n{what}: seconds\n")
    head = ["", "round", *NAMES, "beside stages", "one process", "numbers"]
    print(table(head, [[name, *seconds(one)] for name, one in found.items()]))
    print(f"{what}: kB on the wire of a node, up / down\n")
    wire = {
        name: [f"{size(one.up[stage])} / {size(one.down[stage])}" for stage in NAMES] for name, one in found.items()
    }
    sums = {name: f"{size(sum(one.up.values()))} / {size(sum(one.down.values()))}" for name, one in found.items()}
    print(table(["", *NAMES, "round"], [[name, *cells, sums[name]] for name, cells in wire.items()]))
    print(f"{what}: where a stage's seconds go, mean of the stages, at the node that is last\n")
    cells = {name: [f"{one.parts[part]:.2f}" for part in (*PARTS, "cpu")] for name, one in found.items()}
    print(table(["", *PARTS, "CPU of loading"], [[name, *own] for name, own in cells.items()]), flush=True)


def seconds(one: Measured) -> list[str]:
    own = [one.round, *one.stages.values(), one.round - sum(one.stages.values())]
    return [
        *(f"{value:.2f}" for value in own),
        f"{one.simulated:.2f}" if one.trains else "",
        f"{one.trains:,}" if one.trains else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 3, 8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds is {given.rounds}: the first round is left out, so give at least 2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # then child processes end too
    torch.set_num_threads(1)
    print(machine("torch", "numpy", "flwr") + f"; one thread a process; {given.rounds} rounds")
    for nodes in given.nodes:
        first = nodes == given.nodes[0]
        with tempfile.TemporaryDirectory() as folder:
            party = Party.made(Path(folder), nodes, given.ranks if first else given.ranks[:1], given.rounds)
            with loopback(party.folder / "link", party.homes, proxy=True, command=node_run) as link:
                found = {f"rank {rank}": party.ours(link, rank) for rank in party.ranks}
                if first:
                    found[f"SecAgg+, rank {given.ranks[0]}"] = party.secagg(link, given.ranks[0])
            for rank in party.ranks:
                one = found[f"rank {rank}"]
                one.simulated, one.trains = party.simulated(rank)
        report(f"{nodes} nodes", found)


if __name__ == "__main__":
    main()
