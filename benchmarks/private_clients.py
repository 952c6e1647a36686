"""The cost of client-level privacy in accuracy for each method, at three sizes of federation, on public text.

    python benchmarks/private_clients.py DATA [--sizes middle] [--methods NAME ...] [--epsilons 8] [--seeds 2] [--docs docs]
    one cell: python benchmarks/private_clients.py DATA --sizes small --methods ffa_lora --heads trained --epsilons 8 --seeds 1

DATA contains a folder sst2, with train.jsonl.gz and test.jsonl.gz of `text` and `label`. Clients of three sentences (one
sentence for 60,000 clients) take part once each, by a public order, a twentieth in each of 20 rounds, and make one step of SGD.
With --local the number of local steps and their rate are searched, too, for the methods given: one step and three, at three
rates.
Clipping is so strong that nearly all contributions have the clip norm as their length. The server has a momentum of 0.7, except
for the methods in MEANS, which refuse it. Delta is 1e-5. At epsilon inf contributions are clipped as under privacy, and the
noise multiplier is 0.001, too small to affect any accuracy.

The encoder is all-MiniLM-L6-v2 (the `bench` extra). Its first five layers are frozen and run once for each text. Adapters are
on query and value of the last layer. The head takes the standardised mean over tokens. It is `trained` from zero, `warm`
(trained from a start made of public descriptions of the classes) or `frozen` at that start.

In the way "left open" the run itself chooses the rate, the clip norm, momentum and the server's steps, under correlated noise,
and nothing is searched.

Each method's clip norm is the best of CLIPS in the small federation at epsilon 8, on another draw of the training texts and on
test texts that no table uses; this choice is charged to no epsilon. For a frozen head there are three more values. Every
finished run is one line of --out and is not run again. Without DATA nothing is run, and --docs writes the tables of
private_utility.md from the stored runs.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from last_layer import SCALES, Item, prepared, pretrained, zero_shot
from private_clients_cells import (
    CLIPS,
    EPSILONS,
    HEADS,
    LOCAL,
    METHODS,
    OPEN,
    SEARCHED,
    SIZES,
    TEXTS,
    WAYS,
    Cell,
    settings,
)
from private_clients_page import page
from private_silos import Head, collate, featured, padded
from runs_file import Runs, fill
from torch import nn

from secure_fed import Federation, RunConfig

STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "private_utility.md"


class Task:
    """The texts, and the encoder's last layer with a classifier made of descriptions of the classes."""

    def __init__(self, data: Path, cache: Path) -> None:
        tokenizer, encoder = pretrained()
        self.top = zero_shot(tokenizer, encoder, SCALES["sst2"].classes).float()
        self.config = encoder.config  # its width determines the rate
        self.train, self.test = ([padded(item) for item in part] for part in prepared(data / "sst2", cache, TEXTS))
        labels = [item["labels"] for item in self.test]
        self.commonest = max(map(labels.count, set(labels))) / len(labels)
        self._known: dict[int, Item] = {}  # by id of an item: its features, for the head alone

    def parts(self, size: str, seed: int) -> tuple[list[list[Item]], list[Item]]:
        """Clients and test texts. The search has a permutation of its own, and tests on training texts that no table uses."""
        clients, each = SIZES[size]
        order = np.random.default_rng(seed if seed >= 0 else 2**32).permutation(TEXTS - 3000)[: clients * each]
        test = self.test if seed >= 0 else self.train[TEXTS - 3000 : TEXTS - 2000]
        return [[self.train[int(i)] for i in order[at : at + each]] for at in range(0, clients * each, each)], test

    def accuracy(self, cell: Cell) -> float:
        top, (clients, test) = copy.deepcopy(self.top), self.parts(cell.size, cell.seed)
        if cell.head == "trained":
            nn.init.zeros_(top.classifier.weight)
        model: nn.Module = top
        if cell.method == "head alone":
            flat = featured(self.top, [*itertools.chain(*clients), *test], self._known)
            each = len(clients[0])
            clients = [flat[at : at + each] for at in range(0, len(clients) * each, each)]
            model, test = Head(top), flat[len(clients) * each :]
        model.config = self.config
        config = RunConfig.from_dict(settings(cell))
        result = Federation(config, model=model, train=clients, test=test, collate=collate).run()
        return float(result.records[-1]["accuracy"])


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"measured": page(out)}


def best_clip(accuracy: Runs[Cell], head: str, method: str) -> float:
    """The best clip norm in the small federation, where noise is largest, with the public order and independent noise."""
    return max(CLIPS[head], key=lambda clip: accuracy(Cell("small", head, "schedule", method, SEARCHED, clip, -1)))


def best_local(accuracy: Runs[Cell], head: str, method: str, steps: int) -> tuple[float, float]:
    """The best clip norm and rate for this number of local steps, searched as in `best_clip`."""
    tried = itertools.product(CLIPS[head], (rate for count, rate in LOCAL if count == steps))
    usual = Cell("small", head, "schedule", method, SEARCHED, 0.0, -1, steps)
    return max(tried, key=lambda pair: accuracy(usual._replace(clip=pair[0], rate=pair[1])))


def run_all(given: argparse.Namespace, accuracy: Runs[Cell]) -> None:
    some = itertools.product(given.sizes, range(given.seeds), given.heads, given.methods, given.epsilons, given.ways)
    for size, seed, head, method, epsilon, way in some:
        if (head, method) != ("frozen", "head alone") and (math.isfinite(epsilon) or way == given.ways[0]):
            clip = 0.0 if way == OPEN else best_clip(accuracy, head, method)
            cell = Cell(size, head, way if math.isfinite(epsilon) else "schedule", method, epsilon, clip, seed)
            accuracy(cell)
            for count in sorted({steps for steps, _ in LOCAL}) if given.local else ():
                clip, rate = best_local(accuracy, head, method, count)
                accuracy(cell._replace(clip=clip, steps=count, rate=rate))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["schedule"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--local", action="store_true", help="search the local steps and their rate, too")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="make runs again that are there")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "last_layer_cache")
    parser.add_argument(
        "--docs", type=Path, help="write the tables of private_utility.md there, from all that --out holds"
    )
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    if given.data:
        task = functools.cache(lambda: Task(given.data, given.cache))
        make = lambda cell: (task().accuracy(cell), task().commonest)  # noqa: E731
        run_all(given, Runs(Cell, given.out, make, again=given.again))
    if given.docs:
        fill(given.docs / PAGE, tables(given.out))


if __name__ == "__main__":
    main()
