"""What four bits cost: each family of methods on a language model in 4 bits and in full, without privacy and with two units.

    python benchmarks/quantised_perplexity.py MODEL TRAIN TEST [--methods fedlora] [--units none] [--docs docs]
    python benchmarks/quantised_perplexity.py --docs docs                              the table, from stored runs

MODEL: the folder of a causal language model, such as SmolLM2-135M-Instruct. TRAIN, TEST: files of prompts (`text`) and their
targets (`answer`), such as gsm8k's train.jsonl.gz and test.jsonl.gz. The first texts of at most 80 tokens are used. Two
clients of four texts take part in two rounds, each with a step on two texts. Methods have their default settings, except
for the number of virtual tokens. The figure is the perplexity of the targets of 6 test texts.

    none       without privacy
    client     noise multiplier 0.1: a mean of two clients has little of it
    example    noise multiplier 0.5, clip norm 1

So few clients give no useful guarantee: the table shows that every way works, and what the 4 bits change beside it. The noise
is drawn from a seed, so that both bases have the same; private runs draw it from the operating system. Every finished run is a
line of quantised_perplexity.jsonl beside this file and is not run again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from decoder_rates import Texts
from language_model_cost import padded
from runs_file import fill, keep, lines
from torch import nn

from privacy.entropy import SeededEntropy
from secure_fed import Federation, RunConfig
from secure_fed.config import DataConfig, ModelConfig
from secure_fed.learning import tasks
from secure_fed.learning.evaluation import evaluate
from secure_fed.learning.models.loading import load

CLIENTS, EACH, ROUNDS, BATCH, TESTED, LONGEST = 2, 4, 2, 2, 6, 80
METHODS = {
    "fedlora": "averaged LoRA",
    "ffa_lora": "frozen A",
    "fra_lora": "averaged products",
    "federa": "start from singular vectors",
    "fedara": "adaptive ranks",
    "fedtt": "tensor trains",
    "adapter_pfeiffer": "bottleneck adapters",
    "prefix_tuning": "virtual tokens",
    "ia3": "scaled activations",
    "c2a": "hypernetwork",
}
BASES = ("none", "4bit")
UNITS: dict[str, dict[str, Any]] = {
    "none": {},
    "client": {"unit": "client", "noise_multiplier": 0.1, "delta": 1e-3},
    "example": {"unit": "example", "noise_multiplier": 0.5, "clip_norm": 1.0, "delta": 1e-3},
}


STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "base_models.md"


class Cell(NamedTuple):
    method: str  # "before": untrained
    unit: str
    base: str


def settings(cell: Cell) -> RunConfig:
    tables: dict[str, Any] = {
        "federation": {"rounds": ROUNDS, "cohort": CLIENTS},
        "method": {"name": cell.method} | ({"prompt_length": 4} if cell.method == "prefix_tuning" else {}),
        "training": {"batch_size": BATCH, "steps": 1},
        "evaluation": {"every": ROUNDS, "audit_fraction": 0.0},
    }
    if cell.unit == "none":
        tables["federation"]["sampling"] = "fixed"
    else:
        tables |= {"privacy": UNITS[cell.unit], "evaluation": tables["evaluation"] | {"dummies": 0}}
    return RunConfig.from_dict(tables)


def made(model: nn.Module, texts: Texts, cell: Cell) -> float:
    """The perplexity after training."""
    task = tasks.build(DataConfig(task="causal_lm"))
    items = {
        split: [{name: row[name] for name in ("input_ids", "labels")} for row in texts.rows(split)[:count]]
        for split, count in (("train", CLIENTS * EACH), ("test", TESTED))
    }
    if cell.method == "before":
        return evaluate(model, items["test"], padded, task.metrics(()), BATCH, torch.device("cpu"))["perplexity"]
    federation = Federation(
        settings(cell),
        model=copy.deepcopy(model),
        train=[items["train"][at::CLIENTS] for at in range(CLIENTS)],
        test=items["test"],
        collate=padded,
        loss=task.loss(()),
        metrics=task.metrics(()),
        entropy=SeededEntropy(0),
    )
    return float(federation.run().records[-1]["perplexity"])


def stored(out: Path) -> dict[Cell, float]:
    return {Cell(*(run[name] for name in Cell._fields)): run["perplexity"] for run in lines(out)}


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"quantised perplexity": table(stored(out))}


def table(found: Mapping[Cell, float]) -> str:
    """Perplexities of the 4-bit base, and of the full base behind them."""
    shown = [["family", "method", *UNITS], ["---"] * (2 + len(UNITS))]
    before = [_pair(found, "before", "none"), "", ""]
    shown.append(["before training", "", *before])
    for method, family in METHODS.items():
        cells = [_pair(found, method, unit) for unit in UNITS]
        if any(cells):
            shown.append([family, f"`{method}`", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def _pair(found: Mapping[Cell, float], method: str, unit: str) -> str:
    four, full = (found.get(Cell(method, unit, base)) for base in ("4bit", "none"))
    return "" if four is None or full is None else f"{four:.2f}, {full:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("train", type=Path, nargs="?")
    parser.add_argument("test", type=Path, nargs="?")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS))
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--docs", type=Path, help="write the table into base_models.md there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.model:
        texts, task = Texts(given.model, given.train, given.test, LONGEST), tasks.build(DataConfig(task="causal_lm"))
        bases = {base: load(ModelConfig(name=given.model, quantization=base), task, (), seed=0).model for base in BASES}
        cells = [("before", "none"), *itertools.product(given.methods, given.units)]
        for (method, unit), base in itertools.product(cells, BASES):
            cell = Cell(method, unit, base)
            if cell not in stored(given.out):
                started = time.perf_counter()
                perplexity = made(bases[base], texts, cell)
                took = time.perf_counter() - started
                keep(given.out, cell._asdict() | {"perplexity": perplexity, "seconds": took})
                print(*cell, f"{perplexity:.3f}, {took:.0f} s", flush=True)
    rows = tables(given.out)
    print(*rows.values())
    if given.docs:
        fill(given.docs / PAGE, rows)


if __name__ == "__main__":
    main()
