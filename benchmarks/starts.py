"""FFA-LoRA's frozen A, drawn at random or made from the model's weights: which trains better under noise?

    python benchmarks/starts.py [--sst2 FOLDER] [--seeds 3] [--only NAME ...] [--starts NAME ...] [--docs docs]

    gaussian, orthonormal    A is drawn from the seed (`method.freeze_init`)
    singular                 A contains the largest singular vectors of the adapted weights: `method.name = "federa"` with
                             `method.rule = "ffa_lora"`
    head alone               no adapter; the rate of the demo (the better of .02 and .06 on seed 0), and the matching clip norm,
                             which is the length of one step

clients: the clients, rounds and steps of `secure-fed demo` at epsilon 8 with independent noise (or at epsilon 3 with
correlated noise), without masks and dummies, which change no accuracy. silos: four silos of 1,000 built-in notes, 10 rounds
(or 20, the default), epsilon 8 for each note (or 3), otherwise defaults. FOLDER: named sst2, with train.jsonl.gz and
test.jsonl.gz of `text` and `label`; the last layer of all-MiniLM-L6-v2 (the `bench` extra): "sst2 clients" as in promises.py,
"sst2 silos" 10 silos of 800 sentences for 10 rounds. "open": the same silos without privacy.

Noise comes from the operating system; a seed decides the division of the data, the public order and a drawn A. Every finished
run is a line of starts.jsonl beside this file and is not run again. --docs writes the table into docs/recipes.md, and runs
nothing.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import runs_file
import torch
from promises import notes, of_notes, of_sst2, sentences, sst2

from secure_fed import Federation, RunConfig

STARTS: dict[str, dict[str, Any]] = {
    "gaussian": {"name": "ffa_lora", "freeze_init": "gaussian"},
    "orthonormal": {"name": "ffa_lora", "freeze_init": "orthonormal"},
    "singular": {"name": "federa", "rule": "ffa_lora"},
    "head alone": {"name": "head"},
}
HEAD_RATE, HEAD_NUMBERS = 0.02, 17_544  # for the head alone with the notes' clients
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "recipes.md"
_SHOWN = {"head alone": "classification layer alone"}  # a name in stored runs
Made = Callable[[int, Mapping[str, Any]], Federation]


def of_clients(seed: int, method: Mapping[str, Any], epsilon: float = 8.0, correlation: str = "none") -> Federation:
    tables = of_notes(seed, 20).to_dict()
    tables["federation"] |= {"sampling": "schedule", "server_momentum": 0.5, "server_lr": 1.6}
    tables["privacy"] |= {"noise": "central", "correlation": correlation, "epsilon": epsilon}
    if method["name"] == "head":
        tables["training"]["lr"] = HEAD_RATE
        tables["privacy"]["clip_norm"] = HEAD_RATE * HEAD_NUMBERS**0.5
    return notes(RunConfig.from_dict(tables | {"method": dict(method)}))


def of_silos(seed: int, method: Mapping[str, Any], epsilon: float | None = 8.0, rounds: int = 10) -> Federation:
    tables = {
        "data": {"examples": 4000, "test_examples": 1000},
        "federation": {"clients": 4, "rounds": rounds, "seed": seed},
    }
    return notes(RunConfig.from_dict({**tables, **_promised(epsilon), "method": dict(method)}))


def of_sst2_clients(folder: Path, seed: int, method: Mapping[str, Any]) -> Federation:
    tables = of_sst2(seed, 20).to_dict()
    tables["federation"] |= {"sampling": "schedule"}
    tables["privacy"] |= {"noise": "central", "correlation": "none"}
    return sst2(folder, RunConfig.from_dict(tables | {"method": _last_layer(method)}))


def of_sst2_silos(folder: Path, seed: int, method: Mapping[str, Any], epsilon: float | None = 8.0) -> Federation:
    from last_layer import collate

    def whole(items: Any) -> dict[str, Any]:
        batch = collate(items)
        return batch | {"hidden": batch["hidden"].float()}

    tables = {"federation": {"rounds": 10, "seed": seed}}
    config = RunConfig.from_dict({**tables, **_promised(epsilon), "method": _last_layer(method)})
    model, train, test = sentences(folder)
    order = np.random.default_rng(seed).permutation(len(train))[:8000]
    silos = [[train[int(i)] for i in order[start : start + 800]] for start in range(0, 8000, 800)]
    return Federation(config, model=copy.deepcopy(model), train=silos, test=test, collate=whole)


def _promised(epsilon: float | None) -> dict[str, Any]:
    """The settings of the guarantee, without an audit."""
    if epsilon is None:
        return {"evaluation": {"every": 10}}
    return {"evaluation": {"every": 10, "dummies": 0}, "privacy": {"unit": "example", "epsilon": epsilon}}


def _last_layer(method: Mapping[str, Any]) -> dict[str, Any]:
    return {**method, "target_modules": ["query", "value"]}


def tasks(folder: Path | None) -> dict[str, Made]:
    found: dict[str, Made] = {
        "clients": of_clients,
        "clients, epsilon 3, correlated noise": functools.partial(of_clients, epsilon=3.0, correlation="banded"),
        "silos": of_silos,
        "silos, 20 rounds": functools.partial(of_silos, rounds=20),
        "silos, 20 rounds, epsilon 3": functools.partial(of_silos, epsilon=3.0, rounds=20),
        "silos, open": functools.partial(of_silos, epsilon=None),
    }
    if folder is None:
        return found
    return found | {
        "sst2 clients": functools.partial(of_sst2_clients, folder),
        "sst2 silos": functools.partial(of_sst2_silos, folder),
        "sst2 silos, open": functools.partial(of_sst2_silos, folder, epsilon=None),
    }


def finished() -> dict[tuple[str, str, int], float]:
    return {(run["task"], run["start"], run["seed"]): run["accuracy"] for run in runs_file.lines(STORED)}


def tables() -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"starts": table(finished())}


def table(found: Mapping[tuple[str, str, int], float]) -> str:
    """Mean, lowest and highest accuracy in per cent, and the number of seeds."""
    heads = (_SHOWN.get(start, start) for start in STARTS)
    rows = ["| task | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(STARTS)]
    for task in dict.fromkeys(key[0] for key in found):
        cells = [[100 * accuracy for key, accuracy in found.items() if key[:2] == (task, start)] for start in STARTS]
        rows.append(f"| {task} | " + " | ".join(map(_shown, cells)) + " |")
    return "\n".join(rows)


def _shown(some: Sequence[float]) -> str:
    if len(some) < 2:
        return "".join(f"{one:.1f} (1)" for one in some)
    return f"{statistics.mean(some):.1f} ({min(some):.1f} to {max(some):.1f}; {len(some)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sst2", type=Path, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tasks alone")
    parser.add_argument("--starts", nargs="+", choices=list(STARTS), default=list(STARTS))
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    made = {} if given.docs else tasks(given.sst2)
    wanted = (given.only or made) if made else ()
    for seed, task, start in itertools.product(range(given.seeds), wanted, given.starts):
        if (task, start, seed) in finished():
            continue
        began = time.perf_counter()
        accuracy = made[task](seed, STARTS[start]).run().summary["accuracy"]
        line = {
            "task": task,
            "start": start,
            "seed": seed,
            "accuracy": accuracy,
            "seconds": time.perf_counter() - began,
        }
        runs_file.keep(STORED, line)
        print(task, start, seed, f"{accuracy:.3f}", file=sys.stderr, flush=True)
    print(*tables().values())
    if given.docs:
        runs_file.fill(given.docs / PAGE, tables())


if __name__ == "__main__":
    main()
