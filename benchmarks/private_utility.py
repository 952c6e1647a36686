"""What client-level privacy costs each method in accuracy, on public text.

    python benchmarks/private_utility.py FOLDER... [--seeds 3] [--rounds 8] [--quick] [--out runs.jsonl] [--docs docs]

FOLDER, whose name is the data set's (one of SCALES), holds train.jsonl.gz and test.jsonl.gz with `text` and `label`. For every
data set, method, epsilon in {inf, 8, 3, 1} and seed: a federation of thousands of clients of a few examples each, Poisson
cohorts, noise on the sum, delta 1e-5; at inf neither noise nor clipping, so all of FRA's rows are one.

The encoder is all-MiniLM-L6-v2 (six layers; the `bench` extra), computing in bfloat16. Its first five layers are frozen and are
run once for each text, which makes this affordable; adapters of rank 8 stand on query and value of the last. The classifier, on
its standardised mean over tokens, is made of descriptions of the classes and frozen: all that is learned is in the adapters.

Every finished run is one line of --out, and what is there is not run again. --first-seed, --lr and --clip are for choosing
settings on seeds that the table does not use; that choice is not charged to any epsilon. Noise and cohorts are seeded, to be
repeatable, so nothing that this makes is private.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from private_utility_report import present
from private_utility_task import SCALES, Item, Scale, Top, collate, prepared, pretrained, zero_shot

from privacy.accounting import calibrate
from privacy.entropy import SeededEntropy
from privacy.sampling import Poisson
from secure_fed import Federation, RunConfig
from secure_fed.learning.evaluation import evaluate
from secure_fed.learning.tasks.classification import metrics
from secure_fed.methods.fra_lora import FraLora

EPSILONS = (math.inf, 8.0, 3.0, 1.0)


@dataclass(frozen=True)
class Method:
    """A row of the table: what the method is called, its settings, and its local learning rate and clip norm with privacy."""

    name: str
    lr: float
    clip: float
    settings: dict[str, Any]


COHORT, ROUNDS, DELTA = 100, 8, 1e-5
TEMPORARY = Path(tempfile.gettempdir())
PUBLIC_LR = 0.1  # without clipping, a small rate
METHODS = {
    "FedLoRA": Method("fedlora", 1.0, 0.3, {}),
    "FFA": Method("ffa_lora", 1.0, 0.3, {}),
    "FRA truncated": Method("fra_lora", 0.1, 0.1, {"denoise": "truncate"}),
    "FRA shrunk": Method("fra_lora", 0.1, 0.1, {"denoise": "shrink", "denoise_over": "mean"}),
    "FRA truncated, lr 1": Method("fra_lora", 1.0, 0.1, {"denoise": "truncate"}),
    "FRA shrunk, lr 1": Method("fra_lora", 1.0, 0.1, {"denoise": "shrink", "denoise_over": "mean"}),
    "FRA as it is": Method("fra_lora", 0.1, 0.1, {"denoise": "none"}),
}
ONCE = {"FRA as it is": (3.0,), "FRA truncated, lr 1": (8.0,), "FRA shrunk, lr 1": (8.0,)}  # ablations


@dataclass(frozen=True)
class Watched(FraLora):
    """FRA that notes how many directions of each noised mean stand out of the noise, and how far the greatest does."""

    def _denoised(self, mean: Any, noise_std: float) -> Any:
        if noise_std:
            edge = noise_std * sum(math.sqrt(side) for side in mean.shape)
            values = torch.linalg.svdvals(mean)
            SEEN.append((int((values > edge).sum()), float(values[0]) / edge))
        return super()._denoised(mean, noise_std)


SEEN: list[tuple[int, float]] = []


@functools.cache
def noise(epsilon: float, clients: int, rounds: int) -> float:
    return calibrate(Poisson(clients, COHORT / clients).release, rounds, epsilon, DELTA)


def settings(method: Method, epsilon: float, seed: int, scale: Scale, given: argparse.Namespace) -> dict[str, Any]:
    """The configuration of a run; the noise multiplier is that of epsilon, found once."""
    private = math.isfinite(epsilon)
    own = {name: value for name, value in method.settings.items() if private or not name.startswith("denoise")}
    adapter = {"rank": 8, "alpha": 16.0, "target_modules": ["query", "value"]}
    config: dict[str, Any] = {
        "federation": {"cohort": COHORT, "rounds": given.rounds, "seed": seed, "sampling": "poisson"},
        "method": {"name": method.name} | adapter | own,
        "training": {
            "lr": (given.lr or method.lr) if private else PUBLIC_LR,
            "steps": 1,
            "batch_size": scale.each,
            "optimizer": "sgd",
        },
        "evaluation": {"every": given.rounds, "audit_fraction": 0.0},
    }
    if private:
        z = noise(epsilon, scale.clients, given.rounds)
        config["privacy"] = {
            "unit": "client",
            "delta": DELTA,
            "noise_multiplier": z,
            "clip_norm": given.clip or method.clip,
        }
    return config


def run(config: dict[str, Any], model: Top, train: list[Item], test: list[Item], each: int) -> dict[str, Any]:
    """One federation: its accuracy, and what FRA saw of the noise."""
    seed = config["federation"]["seed"]
    order = np.random.default_rng(seed).permutation(len(train))
    clients = [[train[int(i)] for i in order[start : start + each]] for start in range(0, len(train), each)]
    started = time.perf_counter()
    federation = Federation(
        RunConfig.from_dict(config),
        model=copy.deepcopy(model),
        train=clients,
        test=test,
        collate=collate,
        entropy=SeededEntropy(seed),
    )
    if isinstance(federation.assembly.method, FraLora):
        watched = Watched(federation.assembly.method.adapter, denoise=federation.assembly.method.denoise)
        server = replace(federation.assembly.server, method=watched)
        federation.assembly = replace(federation.assembly, server=server)
    SEEN.clear()
    result = federation.run()
    facts = {"accuracy": result.records[-1]["accuracy"], "seconds": time.perf_counter() - started}
    if "privacy" in config:
        facts["noise_multiplier"] = config["privacy"]["noise_multiplier"]
        facts["epsilon_charged"] = result.summary.get("privacy", {}).get("epsilon")
    if SEEN:
        survive, over_edge = (statistics.mean(column) for column in zip(*SEEN, strict=True))
        facts |= {"survive": survive, "over_edge": over_edge}
    return facts


def finished(out: Path) -> dict[str, dict[str, Any]]:
    """The runs that the file holds, by key."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {run["key"]: run for run in map(json.loads, lines)}


def run_all(given: argparse.Namespace) -> None:
    """Every run that the file does not hold, seed by seed."""
    tokenizer, encoder = pretrained()
    models = {folder.name: zero_shot(tokenizer, encoder, SCALES[folder.name].classes) for folder in given.folders}
    parts = {folder.name: prepared(folder, given.cache) for folder in given.folders}
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    cpu = torch.device("cpu")
    before = {
        data: evaluate(models[data], test, collate, metrics, 64, cpu)["accuracy"] for data, (_, test) in parts.items()
    }
    for seed, data, epsilon, label in itertools.product(seeds, parts, EPSILONS, METHODS):
        if epsilon not in ONCE.get(label, EPSILONS) or (math.isinf(epsilon) and label == "FRA truncated"):
            continue
        config = settings(METHODS[label], epsilon, seed, SCALES[data], given)
        key = json.dumps([data, label, str(epsilon), config], sort_keys=True)
        if key in finished(given.out):
            continue
        facts = run(config, models[data], *parts[data], SCALES[data].each)
        line = {"data": data, "label": label, "epsilon": str(epsilon), "seed": seed, "before": before[data], **facts}
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"key": key}) + "\n")
        print(data, label, epsilon, seed, f"{facts['accuracy']:.3f} in {facts['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one seed, two rounds")
    parser.add_argument("--out", type=Path, default=TEMPORARY / "private_utility.jsonl")
    parser.add_argument(
        "--cache", type=Path, default=TEMPORARY / "private_utility_cache", help="what the frozen layers made"
    )
    parser.add_argument(
        "--docs", type=Path, help="write private_utility.svg there, and the tables into private_utility.md"
    )
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.rounds = 1, 2
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    run_all(given)
    present(list(finished(given.out).values()), given.docs)


if __name__ == "__main__":
    main()
