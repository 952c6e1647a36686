"""The cost of a run before and in its first round.   python benchmarks/start_up.py

Seconds, one thread: commands that only print, and commands that end with a wrong setting; the imports, every part of the
default configuration, and one client's local training compared with a plain torch loop over the same batches (median of five,
alternating).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from timing import at_most, machine, medians, ratio, show, timed, turns

from secure_fed.learning.data import notes, partition

COMMANDS = (
    ("--help",),
    ("config", "init"),
    ("methods",),
    ("train", "--set", "method.name=lora"),
    ("train", "--set", "data.train=nowhere.csv"),
)


def line(name: str, value: float, unit: str = "s") -> None:
    print(f"{name:<58}{value:8.3f} {unit}")


def plain_loop(assembly: Any, client: Any, trainable: list[str]) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from secure_fed.learning.data.encode import batches

    model = assembly.problem.model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    for batch in batches(client.examples, 16, assembly.problem.collate, np.random.default_rng(0)):
        inputs = {name: value for name, value in batch.inputs.items() if name != "labels"}
        optimizer.zero_grad()
        cross_entropy(model(**inputs).logits, batch.inputs["labels"]).backward()
        optimizer.step()


def command(words: Sequence[str]) -> None:
    """Run one command; commands with a wrong setting are timed until their error."""
    subprocess.run([sys.executable, "-m", "secure_fed", *words], capture_output=True, check=False)


def imports() -> None:
    import torch

    import secure_fed.federation
    import secure_fed.learning.training.local  # noqa: F401

    torch.set_num_threads(1)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(machine("torch", "transformers", "numpy") + "; one thread")
    for words in COMMANDS:
        line(" ".join(("secure-fed", *words)), timed(partial(command, words))())
    rows: list[Any] = []
    line("20,000 notes", timed(lambda: rows.append(notes.generate(20_000, seed=0, split="train")))())
    rng = np.random.default_rng(0)
    line("1,000 clients over them, Dirichlet", timed(lambda: partition.dirichlet(rows[0].label, 1000, 10.0, rng))())
    line("imports", timed(imports)())
    from secure_fed import Federation
    from secure_fed.learning.training.local import Job, train

    made: list[Any] = []
    start = timed(lambda: made.append(Federation()))()
    line("default configuration, up to its first round", start)
    assembly, config = made[0].assembly, made[0].config
    client = max(assembly.clients, key=lambda one: len(one.examples))
    trainable = assembly.server.plan(assembly.initial).trainable

    def ours() -> None:
        rng = np.random.default_rng(0)
        before, collate = assembly.initial.tensors, assembly.problem.collate
        train(assembly.objective, Job(before, trainable, client.examples, collate, config.training, 1e-3, rng))

    ways = {"ours": timed(ours), "plain": timed(lambda: plain_loop(assembly, client, list(trainable)))}
    found = turns(ways, 5, warm=1)
    line(f"local training of one client, {len(client.examples)} notes", medians(found)["ours"])
    line("  against a plain torch loop", ratio(found["ours"], found["plain"]), "x")
    show([at_most("seconds from the imports to the first round", start, 2.0)])


if __name__ == "__main__":
    main()
