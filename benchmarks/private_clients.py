"""The cost of client-level privacy in accuracy for each method, at three sizes of federation, on public text.

    python benchmarks/private_clients.py DATA [--sizes middle] [--methods NAME ...] [--epsilons 8] [--seeds 2] [--docs docs]
    one cell: python benchmarks/private_clients.py DATA --sizes small --methods ffa_lora --heads trained --epsilons 8 --seeds 1

DATA contains a folder sst2, with train.jsonl.gz and test.jsonl.gz of `text` and `label`. Clients of three sentences (one
sentence for 60,000 clients) take part once each, by a public order, a twentieth in each of 20 rounds, and make one step of SGD.
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
from typing import Any, NamedTuple

import numpy as np
import torch
from last_layer import SCALES, Item, prepared, pretrained, zero_shot
from private_silos import LORA, Head, collate, featured, padded
from runs_file import Runs
from torch import nn

from secure_fed import Federation, RunConfig

TEXTS, ROUNDS, DELTA, SEARCHED = 66_000, 20, 1e-5, 8.0
NONE = 0.001  # the noise multiplier at epsilon inf, the smallest allowed
SIZES = {"small": (2_000, 3), "middle": (20_000, 3), "large": (60_000, 1)}  # clients, and texts of each client
EPSILONS, HEADS = (math.inf, 8.0, 3.0, 1.0), ("trained", "warm", "frozen")
_USUAL = (0.1, 0.3, 1.0)
CLIPS = {
    "trained": _USUAL,
    "warm": _USUAL,
    "frozen": (0.01, 0.03, *_USUAL, 3.0),
}  # without the head's part, steps differ more
FRA = {"name": "fra_lora"} | LORA
METHODS: dict[str, dict[str, Any]] = {
    "head alone": {"name": "fedft"},
    "bitfit": {"name": "bitfit"},
    **{name: {"name": name} | LORA for name in ("fedlora", "ffa_lora", "rolora")},
    **{f"fra_then_ffa, {how}": {"name": "fra_then_ffa", "denoise": how} | LORA for how in ("tangent", "shrink")},
    **{f"fra_lora, {how}": FRA | {"denoise": how} for how in ("tangent", "none", "shrink")},
    "fra_lora, sketch": FRA | {"transport_form": "sketch", "denoise": "shrink"},
    **{name: {"name": name} | LORA for name in ("fedsvd", "fedask", "fedpower")},
    "federa, A frozen": {"name": "federa", "rule": "ffa_lora"} | LORA,
}
MEANS = ("rolora", "fra_lora, sketch", "fedsvd", "fedask", "fedpower")  # their rounds use changing bases
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "schedule": {},
    "correlated": {"privacy": {"correlation": "banded"}},
    "coins": {"federation": {"sampling": "poisson"}},
    "left open": {"privacy": {"correlation": "banded"}},
}
OPEN = "left open"  # the way in which the run itself chooses steps and clip norm
STEEP = 1.0  # the rate of the local step, at which nearly every contribution is longer than the clip norm


class Cell(NamedTuple):
    """One run. seed: of clients, their order, adapters and head; -1 in the search, which uses other texts."""

    size: str
    head: str
    way: str
    method: str
    epsilon: float
    clip: float
    seed: int


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


def settings(cell: Cell) -> dict[str, Any]:
    clients, each = SIZES[cell.size]
    method = dict(METHODS[cell.method])
    if (cell.way, cell.method) == (OPEN, "head alone"):
        method = {
            "name": "head",
            "modules_to_save": ["classifier"],
        }  # the rate for a head, not for all weights
    if cell.head != "frozen" and cell.method != "head alone":
        method["modules_to_save"] = ["classifier"]
    tables: dict[str, dict[str, Any]] = {
        "federation": {
            "cohort": clients // ROUNDS,
            "rounds": ROUNDS,
            "seed": max(0, cell.seed),
            "sampling": "schedule",
            "server_optimizer": "mean" if cell.method in MEANS else "momentum",
        },
        "method": method,
        "training": {"lr": STEEP, "steps": 1, "batch_size": each, "optimizer": "sgd"},
        "evaluation": {"every": ROUNDS, "phantoms": 0},
        "privacy": {"unit": "client", "delta": DELTA, "clip_norm": cell.clip, "correlation": "none"},
    }
    if tables["federation"]["server_optimizer"] == "momentum":
        tables["federation"]["server_momentum"] = 0.7
    if math.isfinite(cell.epsilon):
        tables["privacy"]["epsilon"] = cell.epsilon
    else:
        tables["privacy"]["noise_multiplier"] = NONE
    for table, own in WAYS[cell.way].items():
        tables[table] |= own
    if cell.way == OPEN:
        for name in ("server_optimizer", "server_momentum"):
            tables["federation"].pop(name, None)
        del tables["training"], tables["privacy"]["clip_norm"]
    return tables


def best_clip(accuracy: Runs[Cell], head: str, method: str) -> float:
    """The best clip norm in the small federation, where noise is largest, with the public order and independent noise."""
    return max(CLIPS[head], key=lambda clip: accuracy(Cell("small", head, "schedule", method, SEARCHED, clip, -1)))


def run_all(given: argparse.Namespace, accuracy: Runs[Cell]) -> None:
    some = itertools.product(given.sizes, range(given.seeds), given.heads, given.methods, given.epsilons, given.ways)
    for size, seed, head, method, epsilon, way in some:
        if (head, method) != ("frozen", "head alone") and (math.isfinite(epsilon) or way == given.ways[0]):
            clip = 0.0 if way == OPEN else best_clip(accuracy, head, method)
            accuracy(Cell(size, head, way if math.isfinite(epsilon) else "schedule", method, epsilon, clip, seed))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["schedule"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="make runs again that are there")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".jsonl"))
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
        from private_clients_page import put

        put(given.docs / "private_utility.md", given.out)


if __name__ == "__main__":
    main()
