"""FedARA's time beside FedLoRA's: a client's computing time, and its transfer time at 1 MB/s.

    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/fedara_time.py [--repeats 2] [--rounds 20]

Wu et al. (arXiv 2501.14406, sections VI-B and VI-C) state that FedARA's local training takes 10.8 % less time than FedLoRA's,
because modules without a rank are skipped, and the whole training 24 to 49 % less on three devices at 1 MB/s.

All-MiniLM-L6-v2 (the `bench` extra) on the built-in notes, 20 clients of two labels each, four of them in a round, each with 4
local steps of 8 notes, one after the other. FedARA goes from rank 8 to 2 between the second round and the last two fifths. The
methods alternate. Seconds are for one client in one round, and of this process alone (`time.process_time`), so that other work
on the machine counts little. The result on a faster or slower device follows from the two parts.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from claims import encoder
from timing import at_most, machine, show

from secure_fed import Federation, RunConfig

COHORT, MEGA, RANK, FINAL = 4, 1e6, 8, 2
LOCAL, WHOLE = 0.892, 0.76  # the stated upper limits


@dataclass
class Watch:
    """Records a client's seconds and megabytes in every round."""

    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    last: float = 0.0

    def on_run_begin(self, *_: Any) -> None:
        self.last = time.process_time()

    def on_round_end(self, record: dict[str, Any], _: Any) -> None:
        now = time.process_time()
        self.seconds.append((now - self.last) / COHORT)
        self.megabytes.append((record["bytes_up"] + record["bytes_down"]) / COHORT / MEGA)
        self.last = now


def run(method: dict[str, Any], rounds: int) -> Watch:
    watch = Watch()
    config = RunConfig.from_dict(
        {
            "model": {"name": str(encoder()), "pooling": "model", "max_length": 48},
            "data": {"examples": 1000, "test_examples": 50, "partition": "pathological", "labels_per_client": 2},
            "federation": {"clients": 20, "cohort": COHORT, "rounds": rounds},
            "training": {"steps": 4, "batch_size": 8, "lr_schedule": "linear", "together": 1},
            "method": method,
            "evaluation": {"every": rounds + 1, "audit_fraction": 0.0},
        }
    )
    Federation(config, callbacks=[watch]).run()
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("torch", "transformers", "peft") + "; one thread")
    methods = {
        "fedlora": {"name": "fedlora", "rank": RANK, "alpha": 16.0},
        "fedara": {
            "name": "fedara",
            "rank": RANK,
            "alpha": 16.0,
            "final_rank": FINAL,
            "warmup_rounds": 1,
            "final_rounds": 2 * given.rounds // 5,
        },
    }
    found: dict[str, list[Watch]] = {name: [] for name in methods}
    for _ in range(given.repeats):
        for name, method in methods.items():
            found[name].append(run(method, given.rounds))
    settled = given.rounds - 2 * given.rounds // 5  # the rounds until FedARA has reached its final rank
    of = (
        slice(1, -1),
        slice(settled, -1),
    )  # the first round includes a trial of the model, and the last one the test set
    print(f"{'':10}{'local s':>9}{'of them late':>14}{'MB':>8}{'late':>8}{'s at 1 MB/s':>13}")
    means = {}
    for name, watches in found.items():
        local, late = (fmean(fmean(one.seconds[part]) for one in watches) for part in of)
        sent, lately = (fmean(fmean(one.megabytes[part]) for one in watches) for part in of)
        means[name] = (local, late, local + sent)
        print(f"{name:10}{local:9.3f}{late:14.3f}{sent:8.3f}{lately:8.3f}{local + sent:13.3f}")
    ratios = [ours / theirs for ours, theirs in zip(means["fedara"], means["fedlora"], strict=True)]
    show(
        [
            at_most("local seconds over FedLoRA's, all rounds", ratios[0], LOCAL),
            at_most("local seconds over FedLoRA's, once ranks are given up", ratios[1], LOCAL),
            at_most("seconds at 1 MB/s over FedLoRA's, all rounds", ratios[2], WHOLE),
        ]
    )


if __name__ == "__main__":
    main()
