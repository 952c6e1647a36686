"""A federated language model on real text, with privacy and without: perplexity, exposure of canaries, bytes, time.

    python benchmarks/language_model.py DATA [--methods ffa_lora] [--epsilons inf 8] [--seeds 3] [--docs docs]
    one cell: python benchmarks/language_model.py DATA --methods fedlora --epsilons 8 --seeds 1

DATA contains gutenberg24 (`text` and `book`) and modern_text (`text`), each with train.jsonl.gz. Half of the books count as
public: a GPT-2 of three layers, of width 96, is trained on them. Ten silos with 800 passages of modern text each, of at most 32
tokens, fine-tune it in 5 rounds. The test set is 1,000 passages of modern text that no silo has.

Each silo has one canary: a sentence with a name and a random number of two digits, once in half of the silos and eight times in
the others. Exposures are exact, over all 100 numbers; a number outside the training has 1.44 bits on average.

Without privacy a silo trains one epoch in each round. With privacy, it makes four steps a round on about 256 passages, each
passage's gradient clipped to norm 1, delta 1e-5; epsilon holds for a passage, against the server too. Learning rates are the
methods' defaults. Every finished run is one line of --out and is not run again. Without DATA nothing is run, and --docs writes
the table into docs/extraction.md from the stored runs.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import runs_file
import torch
from exposure import LENGTH, TEMPLATE, public

from attacks.extraction.exposure import exposures
from privacy.entropy import SeededEntropy
from secure_fed import Federation, RunConfig
from secure_fed.config import DataConfig
from secure_fed.learning import tasks
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.evaluation import evaluate

SILOS, EACH, TESTS, ROUNDS, DELTA = 10, 800, 1000, 5, 1e-5
STEPS, WIDTH, LAYERS = 1500, 96, 3  # of the public model
COPIES = (1, 8)  # copies of a silo's canary, alternating
METHODS, EPSILONS = ("fedlora", "ffa_lora", "bitfit"), (math.inf, 8.0, 1.0)
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "extraction.md"
Run = dict[str, Any]


def config(method: str, epsilon: float, seed: int) -> RunConfig:
    tables: dict[str, Any] = {
        "federation": {"rounds": ROUNDS, "seed": seed},
        "method": {"name": method}
        if method == "bitfit"
        else {"name": method, "rank": 8, "target_modules": ["c_attn", "c_fc"]},
        "training": {"epochs": 1},
        "evaluation": {"every": ROUNDS, "audit_fraction": 0.0},
    }
    if math.isfinite(epsilon):
        tables["privacy"] = {"unit": "example", "epsilon": epsilon, "delta": DELTA, "clip_norm": 1.0}
        tables["training"] = {"steps": 4}
        tables["evaluation"] = {"every": ROUNDS, "dummies": 0}
    return RunConfig.from_dict(tables)


def one_run(data: Path, method: str, epsilon: float, seed: int) -> Run:
    """Perplexity before and after, exposures by silo, and the cost of the run."""
    tokenizer, model, _ = public(data / "gutenberg24", STEPS, WIDTH, LAYERS)
    texts = _modern(data / "modern_text")
    order = np.random.default_rng(seed).permutation(len(texts) - TESTS)
    planted = TEMPLATE.drawn(SILOS, SeededEntropy(seed).stream("canaries"))
    task = tasks.build(DataConfig(task="causal_lm"))

    def encoded(some: list[str]) -> Any:
        return task.encode(tokenizer, Rows(tuple(some), (None,) * len(some), ()), LENGTH)

    silos = []
    for silo, one in enumerate(planted):
        own = [texts[int(at)] for at in order[silo * EACH : (silo + 1) * EACH]]
        silos.append(encoded([*own, *[TEMPLATE.written(one)] * COPIES[silo % 2]]))
    test, collate, metrics = encoded(texts[-TESTS:]), task.collate(tokenizer), task.metrics(())
    before = evaluate(model, test, collate, metrics, 64, torch.device("cpu"))["perplexity"]
    started = time.perf_counter()
    federation = Federation(
        config(method, epsilon, seed),
        model=copy.deepcopy(model),
        train=silos,
        test=test,
        collate=collate,
        loss=task.loss(()),
        metrics=metrics,
    )
    result = federation.run()
    seconds = time.perf_counter() - started
    found = [one.exposure for one in exposures(federation.load(result.state).eval(), tokenizer, TEMPLATE, planted)]
    line = {"method": method, "target": str(epsilon), "seed": seed, "before": before, "seconds": seconds}
    return line | {
        "perplexity": result.records[-1]["perplexity"],
        "exposures": found,
        "bytes_up": result.summary["bytes_up"],
        "epsilon": result.summary["epsilon"],
    }


def _modern(folder: Path) -> list[str]:
    """The folder's texts in passages of 25 words."""
    rows = map(json.loads, gzip.decompress((folder / "train.jsonl.gz").read_bytes()).decode().splitlines())
    words = [row["text"].split() for row in rows]
    return [" ".join(some[at : at + 25]) for some in words for at in range(0, len(some) - 25, 25)]


def stored(out: Path) -> dict[tuple[str, str, int], Run]:
    """The stored runs, by method, epsilon and seed."""
    return {(run["method"], run["target"], run["seed"]): run for run in runs_file.lines(out)}


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"language model": table(list(stored(out).values()))}


def table(runs: list[Run]) -> str:
    """Means over seeds and their standard deviation."""
    heads = ["method", "epsilon", "seeds", "perplexity before", "after", *(f"exposure, {one} x" for one in COPIES)]
    lines = [[*heads, "sent by a silo in a round", "seconds"], ["---"] * (len(heads) + 2)]
    for method, epsilon in itertools.product(METHODS, map(str, EPSILONS)):
        own = [run for run in runs if (run["method"], run["target"]) == (method, epsilon)]
        if own:
            bits = [[statistics.mean(run["exposures"][turn::2]) for run in own] for turn in range(2)]
            numbers = [[run[name] for run in own] for name in ("before", "perplexity")]
            sent = f"{own[0]['bytes_up'] / SILOS / ROUNDS / 1e3:.0f} kB"
            took = f"{statistics.mean(run['seconds'] for run in own):.0f}"
            lines.append([f"`{method}`", epsilon, str(len(own)), *map(_spread, [*numbers, *bits]), sent, took])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _spread(found: list[float]) -> str:
    return f"{statistics.mean(found):.2f}" + (f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--docs", type=Path, help="write the table into extraction.md there")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    for seed, epsilon, method in itertools.product(range(given.seeds), given.epsilons, given.methods):
        if given.data and (method, str(epsilon), seed) not in stored(given.out):
            line = one_run(given.data, method, epsilon, seed)
            runs_file.keep(given.out, line)
            print(
                method,
                epsilon,
                seed,
                f"{line['before']:.1f} to {line['perplexity']:.1f}",
                f"{line['seconds']:.0f} s",
                flush=True,
            )
    made = tables(given.out)
    print(*made.values())
    if given.docs:
        runs_file.fill(given.docs / PAGE, made)


if __name__ == "__main__":
    main()
