"""What `model.dtype = "bfloat16"` saves in memory, and costs in time and accuracy, beside float32.

    python benchmarks/half_precision.py MODEL TRAIN TEST [--steps 4] [--tokens 64]

MODEL: the folder of a causal language model. TRAIN, TEST: files of rows with `text` and `answer`, such as gsm8k's. One client
trains LoRA of rank 8 on all linear layers, in steps of two rows of at most `--tokens` tokens, without privacy. The loss on 8
test rows is measured before and after. Start and order are the same in both types; each type has a process of its own. Printed:
MiB of the base model's weights, and of the most anonymous memory from loading to the end, beyond what the process had before
(weights that are read in the type of their file are mapped from it, and are no part of this); CPU seconds a step, without
evaluations; the losses. Then the gradients of three rows at the last state, each clipped to the same
norm: the largest distance between the two types, in clip norms.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loading_memory import ROOT, anonymous, watched
from timing import machine

TYPES = ("float32", "bfloat16")
ROWS, GRADIENTS = 8, 3  # test rows; rows whose gradients are compared


def child(given: argparse.Namespace, dtype: str, out: Path) -> dict[str, float]:
    import torch
    import transformers

    from secure_fed import Federation, RunConfig
    from secure_fed.learning.training.common_passes import step_gradients
    from secure_fed.learning.training.local import Placed

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    heads = {}
    for name, count in (("train", 2 * given.steps), ("test", ROWS)):
        path = Path(getattr(given, name))
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            heads[name] = out / f"{dtype}-{name}.jsonl"
            heads[name].write_text("".join(line for line, _ in zip(file, range(count), strict=False)))
    config = RunConfig.from_dict(
        {
            "model": {"name": given.model, "dtype": dtype, "max_length": given.tokens},
            "data": {
                "task": "causal_lm",
                "text_b": "answer",
                **{name: str(file) for name, file in heads.items()},
            },
            "federation": {"clients": 1, "cohort": 1, "rounds": 1},
            "method": {"name": "fedlora", "rank": 8, "target_modules": "all-linear"},
            "training": {"steps": given.steps, "batch_size": 2, "lr": 1e-3, "optimizer": "adamw"},
            "evaluation": {"audit_fraction": 0.0, "batch_size": 2},
        }
    )
    torch.nn.Linear(64, 64)(torch.zeros(2, 64)).sum().backward()
    before, peaks = anonymous(), list[float]()
    with watched(peaks):
        federation = Federation(config)
        assembly = federation.assembly
        model = assembly.problem.model
        base = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "lora_" not in name)
        evaluated = assembly.problem.metrics
        first = _loss(assembly, assembly.initial.tensors, evaluated)
        spent = time.process_time()
        result = federation.run()
        spent = time.process_time() - spent
        timer = time.process_time()
        last = _loss(assembly, result.state.tensors, evaluated)
        evaluation = time.process_time() - timer
    objective = assembly.objective
    trained = tuple(assembly.method.plan(result.state).trainable)
    placed = Placed.of(result.state.tensors, trained, objective.device)
    items = [assembly.problem.train[0][row] for row in range(GRADIENTS)]
    found = step_gradients.example_gradients(objective, assembly.problem.collate, placed, items)
    flat = torch.stack(
        [torch.cat([rows[row].flatten().double() for rows in found.values()]) for row in range(GRADIENTS)]
    )
    torch.save(flat / flat.norm(dim=1, keepdim=True), out / f"{dtype}.pt")
    step = (spent - evaluation) / given.steps
    return {"weights": base / 2**20, "peak": peaks[0] - before, "step": step, "before": first, "after": last}


def _loss(assembly: Any, tensors: Any, metrics: Any) -> float:
    from secure_fed.learning.evaluation import evaluate

    problem, objective = assembly.problem, assembly.objective
    return evaluate(objective.load(tensors), problem.test, problem.collate, metrics, 2, objective.device)["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "test"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if 2 * given.steps < GRADIENTS:
        parser.error(
            f"--steps is {given.steps}: the gradients of {GRADIENTS} training rows are compared, so give at least 2"
        )
    if given.child:
        print(json.dumps(child(given, given.child[0], Path(given.child[1]))))
        return
    import torch

    print(machine("torch", "transformers", "peft") + "; one thread", flush=True)
    print(
        f"{'':10}"
        + "".join(f"{name:>14}" for name in ("weights, MiB", "peak, MiB", "CPU s a step", "loss before", "after"))
    )
    settings = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as out:
        for dtype in TYPES:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", dtype, out]
            done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
            made = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{dtype:10}{made['weights']:14.0f}{made['peak']:14.0f}{made['step']:14.2f}{made['before']:14.4f}{made['after']:14.4f}",
                flush=True,
            )
        one, other = (torch.load(Path(out) / f"{dtype}.pt") for dtype in TYPES)
    print(f"clipped gradients of examples: at most {float((one - other).norm(dim=1).max()):.3f} clip norms apart")


if __name__ == "__main__":
    main()
