"""The cost of example-level privacy in accuracy for 5, 10 and 20 silos, on public text and with a trained head.

    python benchmarks/private_silos.py [DATA] [--only sst2] [--silos 10] [--seeds 3] [--heads trained] [--docs docs]
    one cell: python benchmarks/private_silos.py DATA --only sst2 --heads trained --methods fedlora --epsilons 8 --seeds 1

DATA contains a folder for each data set, with train.jsonl.gz and test.jsonl.gz of `text` and `label` (`public_sets.py`
makes TREC's). Each silo has 1,000 texts, or its share of the data's first half: 930 of AG News with 10 silos and 465 with
20, 800 of SST-2 with 20, 545 of TREC with 5 and 272 with 10. All silos take part in each of four rounds of one pass:
batches of 256 by secret coins, gradients clipped to norm 1, noise in every step, delta 1e-5. At epsilon inf there is neither
noise nor clipping, and the rate falls at the end.

The encoder is all-MiniLM-L6-v2 (the `bench` extra). Its first five layers are frozen and run once for each text, which makes
this affordable. Adapters are on query and value of the last layer. The head takes the standardised mean over tokens. A trained
head starts at zero, a described one from descriptions of the classes; a frozen one is made from them and never trains. `head
alone` trains only a head.

Each method's learning rate is the best of `rates` at epsilon 8, and separately without privacy, on silos and test texts that
the table does not use; this choice is charged to no epsilon. Every finished run is one line of --out and is not run again.
Without DATA nothing is run, and --docs writes the page from the stored runs.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from last_layer import SCALES, Item, Top, prepared, pretrained, zero_shot
from private_silos_cells import EACH, EPSILONS, HEADS, METHODS, SEARCHED, SILOS, Cell, rates, settings
from private_silos_page import page
from runs_file import Runs, accuracies, fill, lines
from torch import Tensor, nn
from torch.nn import functional

from secure_fed import Federation, RunConfig

STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "private_silos.md"
_TO = 8  # widths of texts are multiples


class Head(nn.Module):
    """The classifier of a `Top` on its features."""

    def __init__(self, top: Top) -> None:
        super().__init__()
        self.classifier = top.classifier

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.classifier(features)
        return scores


def padded(item: Item) -> Item:
    """The item padded to a multiple of `_TO` tokens, so that texts have few shapes."""
    hidden, more = item["hidden"], -len(item["hidden"]) % _TO
    mask = torch.arange(len(hidden) + more) < len(hidden)
    return {"hidden": functional.pad(hidden, (0, 0, 0, more)), "mask": mask, "labels": item["labels"]}


def collate(items: Sequence[Item]) -> dict[str, Tensor]:
    labels = torch.tensor([item["labels"] for item in items])
    if "features" in items[0]:
        return {"features": torch.stack([item["features"] for item in items]), "labels": labels}
    hidden, mask = (nn.utils.rnn.pad_sequence([item[name] for item in items], True) for name in ("hidden", "mask"))
    return {"hidden": hidden.float(), "mask": mask, "labels": labels}


class Task:
    """A data set: its texts, and the encoder's last layer with a zero-shot classifier."""

    def __init__(self, data: str, folder: Path, cache: Path) -> None:
        tokenizer, encoder = pretrained()
        self.top = zero_shot(tokenizer, encoder, SCALES[data].classes).float()
        self.train, self.test = ([padded(item) for item in part] for part in prepared(folder / data, cache))
        labels = [item["labels"] for item in self.test]
        self.commonest = max(map(labels.count, set(labels))) / len(labels)
        self._known: dict[int, Item] = {}  # by id of an item: its features, for the head alone

    def parts(self, seed: int, count: int) -> tuple[list[list[Item]], list[Item]]:
        """Silos and test texts. The search uses the second half of the training texts, and tests on a part of it."""
        half = len(self.train) // 2
        if seed < 0:
            texts, test = self.train[half + len(self.test) :], self.train[half : half + len(self.test)]
            order = np.arange(len(texts))
        else:
            texts, test = self.train[:half], self.test
            order = np.random.default_rng(seed).permutation(half)
        each = min(EACH, len(order) // count)
        return [[texts[int(i)] for i in order[silo * each : (silo + 1) * each]] for silo in range(count)], test

    def accuracy(self, cell: Cell) -> float:
        top, (silos, test) = copy.deepcopy(self.top), self.parts(cell.seed, cell.silos)
        if cell.head == "trained":
            nn.init.zeros_(top.classifier.weight)
        model: nn.Module = top
        if cell.method == "head alone":
            silos = [featured(self.top, silo, self._known) for silo in silos]
            test = featured(self.top, test, self._known)
            model = Head(top)
        config = RunConfig.from_dict(settings(cell))
        result = Federation(config, model=model, train=silos, test=test, collate=collate).run()
        return float(result.records[-1]["accuracy"])


@torch.no_grad()
def featured(top: Top, items: Sequence[Item], known: dict[int, Item]) -> list[Item]:
    """The items with features instead of tokens. known: features computed before, by id of the item; new ones are added."""
    new = [item for item in items if id(item) not in known]
    for some in (new[at : at + 64] for at in range(0, len(new), 64)):
        batch = collate(some)
        features = top.features(batch["hidden"], batch["mask"])
        for item, found in zip(some, features, strict=True):
            known[id(item)] = {"features": found, "labels": item["labels"]}
    return [known[id(item)] for item in items]


def best_rate(accuracy: Runs[Cell], data: str, head: str, method: str, epsilon: float, silos: int) -> float:
    searched = SEARCHED if math.isfinite(epsilon) else epsilon
    return max(rates(silos), key=lambda rate: accuracy(Cell(data, head, method, searched, rate, -1, silos)))


def commonest(out: Path) -> dict[str, float]:
    """By data set, the test accuracy of always predicting the commonest label."""
    return {run["data"]: run["commonest"] for run in lines(out)}


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"measured": page(accuracies(Cell, out), commonest(out))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=list(SCALES), default=list(SCALES))
    parser.add_argument("--silos", nargs="+", type=int, choices=SILOS, default=[10])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="make runs again that are there")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "last_layer_cache")
    parser.add_argument(
        "--docs", type=Path, help="write the tables of private_silos.md there, from all that --out holds"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.data:
        task = functools.cache(lambda data: Task(data, given.data, given.cache))
        make = lambda cell: (task(cell.data).accuracy(cell), task(cell.data).commonest)  # noqa: E731
        run_all(given, Runs(Cell, given.out, make, again=given.again))
    if given.docs:
        fill(given.docs / PAGE, tables(given.out))


def run_all(given: argparse.Namespace, accuracy: Runs[Cell]) -> None:
    for seed, data, silos, head in itertools.product(range(given.seeds), given.only, given.silos, given.heads):
        for method, epsilon in itertools.product(given.methods, given.epsilons):
            if (head, method) != ("frozen", "head alone"):
                rate = best_rate(accuracy, data, head, method, epsilon, silos)
                accuracy(Cell(data, head, method, epsilon, rate, seed, silos))


if __name__ == "__main__":
    main()
