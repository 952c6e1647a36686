"""Which learning rate suits a language model? The main methods and PEFT's LoRA, on a pre-trained decoder with its real weights.

    python benchmarks/decoder_rates.py MODEL TRAIN TEST [--methods fedlora federa] [--rates 0.001] [--rounds 6] [--clients 1]
    python benchmarks/decoder_rates.py --docs docs                                     the table, from stored runs

MODEL: the folder of a causal language model, such as SmolLM2-135M-Instruct. TRAIN, TEST: files of prompts (`text`) and their
targets (`answer`), such as gsm8k's train.jsonl.gz and test.jsonl.gz. The first texts of at most 112 tokens are used. Clients
train LoRA of rank 8 on all linear layers, in rounds of four steps of two texts; every text is trained on once. The
peer is PEFT's LoRA with as many steps of as many texts, and a rate that falls linearly, as in Hugging Face's Trainer.

Rates are tried on a grid around the default, in which each is three times the one before. The figure is the perplexity of the
targets of 24 test texts. Every finished run is a line of decoder_rates.jsonl beside this file and is not run again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from language_model_cost import Bench, padded, peft_model
from runs_file import fill, keep, lines
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForCausalLM

from secure_fed import Federation, RunConfig
from secure_fed.config import DataConfig
from secure_fed.learning import tasks
from secure_fed.learning.evaluation import evaluate
from secure_fed.methods import METHODS, card

LONGEST, TESTED, STEPS, BATCH, WIDTH = 112, 24, 4, 2, 576
MAIN, PEER, BEFORE = ("fedlora", "ffa_lora", "fra_lora", "federa", "fedara"), "LoRA (PEFT)", "before"
GRID = tuple(round(card("fedlora").lr_of(WIDTH) * 3.0**power, 9) for power in (-2, -1, 0, 1, 2))
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "learning_rates.md"


class Cell(NamedTuple):
    method: str
    rate: float
    rounds: int
    clients: int
    seed: int = 0


class Texts:
    """The texts that fit, as rows of token ids and as files. Each method returns the first `count` of them."""

    def __init__(self, model: str, train: Path, test: Path, longest: int = LONGEST) -> None:
        self.longest, self._places = longest, {"train": train, "test": test}
        self._model, self._work = model, tempfile.TemporaryDirectory()

    @functools.cache  # noqa: B019 - as long as the process
    def rows(self, split: str) -> list[dict[str, Any]]:
        found = Bench.of(Path(self._model), self._places[split]).rows
        return [row for row in found if len(row["input_ids"]) <= self.longest]

    def file(self, split: str, count: int, clients: int = 1) -> str:
        """The path of a file of them, divided evenly among the clients in their order."""
        rows, place = self.rows(split)[:count], Path(self._work.name, f"{split}-{count}-{clients}.jsonl")
        if len(rows) < count:
            raise SystemExit(
                f"{self._places[split]} has {len(rows)} texts of at most {self.longest} tokens, not {count}"
            )
        owned = (
            {"text": row["text"], "answer": row["answer"], "client": f"client {at * clients // count}"}
            for at, row in enumerate(rows)
        )
        place.write_text("".join(json.dumps(row) + "\n" for row in owned), encoding="utf-8")
        return str(place)


def settings(model: str, texts: Texts, cell: Cell) -> RunConfig:
    rounds, clients = cell.rounds, cell.clients
    return RunConfig.from_dict(
        {
            "model": {"name": model, "max_length": texts.longest},
            "data": {
                "task": "causal_lm",
                "train": texts.file("train", rounds * STEPS * BATCH * clients, clients),
                "test": texts.file("test", TESTED),
                "text_b": "answer",
                "client": "client",
            },
            "federation": {"rounds": rounds, "cohort": clients, "sampling": "fixed", "seed": cell.seed},
            "method": {"name": cell.method, "target_modules": "all-linear"},
            "training": {"lr": cell.rate, "batch_size": BATCH, "steps": STEPS},
            "evaluation": {"every": rounds, "audit_fraction": 0.0},
        }
    )


def tested(model: Any, texts: Texts) -> float:
    """The perplexity of the test texts' targets."""
    metrics = tasks.build(DataConfig(task="causal_lm")).metrics(())
    return evaluate(model, texts.rows("test")[:TESTED], padded, metrics, 8, torch.device("cpu"))["perplexity"]


def ours(model: str, texts: Texts, cell: Cell) -> float:
    """The perplexity after training."""
    return float(Federation(settings(model, texts, cell)).run().records[-1]["perplexity"])


def peer(model: str, texts: Texts, cell: Cell) -> float:
    """The perplexity with PEFT's LoRA, trained in a plain loop."""
    rows, steps = texts.rows("train"), cell.rounds * STEPS
    torch.manual_seed(cell.seed)
    adapted = peft_model(model)
    moving = [one for one in adapted.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(moving, cell.rate, weight_decay=0.0)
    falling = LinearLR(optimizer, 1.0, 0.0, steps)
    order = torch.randperm(steps * BATCH, generator=torch.Generator().manual_seed(cell.seed)).tolist()
    adapted.train()
    for step in range(steps):
        optimizer.zero_grad()
        adapted(**padded([rows[at] for at in order[step * BATCH : (step + 1) * BATCH]])).loss.backward()
        optimizer.step()
        falling.step()
    return tested(adapted, texts)


def trained(model: str, texts: Texts, cell: Cell) -> float:
    if cell.method == BEFORE:
        return tested(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), texts)
    return (peer if cell.method == PEER else ours)(model, texts, cell)


def stored(out: Path) -> dict[Cell, float]:
    return {Cell(*(run[name] for name in Cell._fields)): run["perplexity"] for run in lines(out)}


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"decoder rates": table(stored(out))}


def table(runs: Mapping[Cell, float]) -> str:
    """Perplexities after training: a row for each method and length, a column for each rate; the default's is in bold type."""
    rates = sorted({cell.rate for cell in runs if cell.rate})
    names = [BEFORE, *METHODS, PEER]
    rows = sorted({cell._replace(rate=0.0) for cell in runs}, key=lambda row: (*row[2:], names.index(row.method)))
    shown = [["method", "clients", "steps of each", *(f"{rate:.2g}" for rate in rates)]]
    shown.append(["---"] * len(shown[0]))
    for row in rows:
        steps = row.rounds * STEPS
        usual = default(row.method, steps) if row.method in METHODS else None
        found = {rate: runs.get(row._replace(rate=0.0 if row.method == BEFORE else rate)) for rate in rates}
        name = f"`{row.method}`" if row.method in METHODS else row.method
        shown.append([name, str(row.clients), str(steps), *(_cell(one, rate == usual) for rate, one in found.items())])
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def default(method: str, steps: float) -> float:
    """The rate of the grid nearest to the one that a run chooses."""
    chosen = card(method).lr_of(WIDTH, steps, decoder=True)
    return min(GRID, key=lambda rate: abs(math.log(rate / chosen)))


def _cell(found: float | None, usual: bool) -> str:
    if found is None:
        return ""
    figure = f"{found:.2f}" if found < 100 else "over 100"
    return f"**{figure}**" if usual else figure


def cells(given: argparse.Namespace) -> Iterator[Cell]:
    yield Cell(BEFORE, 0.0, 0, 0)
    for rate, method in itertools.product(given.rates, given.methods):
        yield Cell(method, rate, given.rounds, given.clients, given.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("train", type=Path, nargs="?")
    parser.add_argument("test", type=Path, nargs="?")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, PEER], default=[*MAIN, PEER])
    parser.add_argument("--rates", type=float, nargs="+", default=list(GRID))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--docs", type=Path, help="write the table into learning_rates.md there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.model:
        texts = Texts(given.model, given.train, given.test)
        for cell in cells(given):
            if cell not in stored(given.out):
                started = time.perf_counter()
                after = trained(given.model, texts, cell)
                took = time.perf_counter() - started
                keep(given.out, cell._asdict() | {"perplexity": after, "seconds": took})
                print(*cell, f"{after:.3f}, {took:.0f} s", flush=True)
    made = tables(given.out)
    print(*made.values())
    if given.docs:
        fill(given.docs / PAGE, made)


if __name__ == "__main__":
    main()
