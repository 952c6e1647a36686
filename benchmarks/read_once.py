"""The head alone on a frozen sentence encoder: each text read once, compared with reading it in every step and with Opacus.

    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/read_once.py [--repeats 3]

A model of the shape of MiniLM-L6 with random weights, whose head reads the mean over tokens. One client has 256 texts of 8 to
64 tokens, each protected; a step draws 64 on average. One thread. All ways alternate; every turn starts with no text read, and
is made with the steps of one pass over the texts and of eight. Prints medians over the turns: of seconds, and of the ratio to
Opacus's in the same turn. The trial of the model is included.

    once       `train_together`: secret coins, per-example gradients, clipping, noise, AdamW, as in a run
    anew       the same with a model that reads a text whenever it is drawn
    opacus     Opacus's data loader with secret coins, its hooks (GradSampleModule) and its optimizer
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from private_step import CLIP, LABELS, LR, NOISE, SHAPE, opacus_step
from timing import Limit, at_most, machine, ratio, show, timed, turns
from torch.utils.data import DataLoader

from privacy.entropy import SystemEntropy
from privacy.mechanisms import Gaussian
from secure_fed import MeanPooledForSequenceClassification
from secure_fed.config import TrainingConfig
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.parameters import read, train_only
from secure_fed.learning.models.mean_pooled import MeanPooledConfig
from secure_fed.learning.read_once import read_once
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes.trainings import train_together
from secure_fed.learning.training.local import Job, PrivateSteps
from secure_fed.learning.training.objective import Objective

TEXTS, BATCH, LONGEST = 256, 64, 64
HEAD = ["classifier.weight", "classifier.bias"]


def model() -> Any:
    from transformers import BertConfig

    torch.manual_seed(0)
    made = MeanPooledForSequenceClassification(MeanPooledConfig(BertConfig(**SHAPE), num_labels=LABELS))
    train_only(made, HEAD)
    return made


def texts() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.linspace(8, LONGEST, TEXTS).astype(int))
    return [{"input_ids": rng.integers(1000, 20_000, n), "labels": i % LABELS} for i, n in enumerate(lengths)]


def ours(items: list[Any], collate: Collate, steps: int, *, once: bool) -> Callable[[], object]:
    made, entropy = model(), SystemEntropy()
    settings = TrainingConfig(batch_size=BATCH)

    def trained() -> None:
        objective = Objective(made, classification.loss, torch.device("cpu"), longest=LONGEST)
        if once:
            read_once(objective, HEAD, 8)
        private = PrivateSteps(Gaussian(NOISE), CLIP, steps, entropy.stream("steps"))
        job = Job(read(made, HEAD), HEAD, items, collate, settings, LR, np.random.default_rng(0), private)
        train_together(objective, [job])

    return trained


def opacus(items: list[Any], collate: Collate, steps: int) -> Callable[[], object]:
    from opacus.data_loader import DPDataLoader

    def trained() -> None:
        step = opacus_step(model(), HEAD, BATCH)
        loader = DPDataLoader.from_data_loader(
            DataLoader(items, batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]
        )
        for _ in range(steps * BATCH // TEXTS):
            for batch in loader:
                step(batch)

    return trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    print(machine("torch", "transformers", "opacus") + "; one thread")
    items, collate, limits = texts(), Collate(0), list[Limit]()
    for passes, most in ((1, 1.5), (8, 0.3)):
        steps = passes * TEXTS // BATCH
        ways = {
            "once": ours(items, collate, steps, once=True),
            "anew": ours(items, collate, steps, once=False),
            "opacus": opacus(items, collate, steps),
        }
        found = turns({name: timed(way) for name, way in ways.items()}, repeats)
        print(f"{passes} pass{'es' if passes > 1 else ''} over the texts, {steps} steps")
        for name, seconds in found.items():
            print(f"    {name:8}{statistics.median(seconds):8.1f} s{ratio(seconds, found['opacus']):8.2f}")
        limits.append(
            at_most(f"once over Opacus, passes over the texts: {passes}", ratio(found["once"], found["opacus"]), most)
        )
    show(limits)


if __name__ == "__main__":
    main()
