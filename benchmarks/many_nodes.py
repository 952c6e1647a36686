"""Many nodes over Flower's processes on one machine: seconds, bytes, memory and computing, while nodes die in every round.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/many_nodes.py [--nodes 20] [--rounds 20] [--modes passive active]
    PYTHONPATH=. python benchmarks/many_nodes.py --modes                             the table of the stored runs alone

The built-in model; each node has 16 notes and trains FedLoRA of rank 2 on 8 of them. A client's update is protected at epsilon
8 by shares of noise, and masks hide it. Every node is `secure-fed node run`: an agent and Flower's SuperNode. In each round a
twentieth of the nodes, at least one, is killed with SIGKILL at a random instant and started again after the round.

    round        median seconds from a round's end to the next one's
    in the sum   the fewest, and the mean, of the nodes whose updates were in a round's sum; lost: rounds without a sum
    up, down     bytes of a node in a round on the wire, counted by a proxy before the SuperLink
    MiB          largest proportional set size, read every two seconds: of a node's processes that stay (agent and SuperNode,
                 the mean over nodes), of the SuperLink, and of the coordinator's app
    CPU          seconds of computing in a round: of SuperLink and coordinator's app; of all nodes' processes that stay
    one process  seconds of a round of the simulation of the same run, and that process's largest resident memory

All nodes share this machine, so a round's seconds are mostly the loading of Flower, in a process for each message, one after
the other. On machines of their own nodes load at the same time. A finished run is a line of many_nodes.jsonl beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from runs_file import keep, lines
from timing import machine

from secure_fed import Federation, RunConfig
from secure_fed.flower.project import Connection, write_project
from secure_fed.runs.directory import METRICS
from tests.flower_loopback import Loopback, loopback, node_run
from tests.secure_fed.deployment.parties import founded, rows_of

STORED = Path(__file__).with_suffix(".jsonl")
NOTES, BATCH, VANISHING = 16, 8, 0.05
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), "smaps_rollup"
KINDS = ("node", "superlink", "coordinator")


def settings(nodes: int, rounds: int, active: bool) -> RunConfig:
    return RunConfig.from_dict(
        {
            "data": {"train": "of each member"},
            "federation": {"rounds": rounds, "cohort": nodes, "sampling": "fixed"},
            "training": {"batch_size": BATCH},
            "method": {"name": "fedlora", "rank": 2, "target_modules": ["query", "value"]},
            "privacy": {"unit": "client", "epsilon": 8.0, "noise": "distributed"},
            "secure_aggregation": {"enabled": True, "active": active, "dropout": 0.1},
        }
    )


class Sampler(threading.Thread):
    """Reads the memory and the computing of the federation's processes until it is stopped."""

    def __init__(self, link: Loopback) -> None:
        super().__init__(daemon=True)
        self.link, self.over = link, threading.Event()
        self.most: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.ticks: dict[tuple[str, int], int] = {}

    def run(self) -> None:
        marks = {f"FLWR_HOME={self.link.folder / f'node-{one}'}": "node" for one in range(len(self.link.homes))}
        marks[f"FLWR_HOME={self.link.folder / 'superlink'}"] = "superlink"
        while not self.over.wait(2):
            held = dict.fromkeys(KINDS, 0.0)
            for place in Path("/proc").glob("[0-9]*"):
                with suppress(OSError, ValueError, IndexError):  # the process has ended
                    environment = (place / "environ").read_bytes().decode(errors="replace").split("\0")
                    kind = next((marks[one] for one in environment if one in marks), "")
                    command = (place / "cmdline").read_bytes().decode(errors="replace")
                    if not kind or "flwr-clientapp" in command:
                        continue
                    kind = "coordinator" if "serverapp" in command else kind
                    rolled = (place / PAGE).read_text().split("Pss:")[1].split()[0]
                    held[kind] += int(rolled) / 1024
                    fields = (place / "stat").read_text().rsplit(")", 1)[1].split()
                    self.ticks[kind, int(place.name)] = int(fields[11]) + int(fields[12])
            self.most = {kind: max(self.most[kind], held[kind]) for kind in KINDS}

    def seconds(self, *kinds: str) -> float:
        """Computing of these processes so far, as last seen."""
        return sum(ticks for (kind, _), ticks in self.ticks.items() if kind in kinds) / TICKS


def measured(nodes: int, rounds: int, active: bool) -> dict[str, Any]:
    config, chance = settings(nodes, rounds, active), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        party = founded(tmp, config, [rows_of(NOTES, seed) for seed in range(nodes)], lambda number: None)
        metrics = party.folder / "run" / METRICS
        with loopback(tmp / "link", party.homes, proxy=True, command=node_run) as link:
            link.await_nodes()
            project, sampler = (
                write_project(tmp / "app", party.folder, Connection(link.address, insecure=True)),
                Sampler(link),
            )
            sampler.start()
            begun, dead, seen, usual = link.begin(project, "--run-config", "deadline=120 wait=600"), [], -1, 60.0
            kill_at, times = float("inf"), [time.time()]
            while begun.poll() is None:
                done = len(lines(metrics))
                if done > seen:
                    times += [time.time()] * (done - max(seen, 0))
                    usual = statistics.median([after - before for before, after in pairwise(times[1:])] or [usual])
                    for one in dead:
                        link.start(one)
                    dead, seen = [], done
                    kill_at = time.time() + chance.uniform(0, 0.8) * usual
                if time.time() > kill_at:
                    dead, kill_at = chance.sample(range(nodes), max(1, round(VANISHING * nodes))), float("inf")
                    for one in dead:
                        link.kill(one)
                time.sleep(0.2)
            sampler.over.set()
            sampler.join()
            output = begun.communicate()[0].decode()
            if not (party.folder / "run" / "result.json").exists():
                raise SystemExit(f"{output}\n{link.outputs()}")
            wire = link.recording
            assert wire is not None
            up, down = (sum(map(len, one)) for one in (wire.up, wire.down))
        sums = [int(one) for one in re.findall(rf"(\d+) of {nodes} members in the sum", output)]
        files = [str(place / "train.jsonl") for place in party.homes]
        own = {("data", "train"): files, ("data", "test"): str(tmp / "test.jsonl"), ("evaluation", "dummies"): 0}
        (tmp / "own.json").write_text(json.dumps([[*key, value] for key, value in own.items()]))
        child = [
            sys.executable,
            __file__,
            "--simulate",
            str(tmp / "own.json"),
            "--nodes",
            str(nodes),
            "--rounds",
            str(rounds),
        ]
        said = subprocess.run(
            [*child, "--modes", "active" if active else "passive"], capture_output=True, text=True, check=True
        )
        return {
            "nodes": nodes, "rounds": rounds, "active": active, "seconds": times[1:], "sums": sums, "lost": rounds - len(sums),
            "up": up, "down": down, "MiB": sampler.most, "center CPU": sampler.seconds("superlink", "coordinator"),
            "node CPU": sampler.seconds("node"),
            "epsilon": json.loads((party.folder / "run" / "result.json").read_text())["epsilon"],
            "one process": json.loads(said.stdout.splitlines()[-1]), "machine": machine("torch", "flwr"),
        }  # fmt: skip


def simulate(given: argparse.Namespace) -> None:
    own = {(section, name): value for section, name, value in json.loads(given.simulate.read_text())}
    config = settings(given.nodes[0], given.rounds, "active" in given.modes).replace(own)
    result = Federation(config).run()
    seconds = statistics.median(one["seconds"] for one in result.records[1:])
    print(json.dumps({"seconds": seconds, "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def page(found: list[dict[str, Any]]) -> str:
    head = [
        "nodes",
        "masks",
        "rounds",
        "round, s",
        "in the sum",
        "up",
        "down",
        "MiB: a node",
        "SuperLink",
        "coordinator",
    ]
    head += ["CPU s of these two", "CPU s of the nodes", "one process, s", "MiB"]
    rows = []
    for line in found:
        nodes, rounds, memory = line["nodes"], line["rounds"], line["MiB"]
        took = statistics.median(b - a for a, b in pairwise(line["seconds"]))
        each = [
            nodes, "active" if line["active"] else "passive", rounds, f"{took:.0f}",
            f"{min(line['sums'], default=0)}, {statistics.mean(line['sums'] or [0]):.1f}", line["lost"],
            f"{line['up'] / nodes / rounds / 1e6:.2f} MB", f"{line['down'] / nodes / rounds / 1e6:.2f} MB",
            f"{memory['node'] / nodes:.0f}", f"{memory['superlink']:.0f}", f"{memory['coordinator']:.0f}",
            f"{line['center CPU'] / rounds:.1f}", f"{line['node CPU'] / rounds:.1f}",
            f"{line['one process']['seconds']:.2f}", f"{line['one process']['MiB']:.0f}",
        ]  # fmt: skip
        rows.append("| " + " | ".join(map(str, each)) + " |")
    return "\n".join(["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[20])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--modes", nargs="*", choices=("passive", "active"), default=["passive", "active"])
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--simulate", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.simulate:
        simulate(given)
        return
    for nodes in given.nodes:
        for mode in given.modes:
            keep(given.out, measured(nodes, given.rounds, mode == "active"))
    print(page(lines(given.out)))


if __name__ == "__main__":
    main()
