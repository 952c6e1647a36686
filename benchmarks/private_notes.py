"""What methods learn under client-level privacy where an encoder's features alone are not enough: the federation of the demo.

    python benchmarks/private_notes.py [--methods NAME ...] [--epsilons 8] [--seeds 2] [--docs docs]
    one cell: python benchmarks/private_notes.py --methods ffa_lora --epsilons 8 --seeds 1

The built-in notes and model: 5,000 clients of five notes, each once, 250 in each of 20 rounds; a step of AdamW at a client; no
masks and no phantoms, which change no accuracy. The server adds the noise, independent over rounds. The clip norm
is the demo's, 3.1, for all: one step is 2.7 (the head alone) to 4.2 long (FedPower), which follows from the rate and the
number of trained numbers. The server's steps have the same total length for all: momentum 0.5 and a rate of 1.6, or 3.2
without momentum for methods that refuse it. Nothing is tuned for a method here; the demo's settings were, with federa.
Every finished run is one line of --out, and what is there is not made again; --docs writes the table into
docs/private_utility.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import runs_file
import torch
from promises import notes, of_notes

from secure_fed import RunConfig

METHODS: dict[str, dict[str, Any]] = {
    "head": {"name": "head"},
    "bitfit": {"name": "bitfit"},
    **{name: {"name": name} for name in ("fedlora", "ffa_lora", "rolora")},
    "fra_lora, none": {"name": "fra_lora", "denoise": "none"},
    "fra_lora, shrink": {"name": "fra_lora", "denoise": "shrink"},
    "fra_lora, shrink means": {"name": "fra_lora", "denoise": "shrink", "denoise_over": "mean"},
    "fra_lora, truncate": {"name": "fra_lora", "denoise": "truncate"},
    **{name: {"name": name} for name in ("fra_then_ffa", "fedsvd", "fedask", "fedpower")},
    "federa, A frozen": {"name": "federa", "rule": "ffa_lora"},
}
WITHOUT_MOMENTUM = ("rolora", "fedsvd", "fedask", "fedpower")
EPSILONS, CLIP_NORM = (8.0, 3.0, 1.0), 3.1
Key = tuple[str, float, int]


def config(method: str, epsilon: float, seed: int) -> RunConfig:
    tables = of_notes(seed, 20).to_dict()
    tables["federation"] |= {"sampling": "schedule", "server_momentum": 0.5, "server_lr": 1.6}
    if method in WITHOUT_MOMENTUM:
        del tables["federation"]["server_momentum"]
        tables["federation"] |= {"server_optimizer": "mean", "server_lr": 3.2}
    tables["privacy"] = {"unit": "client", "epsilon": epsilon, "noise": "central", "correlation": "none"}
    tables["privacy"] |= {"clip_norm": CLIP_NORM}
    return RunConfig.from_dict(tables | {"method": METHODS[method]})


def stored(out: Path) -> dict[Key, float]:
    return {(run["method"], run["epsilon"], run["seed"]): run["accuracy"] for run in runs_file.lines(out)}


def table(found: dict[Key, float]) -> str:
    """Mean accuracy and its standard deviation over seeds, and the lead over the head alone."""
    epsilons = [epsilon for epsilon in EPSILONS if any(key[1] == epsilon for key in found)]
    lines = [["method", *(f"epsilon {epsilon:g}" for epsilon in epsilons), "over the head alone at 8"]]
    lines.append(["---"] * len(lines[0]))
    for method in METHODS:
        by_epsilon = [[value for key, value in found.items() if key[:2] == (method, epsilon)] for epsilon in epsilons]
        heads = {key[2]: value for key, value in found.items() if key[:2] == ("head", 8.0)}
        own = {key[2]: value for key, value in found.items() if key[:2] == (method, 8.0)}
        leads = [own[seed] - heads[seed] for seed in own.keys() & heads.keys()]
        if any(by_epsilon):
            lead = "" if method == "head" or not leads else f"{100 * statistics.mean(leads):+.1f}"
            lines.append([method if " " in method else f"`{method}`", *map(_shown, by_epsilon), lead])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{spread} ({len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, choices=EPSILONS, default=[8.0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--docs", type=Path, help="write the table into private_utility.md there")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    for seed, epsilon, method in itertools.product(range(given.seeds), given.epsilons, given.methods):
        if (method, epsilon, seed) in stored(given.out):
            continue
        began = time.perf_counter()
        accuracy = notes(config(method, epsilon, seed)).run().summary["accuracy"]
        line = {"method": method, "epsilon": epsilon, "seed": seed, "accuracy": accuracy}
        runs_file.keep(given.out, line | {"seconds": time.perf_counter() - began})
        print(method, epsilon, seed, f"{accuracy:.3f}", flush=True)
    text = table(stored(given.out))
    print(text)
    if given.docs:
        runs_file.put(given.docs / "private_utility.md", "notes", text)


if __name__ == "__main__":
    main()
