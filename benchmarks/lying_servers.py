"""Attacks of a lying server against a client's defences: the matrix of docs/lying_servers.md.

    python benchmarks/lying_servers.py [--trials 20] [--quick] [--out lying_servers.jsonl]
    python benchmarks/lying_servers.py --docs docs                                     the table, from stored runs

Forty clients of eight notes (builtin/notes) fine-tune builtin/tiny by FedLoRA for 20 rounds; the server lies in the second.
A cell is the share of trials in which an attack succeeds. A membership cell counts recognised members, with false alarms beside
it. Every finished cell is one line of --out and is not measured again. The project's clients train, clip, add noise and mask;
seeds decide the texts, and noise comes from the operating system.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from runs_file import fill, keep, lines
from timing import machine

from attacks.adversary.lying_server import LyingServer
from attacks.lying.trials import LIES, Rate, Table, rate, tried
from secure_fed import Federation, RunConfig

BASE = (
    *("data.examples=320", "data.test_examples=2000", "data.partition=iid", "federation.clients=40"),
    *("federation.cohort=10", "federation.rounds=20", "evaluation.audit_fraction=0", "method.name=fedlora"),
    *("model.max_length=48", "training.batch_size=8"),
)
CONSTANT = "training.lr_schedule=constant"
SGD = ("training.optimizer=sgd", "training.lr=0.1", CONSTANT)
ADAMW = ("training.optimizer=adamw", "training.lr=0.005", CONSTANT)
FOUR = (*ADAMW, "training.batch_size=4", "training.epochs=2")
AS_IT_IS = ("federation.server_optimizer=mean", "federation.server_lr=1", "federation.average_last=1")
PRIVATE = ("privacy.epsilon=8", "evaluation.dummies=0")
CLIENT = (*PRIVATE, "privacy.unit=client", "federation.sampling=poisson", "privacy.clip_norm=0.5", *AS_IT_IS)
MASKS = ("secure_aggregation.enabled=true",)
EACH, SEED = 8, 0
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "lying_servers.md"


@dataclass(frozen=True)
class Defence:
    """title: of the column. settings: of the run. round: in which the server lies. trusting: clients check no request."""

    title: str
    settings: tuple[str, ...] = ()
    round: int = 1
    trusting: bool = False


FIXED = ("federation.sampling=fixed",)
DEFENCES = {
    "nothing": Defence("nothing", FIXED, trusting=True),
    "first_round": Defence("checks, first round", FIXED, round=0),
    "checks": Defence("checks, later rounds", FIXED),
    "bound": Defence("values up to 1", (*FIXED, "federation.largest_value=1")),
    "clipped": Defence("clipped, the server adds the noise", CLIENT),
    "example": Defence("noise in steps, examples", (*PRIVATE, *FIXED, "privacy.unit=example")),
    "local": Defence("noise of each client", (*CLIENT, "privacy.noise=local")),
    "masks": Defence("masks", (*FIXED, *MASKS)),
    "active": Defence("masks, active", (*FIXED, *MASKS, "secure_aggregation.active=true")),
    "distributed": Defence("masks, noise in the sum", (*CLIENT, *FIXED, *MASKS, "privacy.noise=distributed")),
}
ROWS = {
    "traps, SGD": ("traps", SGD),
    "traps, AdamW": ("traps", ADAMW),
    "traps, AdamW, 4 steps": ("traps", FOUR),
    "membership, AdamW": ("membership", ADAMW),
    "suppression, SGD": ("suppression", SGD),
    "replay, AdamW": ("replay", ADAMW),
    "labels, AdamW": ("labels", ADAMW),
    "labels, AdamW, 4 steps": ("labels", FOUR),
}


def cell(row: str, column: str, trials: int) -> dict[str, Any]:
    """Measure one cell."""
    (lie, settings), defence, started = ROWS[row], DEFENCES[column], time.perf_counter()
    config = RunConfig.load(None, [*BASE, *settings, *defence.settings])
    server = LyingServer(Federation(config).assembly, defence.round, trusting=defence.trusting)
    laid = replace(_laid(), server=server, rng=np.random.default_rng(SEED))
    found: Rate = rate(tried(LIES[lie], laid, trials))
    seconds = round(time.perf_counter() - started, 1)
    return {
        "row": row,
        "column": column,
        "trials": trials,
        **asdict(found),
        "seconds": seconds,
        "machine": machine().split(", load")[0],
    }


@cache
def _laid() -> Table:
    """The texts of all cells, computed once: the initial model, and so every input of its head, is the same in all cells."""
    config = RunConfig.load(None, [*BASE, *FIXED])
    return Table.laid(LyingServer(Federation(config).assembly, trusting=True), EACH, SEED)


def wanted(quick: bool) -> Iterator[tuple[str, str]]:
    for column in DEFENCES:
        for row in ROWS:
            if not quick or (row in ("traps, SGD", "labels, AdamW") and column in ("nothing", "first_round", "local")):
                yield row, column


def finished(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["row"], one["column"]): one for one in lines(out)}


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"measured": table(finished(out))}


def table(cells: dict[tuple[str, str], dict[str, Any]]) -> str:
    head = ["attack", "a guess", *(defence.title for defence in DEFENCES.values())]
    rows = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for row in ROWS:
        own = {column: cells[row, column] for column in DEFENCES if (row, column) in cells}
        if own:
            said = [_said(own.get(column)) for column in DEFENCES]
            rows.append(f"| {row} | {_guesses(list(own.values()))} | {' | '.join(said)} |")
    alarms = [one for one in cells.values() if one["quiet"]]
    false, of = sum(one["false_alarms"] for one in alarms), sum(one["quiet"] for one in alarms)
    what = {one["machine"] for one in cells.values()}
    rows += [
        "",
        f"False alarms of all membership verdicts: {false} of {of} clients without the text, at a level of 5 %.",
    ]
    seconds = sum(one["seconds"] for one in cells.values())
    return "\n".join([*rows, "", f"{seconds / 60:.0f} minutes on {'; '.join(sorted(what))}."])


def _said(one: dict[str, Any] | None) -> str:
    if one is None:
        return ""
    if one["refused"] == one["trials"]:
        return "refused"
    low, high = one["interval"]
    share = one["hits"] / max(1, one["of"])
    sure = f"**{share:.0%}**" if low > one["guess"] else f"{share:.0%}"
    return f"{sure} ({low:.0%} to {high:.0%})"


def _guesses(cells: list[dict[str, Any]]) -> str:
    found = sorted({round(one["guess"], 3) for one in cells if one["refused"] < one["trials"]})
    return " to ".join(f"{one:.1%}".replace(".0%", "%") for one in {found[0]: 0, found[-1]: 0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="six cells of six trials, printed alone")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--docs", type=Path, help="write the table into lying_servers.md there, and run nothing")
    chosen = parser.parse_args()
    cells = {} if chosen.quick else finished(chosen.out)
    for row, column in () if chosen.docs else wanted(chosen.quick):
        if (row, column) not in cells:
            one = cells[row, column] = cell(row, column, 6 if chosen.quick else chosen.trials)
            print(f"{row:>24} | {column:<12} {_said(one):<22} {one['seconds']:.0f} s", flush=True)
            if not chosen.quick:
                keep(chosen.out, one)
    print(table(cells))
    if chosen.docs:
        fill(chosen.docs / PAGE, tables(chosen.out))


if __name__ == "__main__":
    main()
