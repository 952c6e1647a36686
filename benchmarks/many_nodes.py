"""Many nodes over Flower's processes on one machine: seconds, bytes, memory and computing, while nodes die in every round.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/many_nodes.py [--nodes 5 20] [--rounds 20] [--modes passive active]
    PYTHONPATH=. python benchmarks/many_nodes.py --modes --docs docs                 the tables, from the stored runs

The built-in model; each node has 16 notes and trains FedLoRA of rank 2 on 8 of them. A client's update is protected at epsilon
8 by shares of noise, and masks hide it. Every node is `secure-fed node run`: an agent and Flower's SuperNode. In each round but
the first a twentieth of the nodes, at least one, is killed with SIGKILL at a random instant and started again after the round.

    round        median and most seconds from a round's end to the next one's
    in the sum   the fewest, and the mean, of the nodes whose updates were in a round's sum; lost: rounds without a sum
    up, down     bytes of a node in a round on the wire, counted by a proxy before the SuperLink
    MiB          largest proportional set size, read every two seconds: of a node's processes that stay (agent and SuperNode,
                 the mean over nodes), of the SuperLink, and of the coordinator's app
    CPU          seconds of computing in a round: of the SuperLink, of the coordinator's app, and of all nodes' processes that
                 stay
    refused      answers that the SuperLink refused because its database was locked
    idle         share of a core that the SuperLink needs while nodes only poll, in half a minute before the run
    one process  seconds of a round of the simulation of the same run, and that process's largest resident memory

All nodes share this machine, with a niceness of 19, so that SuperLink and coordinator compute first, as on a machine of their
own. A round's seconds are mostly the loading of Flower, in a process for each message, one after the other; on machines of
their own nodes load at the same time. What other numbers of nodes need is extrapolated, on the line through the two numbers of
nodes that were measured, and never below them. A finished run is a line of many_nodes.jsonl beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from runs_file import fill, keep, lines
from timing import machine

from secure_fed import Federation, RunConfig
from secure_fed.flower.project import Connection, write_project
from secure_fed.runs.directory import METRICS, OWN_ROUNDS, PRIVATE
from tests.flower_loopback import IN_MEMORY, ON_DISK, Loopback, loopback, node_run
from tests.secure_fed.deployment.parties import founded, rows_of

STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "performance.md"
NOTES, BATCH, VANISHING, MORE = 16, 8, 0.05, (50, 200)
TICKS, IDLE = os.sysconf("SC_CLK_TCK"), 30.0
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
                    rolled = (place / "smaps_rollup").read_text().split("Pss:")[1].split()[0]
                    held[kind] += int(rolled) / 1024
                    fields = (place / "stat").read_text().rsplit(")", 1)[1].split()
                    self.ticks[kind, int(place.name)] = int(fields[11]) + int(fields[12])
            self.most = {kind: max(self.most[kind], held[kind]) for kind in KINDS}

    def seconds(self, *kinds: str) -> float:
        """Computing of these processes so far, as last seen."""
        return sum(ticks for (kind, _), ticks in self.ticks.items() if kind in kinds) / TICKS


def measured(nodes: int, rounds: int, active: bool, database: str) -> dict[str, Any]:
    config, chance = settings(nodes, rounds, active), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        party = founded(tmp, config, [rows_of(NOTES, seed) for seed in range(nodes)], lambda number: None)
        metrics, said = party.folder / "run" / METRICS, tmp / "said"
        polite = lambda *given: ["nice", "-n", "19", *node_run(*given)]  # noqa: E731
        with loopback(tmp / "link", party.homes, proxy=True, command=polite, database=database) as link:
            link.await_nodes()
            project = write_project(tmp / "app", party.folder, Connection(link.address, insecure=True))
            sampler = Sampler(link)
            sampler.start()
            time.sleep(IDLE)
            before = sampler.seconds("superlink")
            time.sleep(IDLE)
            idle = (sampler.seconds("superlink") - before) / IDLE
            begun, dead, done = link.begin(project, "--run-config", "deadline=300 wait=600"), [], 0
            threading.Thread(target=_copied, args=(begun, said), daemon=True).start()
            kill_at, times = float("inf"), [time.time()]
            while begun.poll() is None:
                if len(lines(metrics)) > done:
                    done = len(lines(metrics))
                    times.append(time.time())
                    print(time.strftime("%X"), "round", done, file=sys.stderr, flush=True)
                    for one in dead:
                        link.start(one)
                    usual = statistics.median(after - before for before, after in pairwise(times))
                    dead, kill_at = [], time.time() + chance.uniform(0, 0.8) * usual
                if time.time() > kill_at:
                    dead, kill_at = chance.sample(range(nodes), max(1, round(VANISHING * nodes))), float("inf")
                    for one in dead:
                        link.kill(one)
                time.sleep(0.2)
            sampler.over.set()
            sampler.join()
            if not (party.folder / "run" / "result.json").exists():
                raise SystemExit(f"{said.read_text()}\n{link.outputs()}")
            wire, superlink = link.recording, link.output("superlink")
            assert wire is not None
            up, down = (sum(map(len, one)) for one in (wire.up, wire.down))
        rounds_made = lines(party.folder / "run" / PRIVATE / OWN_ROUNDS)
        files = [str(place / "train.jsonl") for place in party.homes]
        own = {("data", "train"): files, ("data", "test"): str(tmp / "test.jsonl"), ("evaluation", "dummies"): 0}
        (tmp / "own.json").write_text(json.dumps([[*key, value] for key, value in own.items()]))
        options = ["--simulate", tmp / "own.json", "--nodes", nodes, "--rounds", rounds, "--modes"]
        child = [sys.executable, __file__, *map(str, options), "active" if active else "passive"]
        alone = subprocess.run(child, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        return {
            "nodes": nodes, "rounds": rounds, "active": active, "database": database, "seconds": times[1:],
            "sums": [one["masked"]["survivors"] for one in rounds_made if "lost" not in one],
            "lost": [one["lost"] for one in rounds_made if "lost" in one], "up": up, "down": down, "MiB": sampler.most,
            "CPU": {kind: sampler.seconds(kind) for kind in KINDS}, "idle": idle,
            "refused": superlink.count('/v1/fleet/push-messages HTTP/1.1" 500'),
            "epsilon": json.loads((party.folder / "run" / "result.json").read_text())["epsilon"],
            "one process": json.loads(alone), "machine": machine("torch", "flwr"),
        }  # fmt: skip


def _copied(begun: subprocess.Popen[bytes], place: Path) -> None:
    """Keep a process's output in a file while it is written."""
    assert begun.stdout is not None
    with place.open("wb", buffering=0) as file:
        for line in begun.stdout:
            file.write(line)


def simulate(given: argparse.Namespace) -> None:
    own = {(section, name): value for section, name, value in json.loads(given.simulate.read_text())}
    config = settings(given.nodes[0], given.rounds, "active" in given.modes).replace(own)
    result = Federation(config).run()
    seconds = statistics.median(one["seconds"] for one in result.records[1:])
    print(json.dumps({"seconds": seconds, "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"many_nodes": page(lines(out))}


def page(found: list[dict[str, Any]]) -> str:
    rows = []
    for line in found:
        nodes, rounds, memory, cpu = line["nodes"], line["rounds"], line["MiB"], line["CPU"]
        took = [after - before for before, after in pairwise(line["seconds"])]
        rows.append([
            nodes, mode(line), f"{statistics.median(took):.0f}, {max(took):.0f}",
            f"{min(line['sums'], default=0)}, {statistics.mean(line['sums'] or [0]):.1f}", len(line["lost"]), line["refused"],
            f"{line['up'] / nodes / rounds / 1e6:.2f}, {line['down'] / nodes / rounds / 1e6:.2f}",
            f"{memory['node'] / nodes:.0f}, {memory['superlink']:.0f}, {memory['coordinator']:.0f}",
            f"{cpu['node'] / rounds:.0f}, {cpu['superlink'] / rounds:.1f}, {cpu['coordinator'] / rounds:.1f}",
            f"{100 * line['idle']:.0f} %", f"{line['one process']['seconds']:.2f}, {line['one process']['MiB']:.0f}",
        ])  # fmt: skip
    head = ["nodes", "masks", "round, s", "in the sum", "lost", "refused", "MB of a node, up, down"]
    head += [
        "MiB: a node, SuperLink, coordinator",
        "CPU s: nodes, SuperLink, coordinator",
        "idle",
        "one process: s, MiB",
    ]
    more = []
    for name in ("passive", "active"):
        some = [line for line in found if mode(line) == name]
        for nodes in MORE if len({line["nodes"] for line in some}) > 1 else ():
            more.append([nodes, name, *(f"{beyond(some, nodes, of):.0f}" for of in EXTRAPOLATED.values())])
    beyond_measured = f"\n\nExtrapolated:\n\n{table(['nodes', 'masks', *EXTRAPOLATED], more)}" if more else ""
    return table(head, rows) + beyond_measured


EXTRAPOLATED: dict[str, Callable[[dict[str, Any]], float]] = {
    "MB in a round": lambda line: (line["up"] + line["down"]) / line["rounds"] / 1e6,
    "MiB: SuperLink": lambda line: line["MiB"]["superlink"],
    "MiB: coordinator": lambda line: line["MiB"]["coordinator"],
    "CPU s: SuperLink": lambda line: line["CPU"]["superlink"] / line["rounds"],
    "CPU s: coordinator": lambda line: line["CPU"]["coordinator"] / line["rounds"],
    "idle, %": lambda line: 100 * line["idle"],
}


def mode(line: dict[str, Any]) -> str:
    return "active" if line["active"] else "passive"


def beyond(found: list[dict[str, Any]], nodes: int, of: Callable[[dict[str, Any]], float]) -> float:
    """A figure at a number of nodes, on the line through the fewest and the most that were measured, and no less than there."""
    first, last = (pick(found, key=lambda line: line["nodes"]) for pick in (min, max))
    slope = (of(last) - of(first)) / (last["nodes"] - first["nodes"])
    return of(last) + max(0.0, slope) * (nodes - last["nodes"])


def table(head: list[str], rows: list[list[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--modes", nargs="*", choices=("passive", "active"), default=["passive", "active"])
    parser.add_argument("--database", choices=(ON_DISK, IN_MEMORY), default=IN_MEMORY, help="of the SuperLink")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--docs", type=Path, help=f"write the tables of {PAGE} there")
    parser.add_argument("--simulate", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.simulate:
        simulate(given)
        return
    for nodes, name in product(given.nodes, given.modes):
        keep(given.out, measured(nodes, given.rounds, name == "active", given.database))
    if given.docs:
        fill(given.docs / PAGE, tables(given.out))
    else:
        print(page(lines(given.out)))


if __name__ == "__main__":
    main()
