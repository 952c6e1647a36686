"""What a run costs before and inside its first round.   python benchmarks/start_up.py

Seconds, one thread: the command line's help, the imports, every part of the default configuration, and one client's local
training against a plain torch loop over the same batches (median of five, in turn).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

from secure_fed.learning.data import notes, partition


def seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def show(name: str, value: float, unit: str = "s") -> None:
    print(f"{name:<58}{value:8.3f} {unit}")


def plain_loop(federation: Any, client: Any, trainable: list[str]) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from secure_fed.learning.data.encode import batches

    model = federation.assembly.problem.model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    for batch in batches(client.examples, 16, federation.assembly.problem.collate, np.random.default_rng(0)):
        inputs = {name: value for name, value in batch.inputs.items() if name != "labels"}
        optimizer.zero_grad()
        cross_entropy(model(**inputs).logits, batch.inputs["labels"]).backward()
        optimizer.step()


def main() -> None:
    show("secure-fed --help", seconds(lambda: subprocess.check_output([sys.executable, "-m", "secure_fed", "--help"])))
    rows: list[Any] = []
    show("20,000 notes", seconds(lambda: rows.append(notes.generate(20_000, seed=0, split="train"))))
    rng = np.random.default_rng(0)
    show("1,000 clients over them, Dirichlet", seconds(lambda: partition.dirichlet(rows[0].label, 1000, 10.0, rng)))
    made: dict[str, Any] = {}

    def imports() -> None:
        import torch

        from secure_fed import Federation, RunConfig
        from secure_fed.learning.training.local import Job, train

        torch.set_num_threads(1)
        made.update(federation=Federation, config=RunConfig(), train=train, job=Job)
        import transformers.models.bert.modeling_bert  # noqa: F401

    show("imports", seconds(imports))
    show(
        "default configuration, up to its first round",
        seconds(lambda: made.update(it=made["federation"](made["config"]))),
    )
    it = made["it"]
    client, plan = max(it.clients, key=lambda one: len(one.examples)), it.server.plan(it.initial)

    def ours() -> None:
        rng = np.random.default_rng(0)
        settings = it.config.training
        job = made["job"](it.initial.tensors, plan.trainable, client.examples, it.parts.collate, settings, 1e-3, rng)
        made["train"](it.objective, job)

    pairs = [(seconds(ours), seconds(lambda: plain_loop(it, client, list(plan.trainable)))) for _ in range(6)][1:]
    show(f"local training of one client, {len(client.examples)} notes", statistics.median(pair[0] for pair in pairs))
    show("  against a plain torch loop", statistics.median(a / b for a, b in pairs), "x")


if __name__ == "__main__":
    main()
